"""What engines compute otherwise: a table over engines, each sentence once."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaConfig

from draftsmith.command_line.parse import options_from
from draftsmith.heads.elementwise import Rotary
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import (
    ENGINES,
    TITLES,
    drafter_facts,
    engine_remarks,
    refusal,
)
from draftsmith.heads.exchange.engines.engine import DrafterFacts
from draftsmith.train.estimate import check_engines, log_serving_engines
from draftsmith.train.methods.registry import method_named
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.random_artifacts import TARGET, block, eagle, heads

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4, "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_theta": 10000.0}
ZERO_SCALE = {
    "sglang": "an mscale or mscale_all_dim of 0",
    "trtllm": "only one of mscale and mscale_all_dim",
    "llamacpp": "have mscale_all_dim 0.0",
}
ALL = ("vllm", "speculators", "sglang", "trtllm", "llamacpp")
# Rotary parameters, and which engines refuse an EAGLE-3 and a DFlash of them, with a part of what
# they say. All others compute what draftsmith computes.
TABLE: list[tuple[dict[str, Any], dict[str, str], dict[str, str]]] = [
    (PLAIN | {"rope_type": "default"}, {}, {}),
    (PLAIN | {"rope_type": "default", "partial_rotary_factor": 1.0}, {}, {}),
    (
        PLAIN | {"rope_type": "default", "partial_rotary_factor": 0.5},
        dict.fromkeys(("trtllm", "llamacpp"), "a part of each head"),
        dict.fromkeys(("trtllm", "llamacpp"), "a part of each head"),
    ),
    (PLAIN | {"rope_type": "linear", "factor": 2}, {}, {}),
    (
        PLAIN | {"rope_type": "dynamic", "factor": 2.0},
        dict.fromkeys(("sglang", "trtllm"), "dynamic rope"),
        dict.fromkeys(("sglang", "trtllm"), "dynamic rope"),
    ),
    (
        PLAIN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        {},
        {"llamacpp": "type llama3, which the engine drops"},
    ),
    (YARN, {}, {}),
    (
        YARN | {"attention_factor": 1.5},
        dict.fromkeys(("sglang", "trtllm", "llamacpp"), "have attention_factor 1.5, which"),
        dict.fromkeys(("sglang", "trtllm", "llamacpp"), "have attention_factor 1.5, which"),
    ),
    # transformers leaves one alone out; TensorRT-LLM reads it
    (
        YARN | {"mscale": 0.707},
        {"trtllm": "only one of mscale and mscale_all_dim"},
        {"trtllm": "only one of mscale and mscale_all_dim"},
    ),
    # transformers ignores both where one is 0; the others divide by what they give
    (
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.0},
        ZERO_SCALE,
        ZERO_SCALE,
    ),
    # both equal: a scale of 1, which llama.cpp does not read
    (
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"llamacpp": "have mscale_all_dim 1.0, which the engine does not read"},
        {"llamacpp": "have mscale_all_dim 1.0"},
    ),
    (
        YARN | {"truncate": False},
        dict.fromkeys(("trtllm", "llamacpp"), "have truncate False, which the engine does not"),
        dict.fromkeys(("trtllm", "llamacpp"), "have truncate False"),
    ),
    (YARN | {"truncate": True}, {}, {}),
    (
        YARN | {"beta_fast": 16.0},
        {"llamacpp": "have beta_fast 16.0, which the engine does not read"},
        {"llamacpp": "have beta_fast 16.0"},
    ),
    (YARN | {"beta_fast": 32, "beta_slow": 1}, {}, {}),
    # 256 / 64 positions, or a factor that says the same
    (
        LONG | {"factor": 4.0},
        {"llamacpp": "of type longrope"},
        {
            **dict.fromkeys(("vllm", "speculators"), "keeps no table for block drafters"),
            "llamacpp": "of type longrope",
        },
    ),
    (
        LONG,
        {"llamacpp": "of type longrope, which the engine takes for default"},
        {
            **dict.fromkeys(("vllm", "speculators"), "keeps no table for block drafters"),
            "llamacpp": "of type longrope",
        },
    ),
    (
        LONG | {"attention_factor": 1.3},
        {
            **dict.fromkeys(ALL, "have attention_factor 1.3, which the engine does not read"),
            "llamacpp": "of type longrope",
        },
        {
            **dict.fromkeys(("vllm", "speculators"), "keeps no table"),
            **dict.fromkeys(("sglang", "trtllm"), "have attention_factor 1.3"),
            "llamacpp": "of type longrope",
        },
    ),
]  # fmt: skip


def facts(kind: str, rope: dict[str, Any]) -> DrafterFacts:
    more = {"rope": rope, "max_positions": 256}
    return drafter_facts(eagle(**more) if kind == "eagle3" else block(**more))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(map(str, row[0].values())))
def test_rotary_positions_are_those_of_the_engine_or_refused(row: Any) -> None:
    rope, *refused = row
    for kind, expected in zip(("eagle3", "dflash"), refused, strict=True):
        said = facts(kind, rope)
        for engine in ALL:
            reason = refusal(engine, said)
            if engine not in expected:
                assert reason is None, (engine, kind, reason)
            else:
                assert reason is not None and expected[engine] in reason, (engine, kind, reason)
        assert refusal("hf", said) is None, "draftsmith computes them itself"


def test_proportional_positions_are_transformers() -> None:
    """Of 8 numbers a quarter of the frequencies turn: the first of four, with number 4."""
    rope = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    rotary = Rotary(8, 64, rope)
    cos, _ = rotary(torch.tensor([[3]]))
    assert cos.shape[-1] == rotary.size == 8
    angles = cos[0, 0, 0].arccos().tolist()
    assert angles == pytest.approx([3.0, 0, 0, 0, 3.0, 0, 0, 0], abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "engines", "says"),
    [
        ({"head_dim": 16}, {}, ""),
        ({"norm_eps": 1e-3}, {}, ""),
        ({"activation": "gelu"}, ALL, "activation gelu"),
        ({"attention_bias": True}, ("sglang", "trtllm", "llamacpp"), "a bias on queries and keys"),
        ({"fc_bias": True}, {*ALL} - {"sglang"}, "its fc has a bias"),
        ({"norm_fused_taps": True}, ("llamacpp",), ""),
        ({"norm_before_residual": True}, ("sglang", "trtllm"), "norm_before_residual"),
    ],
)  # fmt: skip
def test_engines_refuse_the_config_values_they_cannot_express(
    changes: dict[str, Any], engines: Collection[str], says: str
) -> None:
    if changes == {"norm_fused_taps": True}:
        # known to all of them, as norm_before_fc; TensorRT-LLM reads it in a table of its own
        config = eagle(**changes).drafter.serving_config("t", "float32")
        assert config["norm_before_fc"] and config["eagle_config"]["norm_before_fc"]
        return
    said = drafter_facts(eagle(**changes))
    for engine in ALL:
        reason = refusal(engine, said)
        assert (reason is not None) == (engine in engines), (engine, reason)
        assert reason is None or says in reason


def test_an_integer_factor_is_written_as_a_number_with_a_point() -> None:
    """vLLM and SGLang take an integer for a list of factors."""
    artifact = eagle(rope=PLAIN | {"rope_type": "linear", "factor": 2})
    config = artifact.drafter.serving_config("t", "float32")
    assert isinstance(config["rope_parameters"]["factor"], float)
    assert isinstance(config["rope_scaling"]["factor"], float)


def test_embeddings_that_scale_reach_block_drafters_of_some_engines() -> None:
    scaled = block()
    lender = replace(scaled.drafter.embedding_and_head, scale=5.657)
    scaled.drafter.embedding_and_head = lender
    for engine in ALL:
        reason = refusal(engine, drafter_facts(scaled))
        if engine in ("sglang", "trtllm"):
            assert reason is not None and "multiplies rows by 5.657" in reason
        else:
            assert reason is None


def a_run(folder: Path, target: Path, method: str, **more: Any) -> Any:
    run_class = method_named(method).run_class
    given = {"target": str(target), "data": "none.jsonl", "out": str(folder / "run"), **more}
    return options_from(run_class, given)


@pytest.mark.parametrize("made", [eagle, block, heads])
def test_training_says_what_an_export_says(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is loaded, from configs alone: a target without weights is enough."""
    config = LlamaConfig(
        **TARGET.config.to_dict() | {"rope_parameters": YARN | {"truncate": False}}
    )
    config.save_pretrained(tmp_path / "target")
    kind = made().drafter.kind
    method, options = {
        "eagle3": ("eagle", {"heads": {"taps": [2, 4, 5], "qk_norm": True}}),
        "dflash": ("dflash", {"heads": {"taps": [2, 4]}}),
        "medusa": ("medusa", {}),
    }[kind]
    run = a_run(tmp_path, tmp_path / "target", method, **options)
    with caplog.at_level(logging.INFO):
        log_serving_engines(run, method_named(method))
    said = check_engines(run, method_named(method))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == engine_remarks(said)
    for engine in ENGINES:
        reason = refusal(engine, said)
        if kind not in ENGINES[engine].recipes:
            continue
        assert (engine in lines[0]) == (reason is None)
        if reason is not None:
            text = reason.removeprefix(f"{engine} cannot serve this drafter: ")
            assert any(engine in line and line.endswith(text) for line in lines[1:])


def test_an_engine_that_has_to_take_it_is_asked_before_anything_is_loaded(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=8, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(tmp_path / "target")
    eagle1 = {"heads": {"version": 1}}
    for options, engine, says in (
        (eagle1, "vllm", r"embedding multiplies rows by 8, .* \(--for vllm\)"),
        ({}, "tgi", r"tgi takes Medusa heads, not EAGLE-3; .*\(--for tgi\)"),
    ):
        run = a_run(tmp_path, tmp_path / "target", "eagle", for_=[engine], **options)
        with pytest.raises(UserError, match=says):
            log_serving_engines(run, method_named("eagle"))
    log_serving_engines(
        a_run(tmp_path, tmp_path / "target", "eagle", for_=["sglang"]), method_named("eagle")
    )
    few = a_run(
        tmp_path, tmp_path / "target", "medusa", for_=["tgi"], heads={"draft_vocab_size": 40}
    )
    with pytest.raises(UserError, match=r"draft 40 of the target's 2,048 tokens.*\(--for tgi\)"):
        log_serving_engines(few, method_named("medusa"))
    with pytest.raises(UserError, match="--for takes vllm, .*, not vlm"):
        a_run(tmp_path, tmp_path / "target", "eagle", for_=["vlm"])


def limits_table() -> str:
    """Return what engines refuse, as the Markdown table of docs/reference/engines.md.

    What a sentence takes from a drafter is left open.
    """
    engines_of: dict[tuple[str, str], list[str]] = {}
    for name, engine in ENGINES.items():
        kinds_of: dict[str, list[str]] = {}
        for kind, recipe in engine.recipes.items():
            for limit in recipe.limits:
                text = re.sub(r"\{[^}]*\}", "..", getattr(limit, "text", ""))
                kinds_of.setdefault(text, []).append(TITLES[kind])
        for text, kinds in kinds_of.items():
            engines_of.setdefault((text, ", ".join(sorted(kinds))), []).append(name)
    rows = [
        f"| {text} | {kinds} | {', '.join(names)} |"
        for (text, kinds), names in sorted(engines_of.items())
    ]
    return "\n".join(["| refused, because | drafters | by |", "|---|---|---|", *rows])


def test_the_pages_have_the_tables_of_the_engines_files() -> None:
    page = (ROOT / "docs/reference/engines.md").read_text()
    assert limits_table() in page
