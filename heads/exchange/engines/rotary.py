"""Rotary positions as engines compute them from a drafter's config, compared by value with ours.

Ours are transformers' (`modeling_rope_utils.py` of 5.23), for texts of any length. What engines
compute was read in vLLM 0.33.0 (`layers/rotary_embedding/`), SGLang 0.5.23
(`layers/rotary_embedding/factory.py`), llama.cpp 0c1e57098 (`conversion/base.py`,
`src/llama-context.cpp`, `src/llama-model.cpp`) and TensorRT-LLM's PyTorch backend (`RopeParams` in
`_torch/attention/backends/interface.py`, of which no release was checked).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .engine import DrafterFacts, Remark, described

if TYPE_CHECKING:
    from ...files import JsonObject


def magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of cosines and sines, 0.1 m ln s + 1 (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def factor_of(rope: JsonObject, positions: int) -> float:
    """Return how many times longer the context is than in the first training."""
    return rope.get("factor") or positions / rope["original_max_position_embeddings"]


def transformers_scale(rope: JsonObject, factor: float) -> float:
    """Return the scale that transformers computes, and draftsmith with it; so does vLLM."""
    if (given := rope.get("attention_factor")) is not None:
        return given
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return magnitude(factor, above) / magnitude(factor, below)
    return magnitude(factor)


def sglang_scale(rope: JsonObject, factor: float) -> float:
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    known = above is not None and below is not None
    scale = magnitude(factor, above) / magnitude(factor, below) if known else magnitude(factor)
    return rope.get("attn_factor", 1.0) * scale


def tensorrt_scale(rope: JsonObject, factor: float) -> float:
    above, below = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
    return magnitude(factor, above) / magnitude(factor, below)


def llamacpp_scale(_rope: JsonObject, factor: float) -> float:
    return magnitude(factor)


@dataclass(frozen=True)
class YarnReader:
    """YaRN's positions as an engine computes them, compared with a drafter's."""

    scale: Callable[[JsonObject, float], float]
    """Function of the rotary parameters and the factor that returns the scale."""
    rounds: bool = False
    """True if it rounds the range of frequencies, whatever `truncate` says."""
    keeps_betas: bool = False
    """True if its beta_fast and beta_slow are always 32 and 1."""

    @property
    def text(self) -> str:
        """The limit in the words of the pages, whatever the drafter."""
        keys = ["attention_factor", "mscale or mscale_all_dim"]
        keys += ["beta_fast or beta_slow"] if self.keeps_betas else []
        keys += ["truncate false"] if self.rounds else []
        return f"its rotary positions are YaRN's, and {', '.join(keys)} change their values there"

    def __call__(self, facts: DrafterFacts) -> str | None:
        """Return what it computes otherwise than the drafter; None where all is equal."""
        rope = facts.shape.rope
        if rope["rope_type"] != "yarn":
            return None
        factor = factor_of(rope, facts.shape.max_positions)
        ours, theirs = transformers_scale(rope, factor), self.scale(rope, factor)
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            keys = ("attention_factor", "mscale", "mscale_all_dim")
            said = ", ".join(f"{key} {rope[key]}" for key in keys if rope.get(key) is not None)
            return (
                f"its rotary positions are scaled by {ours:.6g} ({said}), and the engine scales "
                f"them by {theirs:.6g}"
            )
        betas = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        if self.keeps_betas and betas != (32, 1):
            return (
                f"its rotary positions have beta_fast {betas[0]:g} and beta_slow {betas[1]:g}, and "
                "the engine computes with 32 and 1"
            )
        if not self.rounds or rope.get("truncate") is not False:
            return None
        low, high = (self.border(facts, rope, beta) for beta in betas)
        if low == math.floor(low) and high == math.ceil(high):
            return None
        return (
            f"its rotary positions change between frequencies {low:.4g} and {high:.4g} (truncate "
            "false), and the engine rounds these two numbers"
        )

    def border(self, facts: DrafterFacts, rope: JsonObject, turns: float) -> float:
        """Return the number of the frequency that turns `turns` times in the first context."""
        size = facts.shape.head_dim * rope.get("partial_rotary_factor", 1.0)
        ratio = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(rope["rope_theta"]))


@described(
    "its rotary positions are longrope with an attention_factor or a factor that is not read"
)
def longrope(facts: DrafterFacts) -> str | None:
    """Return what vLLM, SGLang and TensorRT-LLM scale otherwise: they read neither key for it."""
    rope = facts.shape.rope
    if rope["rope_type"] != "longrope":
        return None
    original, positions = rope["original_max_position_embeddings"], facts.shape.max_positions

    def scale(factor: float) -> float:
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    ours = rope.get("attention_factor") or scale(factor_of(rope, positions))
    theirs = scale(positions / original)
    if math.isclose(ours, theirs, rel_tol=1e-6):
        return None
    return (
        f"its rotary positions are scaled by {ours:.6g} (attention_factor, factor), and the engine "
        f"scales them by {theirs:.6g}"
    )


def of_types(says: str, *types: str) -> Remark:
    """Return the limit of an engine for these types of rotary positions."""

    @described(f"its rotary positions are of type {' or '.join(types)}, {says}")
    def said(facts: DrafterFacts) -> str | None:
        kind = facts.shape.rope["rope_type"]
        return f"its rotary positions are of type {kind}, {says}" if kind in types else None

    return said


@described("its rotary positions have mrope_section and a type, which the engine takes for default")
def sections(facts: DrafterFacts) -> str | None:
    """Return a limit of SGLang's EAGLE-3: with sections, it takes any type for the default one."""
    rope = facts.shape.rope
    if "mrope_section" not in rope or rope["rope_type"] == "default":
        return None
    return (
        f"its rotary positions have mrope_section and type {rope['rope_type']}, which the engine "
        "takes for default"
    )


@described("its rotary positions are proportional with a factor, which the engine does not read")
def proportional_factor(facts: DrafterFacts) -> str | None:
    """Return a limit of vLLM and SGLang, which read no `factor` of proportional positions."""
    rope = facts.shape.rope
    if rope["rope_type"] != "proportional" or rope.get("factor") in (None, 1):
        return None
    return f"its rotary positions have factor {rope['factor']:g}, which the engine does not read"
