"""TGI, Hugging Face's text-generation-inference, of 2026: in maintenance mode."""

from __future__ import annotations

from shlex import quote
from typing import Any

from . import limits
from .engine import ExportRequest, Recipe, Remark, ServingEngine

MAINTENANCE = "TGI is in maintenance mode; its own page recommends vLLM, SGLang and llama.cpp."


def _serve(request: ExportRequest, _: Any) -> str:
    return f"text-generation-launcher --model-id {quote(request.out)} --speculate {request.drafts}"


ENGINE = ServingEngine(
    name="tgi",
    title="TGI",
    place=5,
    recipes={
        "medusa": Recipe(
            _serve,
            (limits.CHAIN, limits.READ_ONLY, MAINTENANCE),
            (
                Remark(
                    lambda facts: (
                        facts.drafter.config.shared_head and facts.drafter.config.num_layers > 1
                    ),
                    "it reads heads that share the target's output matrix with one layer each only",
                ),
                limits.MEDUSA_VOCABULARY,
            ),
        )
    },
)
