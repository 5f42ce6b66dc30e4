"""Spelling of command lines: what people type, and what jsonargparse is given."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from draftsmith.inference.settings import Sampling, TargetConfig
from draftsmith.train.command_line.parse import field_types, parse
from draftsmith.train.command_line.spelling import in_form, options_of, spelled
from draftsmith.train.config import Source
from draftsmith.train.methods.eagle import EagleRun
from draftsmith.train.options import DoctorOptions, PlanOptions


@dataclass
class Example:
    """Options of every kind."""

    target: TargetConfig
    from_: str = ""
    lr: float = 1.0
    tokens: int = 0
    params: float | None = None
    taps: list[int] | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    drafter: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    baselines: bool = True
    color: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stored: Literal["auto", "float32", "bfloat16"] = "auto"
    precision: Literal["no", "bf16"] = "no"


TYPES = field_types(Example)
FORMS = [
    ("--lr 3e-4", ["--lr=3e-4"]),
    (
        "--target.device-map=x --dtype bfloat16",
        ["--target.device_map=x", "--target.dtype=bfloat16"],
    ),
    ("--target T --temperature 0.7", ["--target.path=T", "--sampling.temperature=0.7"]),
    ("--from X --color --no-baselines", ["--from_=X", "--color=true", "--baselines=false"]),
    ("--drafter a --drafter b,c", ["--drafter+=a", "--drafter+=b,c"]),
    ("--taps 2,4,7", ["--taps=[2,4,7]"]),
    ("--taps [2,4,7] --betas 0.8,0.9", ["--taps=[2,4,7]", "--betas=[0.8,0.9]"]),
    ("--taps null", ["--taps=null"]),
    (
        "--tokens 300M --params 8b --lr 1.5K",
        ["--tokens=300000000", "--params=8000000000", "--lr=1500"],
    ),
    (
        "--dtype half --stored bf16 --precision bfloat16",
        ["--target.dtype=half", "--stored=bfloat16", "--precision=bf16"],
    ),
    ("--target 8B", ["--target.path=8B"]),  # a text stays as it is
]


@pytest.mark.parametrize(("typed", "read"), FORMS)
def test_what_is_typed_becomes_what_is_read(typed: str, read: list[str]) -> None:
    assert spelled(typed.split(), TYPES) == read


def test_paths_of_sources_may_be_given_several_times() -> None:
    (read,) = spelled(["--sources", "a.jsonl,b.jsonl", "--sources", "c.jsonl"], TYPES)
    paths = [source["path"] for source in json.loads(read.removeprefix("--sources="))]
    assert paths == ["a.jsonl", "b.jsonl", "c.jsonl"]
    tables = '[{"path": "a", "weight": 2}]'
    assert spelled(["--sources", tables], TYPES) == [f"--sources={tables}"]


def test_a_value_may_begin_with_one_hyphen_and_an_option_may_have_none() -> None:
    assert [*options_of(["--lr", "-1", "word", "--flag"])] == [
        ("--lr", "-1"),
        ("word", None),
        ("--flag", None),
    ]


def test_an_option_for_one_value_is_not_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        spelled(["--lr", "1", "--lr=2"], TYPES)
    assert "--lr is given twice" in capsys.readouterr().err


def test_a_size_is_a_number_only_where_a_number_is_meant() -> None:
    kinds: list[tuple[Any, str, str]] = [
        (int, "2K", "2000"),
        (float | None, "1.25M", "1250000"),
        (float, "0.0001K", "0.1"),
        (str, "2K", "2K"),
        (int, "2X", "2X"),
    ]
    for kind, typed, read in kinds:
        assert in_form(kind, typed) == read


def test_options_by_their_former_names_are_read_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, _ = parse(PlanOptions, ["--run", "a.yaml", "--tokens", "300M"], "x")
    assert (plan.config, plan.tokens) == ("a.yaml", 3e8)
    doctor, _ = parse(DoctorOptions, ["--run=b.yaml"], "x")
    assert doctor.config == "b.yaml"
    words = ["--target", "T", "--output", "runs/x", "--data.sources", "a.jsonl"]
    run, _ = parse(EagleRun, [*words, "--heads.taps", "2,4,7"], "x")
    assert (run.out, run.data.sources, run.heads.taps) == ("runs/x", [Source("a.jsonl")], [2, 4, 7])
    config = tmp_path / "run.yaml"
    config.write_text("output: old\ntarget: {path: T}\ndata: {sources: [{path: a}]}\n")
    assert parse(EagleRun, ["--config", str(config)], "x")[0].out == "old"
    assert capsys.readouterr().err.splitlines() == [
        "warning: the option --run is called --config now; the old name works",
        "warning: the option --run is called --config now; the old name works",
        "warning: the option --output is called --out now; the old name works",
        f"warning: {config} has a key by its former name (output -> out); it is still read",
    ]
