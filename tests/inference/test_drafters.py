"""Settings of drafters, which are looked at before a target is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.proposers.registry import check_spec, parse_spec
from draftsmith.inference.targets.target import resolve_dtype
from tests.conftest import QUICKSTART

DRAFTERS = QUICKSTART.parent / "drafters"
MODEL = QUICKSTART.parent / "draft_model"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ngram:size=8", "drafter ngram has no setting 'size'"),
        ("ngram:length=0", "length must be a whole number of at least 1, not 0"),
        (f"{DRAFTERS}/dspark:bad=1", "dspark has no setting 'bad'; there are: length, width"),
        (f"{DRAFTERS}/dspark:length=0", "length must be a whole number of at least 1, not 0"),
        (f"{DRAFTERS}/dspark:slots=many", "slots must be a whole number of at least 1, not 'many'"),
        (f"{DRAFTERS}/dspark:length=8,nodes=3", "a tree of 8 levels needs at least as many nodes"),
        (f"{DRAFTERS}/dspark:lookup_length=4", "give lookup too"),
        (f"{DRAFTERS}/dspark:dtype=int8", "unsupported drafter dtype int8"),
        (f"{DRAFTERS}/eagle3:width=2000", "width can be 1024 at most"),
        (
            f"{DRAFTERS}/medusa:tree=best",
            "has no setting 'tree'; there are: length, width, nodes",
        ),
        (f"{DRAFTERS}/distill:width=1,nodes=3", "nodes is about trees; give width above 1 too"),
        (f"{DRAFTERS}/distill:name=two words", "name=two words is not a valid name"),
        (f"{DRAFTERS}/distill:name=plain", "name=plain is another drafter's"),
        (f"{MODEL}:slots=2", "has no setting 'slots'"),
    ],
)
def test_settings_are_looked_at_without_a_target(spec: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_spec(spec)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        "none", "ngram:length=8", "ngram:length=4,name=short",
        f"{DRAFTERS}/dspark:dtype=bf16,length=3,width=4,nodes=4",
        f"{DRAFTERS}/dspark:length=3", f"{DRAFTERS}/eagle3:length=2,width=1",
        f"{DRAFTERS}/eagle3:nodes=8,lookup=3", f"{DRAFTERS}/medusa:width=1,length=2",
        f"{DRAFTERS}/distill:length=3",
        f"{MODEL}:length=4,name=small-1.5", "missing.d",
    ],
)  # fmt: skip
def test_settings_that_a_drafter_has_pass(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("missing.d").mkdir()
    check_spec(spec)


@pytest.mark.parametrize(
    ("short", "full"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"),
     ("float", "float32"), ("fp64", "float64"), ("double", "float64"), ("float16", "float16")],
)  # fmt: skip
def test_short_dtype_names_are_expanded(short: str, full: str) -> None:
    assert TargetConfig("x", dtype=short).dtype == full
    assert resolve_dtype(short, torch.device("cpu")) == getattr(torch, full)
    assert parse_spec(f"d:dtype={short}")[1] == {"dtype": full}


def test_an_unknown_type_is_refused_when_it_is_given() -> None:
    with pytest.raises(UserError, match="unknown dtype 'int8'; use auto, float32, bfloat16"):
        TargetConfig("x", dtype="int8")


def test_a_damaged_folder_is_judged_on_loading(tmp_path: Path) -> None:
    (tmp_path / "draftsmith.json").write_text("{")
    check_spec(f"{tmp_path}:bad=1")
    (tmp_path / "draftsmith.json").write_text(json.dumps([1]))
    check_spec(f"{tmp_path}:bad=1")
