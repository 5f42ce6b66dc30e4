"""Other people's block drafters: DFlash of z-lab, SpecForge and DeepSpec, DSpark of DeepSpec and
SpecForge, and both in the speculators library's format.

What decides the drafts and is not what our drafters compute is refused by name: it would cost
acceptance without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..dflash import DFlashDrafter
from ..dspark import DSparkDrafter
from ..errors import UserError
from .foreign import Checkpoint, Public, drop_embedding, rope_of, same_matrix, same_size

INNER = "dflash_config"  # in which z-lab and SpecForge keep the keys; DeepSpec has them at the top
OTHER_KINDS = ("DFlash2DraftModel", "DominoDraftModel", "DFlashLinearDraftModel")
ONE = ("input_embedding_scale", "output_multiplier", "logit_scale", "attention_value_scale")
"""Factors that our drafters do not have."""
NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps",
    "vocab_size",
)  # fmt: skip


def is_block(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether it is DFlash or DSpark, by what only they have: one norm of the fused taps that all
    layers share."""
    return INNER in config or _architecture(config).endswith(("DFlashDraftModel", "DSparkModel",
    "DSparkDraftModel")) or (
        "hidden_norm.weight" in names
    )  # fmt: skip


def block_drafter(found: Checkpoint) -> Public:
    """All that engines call plain: keys inside `dflash_config`, at the top, or both."""
    if _architecture(found.config) in OTHER_KINDS:
        raise UserError(
            f"{found.folder} is {_architecture(found.config)}, which is not supported; DFlash and "
            "DSpark are read"
        )
    inner = found.config.get(INNER) or {}
    inner = {**inner, **(found.config.get("dspark_config") or {})}
    keys = {name: _one(found, inner, name) for name in {*inner, *found.config}}
    spark = any(name.startswith("markov_head.") for name in found.tensors) or bool(
        keys.get("markov_rank")
    )
    named_spark = "DSpark" in _architecture(found.config)
    if named_spark and not spark and keys.get("sample_from_anchor") is not False:
        raise UserError(
            f"{found.folder} is a DFlash whose anchor drafts too (DSpark without markov_rank), "
            "which no engine serves as dflash; "
            "not supported"
        )
    anchored = keys.get("sample_from_anchor", keys.get("shift_label"))
    if keys.get("dspark_bonus_anchor"):
        anchored = False
    taps = _plain_taps(found, keys)
    return _read(
        found,
        keys,
        taps,
        spark,
        spark if anchored is None else bool(anchored),
        "dspark" if spark else "dflash",
    )


def speculators_block(found: Checkpoint) -> Public:
    """The speculators library's format of both. Taps are hidden states; `sample_from_anchor` is
    false where it is not said."""
    config, kind = found.config, found.config["speculators_model_type"]
    layer = config["transformer_layer_config"]
    full = set(layer.get("layer_types") or ["full_attention"]) == {"full_attention"}
    if config.get("sliding_window_non_causal") is False and full and not found.answers.ours:
        found.notes.append(
            "sliding_window_non_causal is false and no layer slides: blocks are taken as "
            "non-causal, as they are trained; vLLM "
            "takes them as causal"
        )
    taps = found.answers.taps or [*config["aux_hidden_state_layer_ids"]]
    outer = {
        key: value
        for key, value in config.items()
        if key != "transformer_layer_config" and value is not None
    }
    return _read(
        found,
        {**layer, **outer},
        taps,
        kind == "dspark",
        bool(config.get("sample_from_anchor")),
        f"speculators {kind}",
    )


def _read(
    found: Checkpoint,
    keys: dict[str, Any],
    taps: list[int],
    spark: bool,
    anchored: bool,
    layout: str,
) -> Public:
    """What all layouts have in common. `keys`: of the config, whatever part of it they stood in."""
    found.config = keys
    _refuse_others(found, spark, anchored)
    if missing := [
        key for key in (*NEEDED, *(["markov_rank"] if spark else [])) if keys.get(key) is None
    ]:
        raise UserError(f"{found.path} lacks {missing[0]}; it is needed to build the drafter")
    target, tensors = found.target, found.tensors
    for name, there in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        same_size(found, name, keys[name], there)
    for name, there in (
        ("target_hidden_size", target.hidden_size),
        ("num_target_layers", target.num_layers),
    ):
        if keys.get(name) is not None:
            same_size(found, name, keys[name], there)
    _whole_vocabulary(found)
    drop_embedding(found)
    if (own := tensors.pop("lm_head.weight", None)) is not None:
        same_matrix(found, "lm_head.weight", own, target.head)
    for name in [
        name
        for name in tensors
        if name.endswith("self_attn.o_proj.bias") and not tensors[name].any()
    ]:
        del tensors[name]  # as vLLM needs it
    if sorted(set(taps)) != taps or not all(
        type(tap) is int and 1 <= tap < target.num_layers for tap in taps
    ):
        raise UserError(
            f"taps {taps} must be ascending, distinct and between 1 and {target.num_layers - 1}; "
            "say --taps"
        )
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != len(taps) * target.hidden_size:
        many = fc.shape[1] / target.hidden_size
        raise UserError(
            f"{found.folder}: fc.weight fuses {many:g} taps of width {target.hidden_size}, the "
            f"config names {taps}"
        )
    kind = DSparkDrafter if spark else DFlashDrafter
    return found.finished(
        kind.from_serving_config(_native(found, taps), target.embedding_and_head), layout
    )


def _native(found: Checkpoint, taps: list[int]) -> dict[str, Any]:
    """Our own config."""
    keys, heads = found.config, found.config["num_attention_heads"]
    if keys.get("rope_theta") is None and "rope_theta" not in (keys.get("rope_parameters") or {}):
        raise UserError(
            f"{found.path} lacks rope_theta, for which engines take different ones; add that of "
            "the training"
        )
    if (mask := keys.get("mask_token_id")) is None:
        raise UserError(f"{found.path} lacks mask_token_id; it is needed to build the drafter")
    if type(mask) is not int or not 0 <= mask < found.target.vocab_size:
        raise UserError(
            f"{found.path} says mask_token_id {mask}, which is none of the target's "
            f"{found.target.vocab_size} tokens"
        )
    if (block := keys.get("block_size")) is None:
        block = 16
        found.notes.append("no block_size is given: 16 is taken, as engines do")
    if type(block) is not int or block < 2:
        raise UserError(
            f"{found.path} garbles a field: block_size is {block!r}, not a whole number of at "
            "least 2"
        )
    return {
        "block_size": block,
        "hidden_size": keys["hidden_size"],
        "intermediate_size": keys["intermediate_size"],
        "num_hidden_layers": keys["num_hidden_layers"],
        "num_target_layers": found.target.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys["num_key_value_heads"],
        "head_dim": keys.get("head_dim") or keys["hidden_size"] // heads,
        "hidden_act": keys.get("hidden_act") or "silu",
        "rms_norm_eps": keys["rms_norm_eps"],
        "vocab_size": keys["vocab_size"],
        "max_position_embeddings": keys.get("max_position_embeddings") or 32768,
        "rope_parameters": rope_of(found),
        "attention_bias": any("q_proj.bias" in name for name in found.tensors),
        "markov_rank": keys.get("markov_rank"),
        INNER: {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps]},
    }


def _refuse_others(found: Checkpoint, spark: bool, anchored: bool) -> None:
    """Raise `UserError` for what changes the drafts and is not in our drafters."""
    keys, reason = found.config, None
    if anchored and not spark:
        reason = "its anchor drafts too (sample_from_anchor), which no engine serves as dflash"
    elif spark and not anchored:
        reason = (
            "its anchor does not draft (sample_from_anchor is false), as that of our DSpark does"
        )
    elif keys.get("use_swa") or set(keys.get("layer_types") or ["full_attention"]) != {
        "full_attention"
    }:
        reason = "it has layers with sliding attention"
    elif keys.get("is_causal") or keys.get("causal"):
        reason = "its blocks are causal: a slot does not see those after it"
    elif spark and (head := keys.get("markov_head_type", "vanilla")) != "vanilla":
        reason = f"its transition bias is of type {head!r}; engines and we have vanilla"
    elif spark and (
        keys.get("enable_confidence_head") is False
        or not any("confidence_head." in t for t in found.tensors)
    ):
        reason = "it has no confidence head, which some engines demand of DSpark, and we too"
    elif spark and keys.get("confidence_head_with_markov") is False:
        reason = (
            "its confidence is computed without the token before (confidence_head_with_markov is "
            "false)"
        )
    elif spark and keys.get("final_logit_softcapping") is not None:
        reason = (
            "its logits are capped (final_logit_softcapping), together with its transition bias or "
            "without"
        )
    elif keys.get("is_neox_style") is False or keys.get("rope_is_neox_style") is False:
        reason = "its rotary positions turn neighbours (is_neox_style is false)"
    elif keys.get("attention_sink_bias") or keys.get("add_swa_attention_sink_bias"):
        reason = "its attention has sinks"
    elif other := [name for name in ONE if keys.get(name) not in (None, 1)]:
        reason = f"it says {other[0]} {keys[other[0]]}, and our drafters have none but 1"
    if reason is not None:
        raise UserError(f"{found.folder} is not supported: {reason}")


def _whole_vocabulary(found: Checkpoint) -> None:
    """Drop maps that leave nothing out. Raises `UserError` for others."""
    tensors, drafted = found.tensors, found.config.get("draft_vocab_size")
    offsets, kept = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if drafted not in (None,
    found.config["vocab_size"]) or (offsets is not None and offsets.any()) or (
        kept is not None and not kept.bool().all()
    ):  # fmt: skip
        raise UserError(
            f"{found.folder} drafts a part of the target's vocabulary (d2t), which block drafters "
            "do not here; not supported"
        )


def _plain_taps(found: Checkpoint, keys: Mapping[str, Any]) -> list[int]:
    """Taps as indices of hidden states. `target_layer_ids` has layers, counted from 0; vLLM's own
    key has hidden states."""
    if found.answers.taps is not None:
        return found.answers.taps
    layers, states = keys.get("target_layer_ids"), keys.get("eagle_aux_hidden_state_layer_ids")
    taps = None if layers is None else [layer + 1 for layer in layers]
    if taps is None and states is None:
        raise UserError(
            f"{found.path} lacks target_layer_ids; say which hidden states it fuses with --taps"
        )
    if taps is not None and states is not None and taps != states:
        raise UserError(
            f"{found.path} says target_layer_ids {layers} and hidden states {states}, which are "
            "not one more"
        )
    return [*(taps if taps is not None else states or [])]


def _one(found: Checkpoint, inner: Mapping[str, Any], name: str) -> Any:
    """A key that may stand in two places. Raises `UserError` where these differ."""
    within, above = inner.get(name), found.config.get(name)
    if within is not None and above is not None and within != above:
        raise UserError(
            f"{found.path} says {name} {above} and, in {INNER}, {within}; engines read either"
        )
    return above if within is None else within


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])
