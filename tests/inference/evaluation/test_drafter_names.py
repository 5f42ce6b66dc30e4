"""Names of drafters in tables: short, and distinct."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.base.tree_settings import LOOKUP_SETTINGS
from draftsmith.inference.evaluation.drafter_names import (
    distinct_labels,
    distinct_names,
    short_name,
)
from draftsmith.inference.profile import key_of
from draftsmith.inference.proposers.contract import DrafterSpec
from draftsmith.inference.proposers.registry import (
    MODEL_FOLDER,
    UNTRAINED,
    load_proposer,
    trained_kind,
)
from draftsmith.inference.targets.target import load_target
from tests.conftest import QUICKSTART, ROOT

DRAFTERS = QUICKSTART.parent / "drafters"
MODEL = QUICKSTART.parent / "draft_model"
METHODS = ("medusa", "eagle", "dflash", "dspark", "mtp", "draft_model")


def test_names_are_short_and_those_of_folders() -> None:
    names = {
        "none": "plain",
        "ngram:length=8": "ngram:length=8",
        "ngram:length=8,name=words": "words",
        "runs/eagle/best": "eagle",
        "runs/eagle/best:dtype=bf16,length=3,nodes=4": "eagle:length=3,nodes=4",
        "runs/eagle/best:lookup=3": "eagle + lookup",
        "runs/eagle/best:lookup=3,length=1": "eagle:length=1 + lookup",
        "runs/eagle/best:lookup=3,lookup_length=8": "eagle + lookup=3,lookup_length=8",
        "runs/eagle/best:lookup=3,name=both": "both",
        "runs/eagle/checkpoints/step-000100/": "eagle",
        "/data/eagle-7b": "eagle-7b",
        "/data/eagle-7b:name=mine,length=3": "mine",
        "runs/plain": "runs/plain",
        "runs/ngram/best": "ngram/best",
    }
    assert {spec: short_name(spec) for spec in names} == names


def test_names_that_would_be_equal_say_what_differs() -> None:
    apart = {
        ("runs/eagle/best", "runs/eagle/last"): ["eagle/best", "eagle/last"],
        ("a/eagle/best", "b/eagle/best"): ["a/eagle", "b/eagle"],
        ("d:length=3,dtype=bf16", "d:length=4,dtype=bf16"): ["d:length=3", "d:length=4"],
        ("d", "d:length=4"): ["d", "d:length=4"],
        ("d:length=3,dtype=bf16", "d:length=3"): ["d:length=3,dtype=bfloat16", "d:length=3"],
        ("d:lookup=3", "d:lookup=4", "d"): ["d + lookup=3", "d + lookup=4", "d"],
        ("d:lookup=3", "d:lookup=4,nodes=2"): ["d + lookup", "d:nodes=2 + lookup"],
        ("a/d:nodes=4", "b/d:nodes=4", "b/d"): ["a/d:nodes=4", "b/d:nodes=4", "b/d"],
        ("a/d:nodes=4", "b/d"): ["a/d:nodes=4", "b/d"],
        ("a.b:Mine", "a.c:Mine:length=2"): ["a.b:Mine", "a.c:Mine:length=2"],
        ("a/d:name=x", "b/d:name=y"): ["x", "y"],
    }
    for specs, labels in apart.items():
        assert list(distinct_labels(specs).values()) == labels
    ways: list[Any] = [
        SimpleNamespace(spec=DrafterSpec(spec)) for spec in ("none", "d:name=x", "e:name=x")
    ]
    tuned: list[Any] = [SimpleNamespace(spec=DrafterSpec("d", ":tuned"))]
    other: list[Any] = [SimpleNamespace(name=name, spec=None) for name in ("assisted (x)", "plain")]
    expected = ["plain", "x", "x-2", "d:tuned", "assisted (x)", "plain-2"]
    assert distinct_names([*ways, *tuned, *other]) == expected
    # what comes behind other ways must not change their names
    assert distinct_names(ways) == expected[:3]


def test_display_name_does_not_affect_drafter_identity() -> None:
    spec = f"{DRAFTERS}/dspark"
    assert (
        key_of(f"{spec}:name=mine,length=3") == key_of(spec) == str((DRAFTERS / "dspark").resolve())
    )
    target = load_target(TargetConfig(str(QUICKSTART), device="cpu"))
    proposer: Any = load_proposer(f"{spec}:name=mine,length=3", target, pytest.fail)
    assert proposer.name == "dspark:length=3" and proposer.plan.length == 3
    assert distinct_names([proposer]) == ["mine"]
    # with a name alone, the tree is chosen as without one
    chosen, named = (
        load_proposer(spec + more, target, pytest.fail, choose=True) for more in ("", ":name=mine")
    )
    assert chosen.max_drafted == named.max_drafted


@pytest.mark.parametrize(
    "drafter",
    [*(name for name in UNTRAINED if name != "none"), *METHODS, "models/small"],
)
def test_no_setting_that_changes_what_is_drafted_is_dropped(drafter: str) -> None:
    """All settings of a kind, alone and together; one that is added later is shown as well."""
    kind = UNTRAINED.get(drafter) or trained_kind(drafter) or MODEL_FOLDER
    bare = short_name(drafter)
    shown = [key for key in kind.known if key not in ("name", "dtype", *LOOKUP_SETTINGS)]
    assert {*shown} >= {*kind.tree, *kind.own}
    for key in shown:
        assert short_name(f"{drafter}:{key}=7") == f"{bare}:{key}=7"
    every = ",".join(f"{key}=7" for key in shown)
    hidden = "".join(f",{key}=bf16" for key in ("dtype",) if key in kind.known)
    lookup = ",lookup=7" * kind.lookups
    ends = " + lookup" * kind.lookups
    assert short_name(f"{drafter}:{every}{hidden}{lookup}") == f"{bare}:{every}{ends}"


def test_generic_folder_names_are_replaced_by_the_method(tmp_path: Path) -> None:
    assert short_name(str(ROOT / "scripts/smollm2/drafter")) == "eagle"
    for name in ("a", "b"):
        for folder in ("drafter", "best"):
            (tmp_path / name / folder).mkdir(parents=True)
            (tmp_path / name / folder / "draftsmith.json").write_text('{"method": "medusa"}')
    specs = [f"{tmp_path}/a/drafter:length=2", f"{tmp_path}/b/drafter"]
    assert [*distinct_labels(specs).values()] == ["a/drafter:length=2", "b/drafter"]
    assert short_name(f"{tmp_path}/a/drafter") == "medusa" and short_name("no/drafter") == "drafter"
    assert short_name(f"{tmp_path}/a/best") == "a", "the run's folder says which it is"


def test_untrained_drafters_have_distinct_short_names() -> None:
    names = [short_name(name) for name in UNTRAINED]
    assert len({*names}) == len(UNTRAINED) and "plain" in names
