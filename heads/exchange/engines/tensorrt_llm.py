"""TensorRT-LLM, of which the PyTorch backend is meant; facts of 1.3 and 1.4."""

from __future__ import annotations

import json
from functools import partial
from shlex import quote
from typing import Any

from . import limits
from .engine import ExportRequest, Recipe, ServingEngine


def _serve(kind: str, request: ExportRequest, drafter: Any) -> str:
    lines = [
        "speculative_config:",
        f"  decoding_type: {kind}",
        f"  max_draft_len: {request.drafts}",
        # Quoted as JSON, which YAML reads too: a path may hold a colon or a blank.
        f"  speculative_model: {json.dumps(request.out)}",
    ]
    # The engine counts layers from 0.
    if kind == "Eagle3":
        lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in drafter.taps]}")
    yaml = "\n".join(lines)
    return (
        f"cat > speculative.yaml <<'END'\n{yaml}\nEND\ntrtllm-serve {quote(request.target)} "
        "--config speculative.yaml"
    )


BLOCK_NOTES = (limits.CHAIN, limits.FEWER, limits.READ_ONLY)
READS = (
    limits.PARTIAL_ROTARY,
    limits.DYNAMIC_ROPE,
    limits.yarn("attention_factor", "truncate"),
    limits.ONE_SCALE,
    limits.ZERO_SCALE,
    limits.LONGROPE,
    limits.of_type("proportional", "which the engine was never seen to read"),
)
"""Limits of all drafters: what it computes of their rotary positions otherwise."""
BLOCK = (*limits.BLOCK, limits.SCALED_BLOCK, limits.ATTENTION_BIAS, *READS)
ENGINE = ServingEngine(
    name="trtllm",
    title="TensorRT-LLM",
    place=3,
    recipes={
        "eagle3": Recipe(
            partial(_serve, "Eagle3"),
            (limits.CHAIN, limits.READ_ONLY, *limits.EAGLE_NOTES),
            (
                *limits.EAGLE3,
                limits.SECOND_LAYER,
                *READS,
                limits.EAGLE3_NORMS,
                limits.ATTENTION_BIAS,
                limits.NORM_BEFORE_RESIDUAL,
            ),
        ),
        "dflash": Recipe(partial(_serve, "DFlash"), BLOCK_NOTES, BLOCK),
        "dspark": Recipe(partial(_serve, "DSpark"), BLOCK_NOTES, (*BLOCK, limits.TRANSITION)),
        "draft_model": Recipe(
            partial(_serve, "Draft_Target"), (limits.READ_ONLY, limits.OTHER_VOCABULARY)
        ),
    },
)
