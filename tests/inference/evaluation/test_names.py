"""Names of drafters in tables: short, and distinct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.drafters import UNTRAINED, Given, load_proposer
from draftsmith.inference.evaluation.names import distinct_labels, distinct_names, short_name
from draftsmith.inference.evaluation.tuning.profile import key_of
from draftsmith.inference.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from tests.conftest import QUICKSTART

DRAFTERS = QUICKSTART.parent / "drafters"
MODEL = QUICKSTART.parent / "draft_model"


def test_names_are_short_and_those_of_folders() -> None:
    names = {
        "none": "plain",
        "ngram:length=8": "ngram:length=8",
        "ngram:length=8,name=words": "words",
        "runs/eagle/best": "eagle",
        "runs/eagle/best:dtype=bf16,length=3": "eagle",
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
        ("a/d:nodes=4", "b/d:nodes=4", "b/d"): ["a/d", "b/d:nodes=4", "b/d"],
        ("a/d:name=x", "b/d:name=y"): ["x", "y"],
    }
    for specs, labels in apart.items():
        assert list(distinct_labels(specs).values()) == labels
    ways = [SimpleNamespace(given=Given(spec)) for spec in ("none", "d:name=x", "e:name=x")]
    tuned: list[Any] = [SimpleNamespace(given=Given("d", ":tuned"))]
    other: list[Any] = [SimpleNamespace(name="assisted (x)"), SimpleNamespace(name="plain")]
    expected = ["plain", "x", "x-2", "d:tuned", "assisted (x)", "plain-2"]
    assert distinct_names([*ways, *tuned, *other]) == expected
    # what comes behind other ways must not change their names
    assert distinct_names(ways) == expected[:3]


def test_a_name_is_no_part_of_what_a_drafter_is() -> None:
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


def test_every_drafter_without_training_has_a_name_of_its_own() -> None:
    names = [short_name(name) for name in UNTRAINED]
    assert len({*names}) == len(UNTRAINED) and "plain" in names
