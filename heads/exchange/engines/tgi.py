"""TGI, Hugging Face's text-generation-inference, of 2026: in maintenance mode."""

from __future__ import annotations

from shlex import quote
from typing import Any

from . import limits
from .engine import (
    DrafterFacts,
    ExportRequest,
    Recipe,
    ServingEngine,
    TargetList,
    described,
    families,
)

MAINTENANCE = "TGI is in maintenance mode; its own page recommends vLLM, SGLang and llama.cpp."


def _serve(request: ExportRequest, _: Any) -> str:
    return f"text-generation-launcher --model-id {quote(request.out)} --speculate {request.drafts}"


@described("its heads share the target's output matrix and have more than one layer each")
def _shared_head_of_one_layer(facts: DrafterFacts) -> str | None:
    config = facts.drafter.config
    if not config.shared_head or config.num_layers == 1:
        return None
    return "it reads heads that share the target's output matrix with one layer each only"


TARGETS = TargetList(
    "TGI of 2026-01",
    families("qwen3 qwen3_moe olmo olmo2 glm glm4 gpt_oss"),
)
ENGINE = ServingEngine(
    name="tgi",
    title="TGI",
    place=5,
    recipes={
        "medusa": Recipe(
            _serve,
            (limits.CHAIN, limits.READ_ONLY, limits.shared_head, MAINTENANCE),
            TARGETS,
            (_shared_head_of_one_layer, limits.medusa_vocabulary),
        )
    },
)
