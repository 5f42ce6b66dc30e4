"""Spelling of command lines and config files, and the values that are read."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from draftsmith.command_line.fields import sized
from draftsmith.command_line.parse import OptionValues, given_options, options_from, parse
from draftsmith.commands.exporting import ExportOptions
from draftsmith.commands.extract import ExtractOptions
from draftsmith.commands.plan import PlanOptions
from draftsmith.commands.regenerate import RegenerateOptions
from draftsmith.heads.exchange.engines import ENGINES
from draftsmith.inference.base.costs import GPUS
from draftsmith.inference.base.settings import Sampling, TargetConfig, choice_named
from draftsmith.inference.evaluation.engines import ImitatedEngine
from draftsmith.inference.evaluation.options import SimulateOptions
from draftsmith.train.data.config import Source
from draftsmith.train.methods.registry import run_class_named


@dataclass
class Example:
    """Options of every kind."""

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    from_: str = ""
    lr: float = 1.0
    tokens: int = 0
    params: float | None = None
    taps: list[int] | None = None
    layers: int | list[int] | None = None
    chat: bool | str = False
    note: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    drafter: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    baselines: bool = True
    color: bool | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.5))
    stored: Literal["auto", "float32", "bfloat16"] = "auto"
    precision: Literal["no", "bf16"] = "no"


@dataclass
class Bare(Example):
    """Options, and words without an option."""

    words: list[str] = field(default_factory=list, metadata={"positional": "WORD"})


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("--lr 3e-4", {"lr": 3e-4}),
    ("--lr=3e-4", {"lr": 3e-4}),
    ("--target.device x --dtype bf16", {"target": TargetConfig("", "bfloat16", "x")}),
    ("--target T --seed 7", {"target": TargetConfig("T"), "sampling": Sampling(0.5, seed=7)}),
    ("--from X --color --no-baselines", {"from_": "X", "color": True, "baselines": False}),
    ("--drafter a --drafter b,c", {"drafter": ["a", "b,c"]}),
    ("--drafter [a,b] --drafter c", {"drafter": ["a", "b", "c"]}),
    ("--taps 2,4,7", {"taps": [2, 4, 7]}),
    ("--taps [2,4,7] --betas 0.8,0.9", {"taps": [2, 4, 7], "betas": (0.8, 0.9)}),
    ("--taps 5 --layers 4", {"taps": [5], "layers": 4}),
    ("--taps null --layers 4,5 --note null", {"layers": [4, 5]}),
    ("--tokens 300M --params 8b --lr 1.5K", {"tokens": 300_000_000, "params": 8e9, "lr": 1500.0}),
    ("--stored bf16 --precision bfloat16", {"stored": "bfloat16", "precision": "bf16"}),
    ("--target 8B", {"target": TargetConfig("8B")}),  # a text stays as it is
    ("--chat --lr -1", {"chat": True, "lr": -1.0}),
    ("--chat f.jsonl", {"chat": "f.jsonl"}),
    ("--kwargs '{a: false}' --kwargs.b true", {"kwargs": {"a": False, "b": True}}),
    ("--sources a,b --sources c", {"sources": [Source("a"), Source("b"), Source("c")]}),
    ("--sources '[{path: a, weight: 2}]'", {"sources": [Source("a", weight=2.0)]}),
]


@pytest.mark.parametrize(("typed", "values"), FORMS)
def test_what_is_typed_becomes_values(typed: str, values: dict[str, Any]) -> None:
    assert parse(Example, shlex.split(typed), "x") == Example(**values)


def test_later_values_win_and_a_list_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\ndrafter: [a]\nnote: 2026-01-02\nsampling: {seed: 3}\n")
    read = Example(lr=1e-3, drafter=["a"], note="2026-01-02", sampling=Sampling(0.5, seed=3))
    assert options_from(Example, {}, file) == parse(Example, ["--config", str(file)], "x") == read
    words = ["--lr", "2", "--config", str(file), "--drafter", "b", "--drafter", "c"]
    both = parse(Example, words, "x")
    assert both.lr == 1e-3 and both.drafter == ["b", "c"]


def test_printed_values_are_a_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--taps", "2,4", "--target", "T", "--sources", "a", "--kwargs.a", "no"]
    with pytest.raises(SystemExit) as ended:
        parse(Example, [*words, "--print-config"], "x")
    assert not ended.value.code
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert options_from(Example, {}, file) == parse(Example, words, "x")


def test_a_value_may_begin_with_one_hyphen_and_an_option_may_have_none() -> None:
    words = ["--lr", "-1", "word", "--color", "--no-baselines"]
    assert [*given_options(words, OptionValues(Bare))] == [
        ("lr", "-1"),
        ("words", "word"),
        ("color", True),
        ("baselines", False),
    ]


def test_a_former_name_that_is_still_read_is_the_option_of_today() -> None:
    words = ["--target", "T", "--data", "a", "--out", "b"]
    for name in ("max-new-tokens", "sampling.max-new-tokens"):
        assert parse(RegenerateOptions, [*words, f"--{name}", "5"], "x").max_new_tokens == 5
    given = {"target": "T", "data": "a", "out": "b", "sampling": {"max_new_tokens": 5}}
    assert options_from(RegenerateOptions, given).max_new_tokens == 5


def test_a_command_on_a_run_takes_the_options_of_the_run() -> None:
    words = ["--config", "c", "--out", "o", "--set", "seed=1", "--target", "T"]
    words += ["--optim.lr", "1e-4", "--no-retarget"]
    options = parse(ExtractOptions, words, "x")
    changes = ["seed=1", "target.path=T", "optim.lr=1e-4", "retarget=false"]
    assert (options.config, options.set) == ("c", changes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lr 1 --lr=2", "--lr is given twice; it takes one value"),
        ("--sources '[{weight: 1}]'", "--sources: path is missing"),
        ("--layers x", "--layers takes a whole number or whole numbers with commas"),
    ],
)
def test_unparsable_command_lines_are_refused_with_reason(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Example, shlex.split(words), "x")
    assert ended.value.code == 2 and f"error: {says}" in capsys.readouterr().err


def test_sizes_with_k_and_m_suffixes_are_parsed() -> None:
    typed = ["2K", "1.25M", "0.0001K", "2X", "K", ""]
    assert [*map(sized, typed)] == [2000, 1_250_000, 0.1, "2X", "K", ""]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("vLLM", "vllm"), ("llama.cpp", "llamacpp"), ("TensorRT-LLM", "trtllm"),
        ("transformers", "hf"), ("h100", "H100"), ("RTX4090", "RTX 4090"), ("rtx-3090", "RTX 3090"),
        ("H100-PCIe", "H100 PCIe"), ("gb300", "gb300"),
    ],
)  # fmt: skip
def test_engines_and_gpus_may_be_spelled_as_usual(word: str, meant: str) -> None:
    assert choice_named(word, [*ENGINES, *GPUS]) == meant


def test_the_options_take_the_usual_spellings() -> None:
    export = {"drafter": "d", "to": "TensorRT-LLM", "out": "o"}
    assert options_from(ExportOptions, export).to == "trtllm"
    assert options_from(PlanOptions, {"config": "c", "gpu": "rtx4090"}).gpu == "RTX 4090"
    simulated = {"acceptance": "0.8", "gpu": "h200", "params": 8e9}
    assert options_from(SimulateOptions, simulated).gpu == "H200"
    assert ImitatedEngine("llama.cpp:drafts=3").label == "llamacpp:drafts=3"
    run = {"target": "t", "data": "d", "out": "o", "for_": ["vLLM"]}
    assert options_from(run_class_named("eagle"), run).for_ == ["vllm"]
