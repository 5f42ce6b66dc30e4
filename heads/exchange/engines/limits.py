"""Parts of recipes that several engines share: what they cannot express, and remarks."""

from __future__ import annotations

from collections.abc import Callable

from .engine import DrafterFacts, Remark, described


def remark(holds: Callable[[DrafterFacts], object], text: str) -> Remark:
    """Return the function that says `text` of drafters of which `holds` is true.

    In braces the text may name values of the drafter's `shape` and of the `facts`.
    """

    @described(text)
    def said(facts: DrafterFacts) -> str | None:
        if not holds(facts):
            return None
        return text.format(facts=facts, shape=getattr(facts.drafter, "shape", None))

    return said


CHAIN = "Drafts are a chain here, so tau of a tree is not what this engine gives."
FEWER = (
    "With fewer drafts engines run a shorter block, so each draft may be another one than in the "
    "whole block."
)
READ_ONLY = "Written after the engine's source; it has not been run."

LOGIT_NUMBERS = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier",
)  # fmt: skip
"""Numbers of a target's configuration that scale or cap its logits, unless they are 1."""

ACTIVATION = remark(
    lambda facts: facts.shape.activation != "silu",
    "its layers have activation {shape.activation}, engines have silu; train with "
    "heads.activation silu",
)
ODD_WIDTH = remark(
    lambda facts: facts.shape.hidden_size % facts.shape.num_heads,
    "its width {shape.hidden_size} is no multiple of its {shape.num_heads} heads, which a Llama's "
    "config has to be",
)
FC_BIAS = remark(
    lambda facts: facts.shape.fc_bias,
    "its fc has a bias, which engines drop without a word, or do not load",
)
ATTENTION_BIAS = remark(
    lambda facts: facts.shape.attention_bias,
    "it has a bias on queries and keys, which the engine leaves out, wants elsewhere too, or does "
    "not load",
)


def turns_a_part(facts: DrafterFacts) -> bool:
    """Return whether rotary positions turn a part of each head, or of its frequencies."""
    return facts.shape.rope.get("partial_rotary_factor", 1.0) != 1.0


PARTIAL_ROTARY = remark(
    turns_a_part,
    "rotary positions turn a part of each head only, which the engine does not do, or was never "
    "seen to read",
)
DYNAMIC_ROPE = remark(
    lambda facts: facts.shape.rope["rope_type"] == "dynamic",
    "dynamic rope is scaled there from the first position on, or depends on the text's length",
)
SCALED_BLOCK = remark(
    lambda facts: facts.embedding_scale != 1,
    "its target's embedding multiplies rows by {facts.embedding_scale:.4g}, and the engine gives a "
    "block drafter such rows, which was trained on the rows alone",
)
SECOND_LAYER = remark(
    lambda facts: facts.shape.num_layers > 1,
    "it has {shape.num_layers} layers, and engines name the norms of a second one differently",
)
EAGLE1_NORMS = remark(
    lambda facts: facts.shape.qk_norm, "EAGLE-1 with norms on queries and keys has no class there"
)
EAGLE1_EMBEDDINGS = remark(
    lambda facts: facts.embedding_scale != 1,
    "its target's embedding multiplies rows by {facts.embedding_scale:.4g}, and EAGLE-1 is given "
    "the rows alone there; use version 3",
)
EAGLE3_NORMS = remark(
    lambda facts: facts.shape.qk_norm,
    "norms on queries and keys (heads.qk_norm) are known to vLLM only",
)
NORM_BEFORE_RESIDUAL = remark(
    lambda facts: facts.shape.norm_before_residual,
    "norm_before_residual is not known there; vllm and llamacpp have it",
)


@described(
    "its target scales or caps its logits, and engines add the transition bias to unchanged ones"
)
def transition(facts: DrafterFacts) -> str | None:
    """Return a limit of DSpark, whose bias is added to the target's logits after their scale.

    Engines add it to the products of the head (read in vLLM, SGLang and llama.cpp), and apply
    neither scale nor cap.
    """
    changed = {name: facts.numbers.get(name) for name in LOGIT_NUMBERS}
    said = [f"{name} {value:g}" for name, value in changed.items() if value not in (None, 1)]
    if facts.family.startswith("minicpm"):
        said.append("dim_model_base")
    if not said:
        return None
    return (
        f"its target changes its logits ({', '.join(said)}), the transition bias is added to them, "
        "and engines add it to unchanged ones; train dflash"
    )


ADDED_TOKENS = remark(
    lambda facts: (facts.shape.draft_vocab_size or facts.shape.vocab_size) < facts.shape.vocab_size,
    "it drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens, and EAGLE-1 "
    "has no draft vocabulary there; export it for the target that it was trained for",
)


@described(
    "its heads draft .. of the target's .. tokens, and the engine reads no draft vocabulary of "
    "Medusa heads; train without heads.draft_vocab_size, or export the base model's heads if "
    "tokens were added since"
)
def medusa_vocabulary(facts: DrafterFacts) -> str | None:
    heads = facts.drafter
    if heads.draft_vocab_ids is None:
        return None
    return (
        f"its heads draft {heads.drafted:,} of the target's {heads.vocab_size:,} tokens, and the "
        "engine reads no draft vocabulary of Medusa heads; train without heads.draft_vocab_size, "
        "or export the base model's heads if tokens were added since"
    )


EAGLE1 = (EAGLE1_NORMS, EAGLE1_EMBEDDINGS, ADDED_TOKENS)
EAGLE3 = (ACTIVATION, ODD_WIDTH, FC_BIAS)
BLOCK = (
    ACTIVATION,
    remark(
        lambda facts: facts.shape.draft_vocab_size is not None,
        "it drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens, and "
        "engines run the target's whole head for block drafters; train without "
        "heads.draft_vocab_size, or export the base model's drafter if tokens were added since",
    ),
)
"""Limits of all engines for block drafters."""


def drafted_share(facts: DrafterFacts) -> str | None:
    if (target_ids := facts.drafter.draft_vocab_ids) is None:
        return None
    drafted, every = len(target_ids), len(facts.drafter.t2d)
    return f"Drafts {drafted:,} of the target's {every:,} tokens ({drafted / every:.0%})."


def other_vocabulary(facts: DrafterFacts) -> str | None:
    """Return a remark on a draft model with another number of rows than the target has."""
    own, target = facts.draft_model_vocab_size, facts.vocab_size
    if own == target:
        return None
    change = "cut to" if own > target else "padded to"
    return (
        f"The draft model has an embedding of {own:,} rows, the target one of {target:,}: an "
        f"export is {change} the target's, since engines compare the two."
    )


def shared_head(facts: DrafterFacts) -> str | None:
    shared = facts.drafter.config.shared_head
    return "The heads share the target's output matrix." if shared else None


EAGLE_NOTES = (
    drafted_share,
    remark(
        lambda facts: facts.shape.norm_taps or facts.shape.norm_output,
        "EAGLE-3.1 (`fc_norm`, `norm_output`): needs an engine of 2026-09 or later; older ones "
        "ignore these keys.",
    ),
    remark(
        lambda facts: facts.shape.rope["rope_type"] == "longrope",
        "Rotary positions are those of short texts: serve with a maximum length (vLLM: "
        "`--max-model-len`) of at most `original_max_position_embeddings`, "
        "{shape.rope[original_max_position_embeddings]:,}.",
    ),
    remark(
        lambda facts: facts.shape.num_layers > 1,
        "{shape.num_layers} layers: other engines than vLLM do not load it.",
    ),
)
"""Remarks of engines of others on EAGLE drafters."""
