"""Sentences about what several engines cannot express or compute otherwise, in tables.

Rotary positions are those of transformers (`modeling_rope_utils.py` of 5.23) for texts of any
length: a key that changes them, and that an engine does not read, is a limit. What engines read was
seen in vLLM 0.33.0 (`layers/rotary_embedding/`), SGLang 0.5.23
(`layers/rotary_embedding/factory.py`), llama.cpp 0c1e57098 (`conversion/base.py`,
`src/llama-context.cpp`, `src/llama-model.cpp`) and TensorRT-LLM's PyTorch backend (`RopeParams` in
`_torch/attention/backends/interface.py`, of which no release was checked).
"""

from __future__ import annotations

from .engine import DrafterFacts, Remark

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
    "its width {shape.hidden_size} is not a multiple of its {shape.num_heads} heads, which a "
    "Llama's config has to be",
)
FC_BIAS = Remark(
    lambda facts: facts.shape.fc_bias,
    "its fc has a bias, which engines drop silently, or do not load",
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
    """Return the numbers by which a target scales or caps its logits; empty if it does neither."""
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
    lambda facts: (
        (rows := facts.drafter.model.config.get_text_config().vocab_size) != facts.vocab_size
        and f"{rows:,}"
    ),
    "The draft model has an embedding of {found} rows, the target one of {facts.vocab_size:,}: an "
    "export is cut or padded to the target's, since engines compare the two.",
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
)
"""Remarks of engines of others on EAGLE drafters."""

# Rotary positions.


def rotates_part_of_heads(facts: DrafterFacts) -> bool:
    """Return whether rotary positions rotate a part of each head, or of its frequencies."""
    return facts.shape.rope.get("partial_rotary_factor", 1.0) != 1.0


PARTIAL_ROTARY = Remark(
    rotates_part_of_heads,
    "rotary positions rotate a part of each head only, which the engine does not do, or was never "
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


def yarn(*unread: str) -> Remark:
    """Return the limit of an engine that does not read the keys `unread` of YaRN's positions.

    Such a key stands in a drafter's parameters where it changes what transformers computes.
    """

    def found(facts: DrafterFacts) -> str | None:
        rope = facts.shape.rope
        if rope["rope_type"] != "yarn":
            return None
        said = [
            f"{key} {rope[key]}" for key in unread if rope.get(key) not in YARN.get(key, (None,))
        ]
        return ", ".join(said)

    return Remark(found, "its YaRN rotary positions have {found}, which the engine does not read")


YARN = {"truncate": (None, True), "beta_fast": (None, 32)}
YARN |= dict.fromkeys(("beta_slow", "attn_factor"), (None, 1))
"""Values that change nothing, of keys for which there are others than none."""
ONE_SCALE = Remark(
    lambda facts: (
        facts.shape.rope["rope_type"] == "yarn"
        and bool(facts.shape.rope.get("mscale")) != bool(facts.shape.rope.get("mscale_all_dim"))
    ),
    "its YaRN rotary positions have only one of mscale and mscale_all_dim, which the engine reads "
    "alone",
)
ZERO_SCALE = Remark(
    lambda facts: (
        facts.shape.rope["rope_type"] == "yarn"
        and None
        not in (scales := [facts.shape.rope.get(key) for key in ("mscale", "mscale_all_dim")])
        and 0 in scales
    ),
    "its YaRN rotary positions have an mscale or mscale_all_dim of 0, which the engine reads, and "
    "transformers does not",
)


def longrope_scale(facts: DrafterFacts) -> str | None:
    """Return the scale of longrope that is given in other words than by two lengths of text."""
    rope = facts.shape.rope
    if rope["rope_type"] != "longrope":
        return None
    usual = facts.shape.max_positions / rope["original_max_position_embeddings"]
    neutral = {"attention_factor": (None,), "factor": (None, usual)}
    said = [f"{key} {rope[key]}" for key in neutral if rope.get(key) not in neutral[key]]
    return ", ".join(said)


LONGROPE = Remark(
    longrope_scale, "its longrope rotary positions have {found}, which the engine does not read"
)
"""Limit of vLLM, SGLang and TensorRT-LLM."""
