"""Sentences about what several engines cannot express or compute otherwise, in tables.

Rotary positions are compared by value with ours, which are transformers' (`modeling_rope_utils.py`
of 5.23), for texts of any length. What engines compute was read in vLLM 0.33.0
(`layers/rotary_embedding/`), SGLang 0.5.23 (`layers/rotary_embedding/factory.py`), llama.cpp
0c1e57098 (`conversion/base.py`, `src/llama-context.cpp`, `src/llama-model.cpp`) and TensorRT-LLM's
PyTorch backend (`RopeParams` in `_torch/attention/backends/interface.py`, of which no release was
checked).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .engine import DrafterFacts, Remark

if TYPE_CHECKING:
    from ...files import JsonObject

CHAIN = "Drafts are a chain here, so tau of a tree is not what this engine gives."
FEWER = (
    "With fewer drafts engines run a shorter block, so each draft may be another one than in the "
    "whole block."
)
READ_ONLY = "Written after the engine's source; it has not been run."

# Sizes and flags.

ACTIVATION = Remark(
    lambda facts: facts.shape.activation != "silu",
    "its layers have activation {shape.activation}, engines have silu",
)
ODD_WIDTH = Remark(
    lambda facts: facts.shape.hidden_size % facts.shape.num_heads,
    "its width {shape.hidden_size} is no multiple of its {shape.num_heads} heads, which a Llama's "
    "config has to be",
)
FC_BIAS = Remark(
    lambda facts: facts.shape.fc_bias,
    "its fc has a bias, which engines drop without a word, or do not load",
)
ATTENTION_BIAS = Remark(
    lambda facts: facts.shape.attention_bias,
    "it has a bias on queries and keys, which the engine leaves out, wants elsewhere too, or does "
    "not load",
)
SCALED_BLOCK = Remark(
    lambda facts: facts.embedding_scale != 1,
    "its target's embedding multiplies rows by {facts.embedding_scale:.4g}, and the engine gives a "
    "block drafter such rows, which was trained on the rows alone",
)
SECOND_LAYER = Remark(
    lambda facts: facts.shape.num_layers > 1,
    "it has {shape.num_layers} layers, and engines name the norms of a second one differently",
)
EAGLE3_NORMS = Remark(
    lambda facts: facts.shape.qk_norm,
    "norms on queries and keys (heads.qk_norm) are known to vLLM only",
)
NORM_BEFORE_RESIDUAL = Remark(
    lambda facts: facts.shape.norm_before_residual,
    "norm_before_residual is not known there; vllm and llamacpp have it",
)
BLOCK_VOCABULARY = Remark(
    lambda facts: facts.shape.draft_vocab_size is not None,
    "it drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens, and "
    "engines run the target's whole head for block drafters; train without "
    "heads.draft_vocab_size, or export the base model's drafter if tokens were added since",
)
MEDUSA_VOCABULARY = Remark(
    lambda facts: facts.drafter.draft_vocab_ids is not None,
    "its heads draft {facts.drafter.drafted:,} of the target's {facts.drafter.vocab_size:,} "
    "tokens, and the engine reads no draft vocabulary of Medusa heads; train without "
    "heads.draft_vocab_size, or export the base model's heads if tokens were added since",
)


def changed_logits(facts: DrafterFacts) -> str:
    """Return the numbers by which a target scales or caps its logits; empty if there are none."""
    names = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    numbers = {name: facts.numbers.get(name) for name in names}
    said = [f"{name} {value:g}" for name, value in numbers.items() if value not in (None, 1)]
    return ", ".join([*said, *(["dim_model_base"] if facts.family.startswith("minicpm") else [])])


# Read in vLLM, SGLang and llama.cpp, which apply neither scale nor cap.
TRANSITION = Remark(
    changed_logits,
    "its target changes its logits ({found}), the transition bias is added to them, and engines "
    "add it to unchanged ones; train dflash",
)
ADDED_TOKENS = Remark(
    lambda facts: (facts.shape.draft_vocab_size or facts.shape.vocab_size) < facts.shape.vocab_size,
    "it drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens, and EAGLE-1 "
    "has no draft vocabulary there; export it for the target that it was trained for",
)
EAGLE1 = (
    Remark(
        lambda facts: facts.shape.qk_norm,
        "EAGLE-1 with norms on queries and keys has no class there",
    ),
    Remark(
        lambda facts: facts.embedding_scale != 1,
        "its target's embedding multiplies rows by {facts.embedding_scale:.4g}, and EAGLE-1 is "
        "given the rows alone there; use version 3",
    ),
    ADDED_TOKENS,
)
EAGLE3 = (ACTIVATION, ODD_WIDTH, FC_BIAS)
BLOCK = (ACTIVATION, BLOCK_VOCABULARY)
"""Limits of all engines for block drafters."""

# Remarks.

DRAFTED_SHARE = Remark(
    lambda facts: (
        facts.drafter.draft_vocab_ids is not None
        and f"{len(facts.drafter.draft_vocab_ids):,} of the target's {facts.vocab_size:,} tokens "
        f"({len(facts.drafter.draft_vocab_ids) / facts.vocab_size:.0%})"
    ),
    "Drafts {found}.",
)
OTHER_VOCABULARY = Remark(
    lambda facts: facts.draft_model_vocab_size != facts.vocab_size,
    "The draft model has an embedding of {facts.draft_model_vocab_size:,} rows, the target one of "
    "{facts.vocab_size:,}: an export is cut or padded to the target's, since engines compare the "
    "two.",
)
SHARED_HEAD = Remark(
    lambda facts: facts.drafter.config.shared_head,
    "The heads share the target's output matrix.",
)
EAGLE_NOTES = (
    DRAFTED_SHARE,
    Remark(
        lambda facts: facts.shape.norm_taps or facts.shape.norm_output,
        "EAGLE-3.1 (`fc_norm`, `norm_output`): needs an engine of 2026-09 or later; older ones "
        "ignore these keys.",
    ),
    Remark(
        lambda facts: facts.shape.rope["rope_type"] == "longrope",
        "Rotary positions are those of short texts: serve with a maximum length (vLLM: "
        "`--max-model-len`) of at most `original_max_position_embeddings`, "
        "{shape.rope[original_max_position_embeddings]:,}.",
    ),
    Remark(
        lambda facts: facts.shape.num_layers > 1,
        "{shape.num_layers} layers: other engines than vLLM do not load it.",
    ),
)
"""Remarks of engines of others on EAGLE drafters."""

# Rotary positions.


def turns_a_part(facts: DrafterFacts) -> bool:
    """Return whether rotary positions turn a part of each head, or of its frequencies."""
    return facts.shape.rope.get("partial_rotary_factor", 1.0) != 1.0


PARTIAL_ROTARY = Remark(
    turns_a_part,
    "rotary positions turn a part of each head only, which the engine does not do, or was never "
    "seen to read",
)
DYNAMIC_ROPE = Remark(
    lambda facts: facts.shape.rope["rope_type"] == "dynamic",
    "dynamic rope is scaled there from the first position on, or depends on the text's length",
)
# SGLang's EAGLE-3 takes any type with sections for the default one.
SECTIONS = Remark(
    lambda facts: (
        "mrope_section" in facts.shape.rope
        and facts.shape.rope["rope_type"] != "default"
        and facts.shape.rope["rope_type"]
    ),
    "its rotary positions have mrope_section and type {found}, which the engine takes for default",
)
PROPORTIONAL_FACTOR = Remark(
    lambda facts: (
        facts.shape.rope["rope_type"] == "proportional"
        and facts.shape.rope.get("factor") not in (None, 1)
    ),
    "its proportional rotary positions have factor {shape.rope[factor]:g}, which the engine does "
    "not read",
)


def of_type(kind: str, says: str) -> Remark:
    """Return the limit of an engine for one type of rotary positions."""
    return Remark(
        lambda facts: facts.shape.rope["rope_type"] == kind,
        f"its rotary positions are of type {kind}, {says}",
    )


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
    scale = magnitude(factor)
    if above is not None and below is not None:
        scale = magnitude(factor, above) / magnitude(factor, below)
    return rope.get("attn_factor", 1.0) * scale


def tensorrt_scale(rope: JsonObject, factor: float) -> float:
    above, below = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
    return magnitude(factor, above) / magnitude(factor, below)


def llamacpp_scale(_rope: JsonObject, factor: float) -> float:
    return magnitude(factor)


def yarn(
    scale: Callable[[JsonObject, float], float], rounds: bool = False, keeps_betas: bool = False
) -> Remark:
    """Return the limit of an engine for YaRN's positions, which it computes by `scale`.

    `rounds`: it rounds the range of frequencies, whatever `truncate` says. `keeps_betas`: its
    beta_fast and beta_slow are always 32 and 1.
    """

    def found(facts: DrafterFacts) -> str | None:
        rope = facts.shape.rope
        if rope["rope_type"] != "yarn":
            return None
        factor = factor_of(rope, facts.shape.max_positions)
        ours, theirs = transformers_scale(rope, factor), scale(rope, factor)
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            keys = ("attention_factor", "mscale", "mscale_all_dim")
            said = ", ".join(f"{key} {rope[key]}" for key in keys if rope.get(key) is not None)
            return f"scaled by {ours:.6g} ({said}), and the engine scales them by {theirs:.6g}"
        fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        if keeps_betas and (fast, slow) != (32, 1):
            return (
                f"computed with beta_fast {fast:g} and beta_slow {slow:g}, and the engine computes "
                "with 32 and 1"
            )
        if rounds and rope.get("truncate") is False:
            return (
                "computed with a range of frequencies that is not rounded (truncate false), and "
                "the engine rounds these numbers"
            )
        return None

    return Remark(found, "its YaRN rotary positions are {found}")


def longrope_scales(facts: DrafterFacts) -> str | None:
    """Return the scales of longrope here and in engines that read neither factor of it."""
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
    return f"by {ours:.6g} (attention_factor, factor), and the engine scales them by {theirs:.6g}"


LONGROPE = Remark(longrope_scales, "its longrope rotary positions are scaled {found}")
"""Limit of vLLM, SGLang and TensorRT-LLM, which read neither key for it."""
