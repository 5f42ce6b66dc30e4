"""Import of public block drafters: DFlash and DSpark in the layouts of their projects and engines.

DFlash is read as z-lab and SpecForge write it, DSpark as DeepSpec and SpecForge do, and both in the
speculators library's layout. A key that changes the drafts in a way that draftsmith's drafters do
not compute is refused by name (`config_keys`): ignoring it would cost acceptance silently.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..dflash import DFlashDrafter
from ..dspark import DSparkDrafter
from ..errors import UserError
from ..files import JsonObject
from .config_keys import check_keys, merge_tables
from .foreign import (
    NEEDED_KEYS,
    Checkpoint,
    ImportedDrafter,
    check_matrix,
    check_size,
    drop_embedding,
    named_taps,
)

LIBRARY = "transformer_layer_config"  # in which the speculators library keeps the layers' keys
INNER = "dflash_config"  # in which z-lab and SpecForge keep the keys; DeepSpec has them at the top
OTHER_KINDS = ("DFlash2DraftModel", "DominoDraftModel", "DFlashLinearDraftModel")
TABLES = (INNER, "dspark_config")
BLOCK_KEYS = (*NEEDED_KEYS, "num_hidden_layers", "num_key_value_heads", "mask_token_id")


def is_block(config: JsonObject, names: Iterable[str]) -> bool:
    """Return true for DFlash and DSpark, by config keys or the names of the tensors.

    Only they have one norm of the fused taps that all layers share.
    """
    if INNER in config:
        return True
    classes = ("DFlashDraftModel", "DSparkModel", "DSparkDraftModel")
    return _architecture(config).endswith(classes) or "hidden_norm.weight" in names


def block_drafter(found: Checkpoint) -> ImportedDrafter:
    """Read a layout whose keys are inside `dflash_config`, at the top, or in both places."""
    if _architecture(found.config) in OTHER_KINDS:
        raise UserError(
            f"{found.folder} is {_architecture(found.config)}, which is not supported; DFlash and "
            "DSpark are read"
        )
    keys = merge_tables(found, TABLES)
    # DSpark is recognised by its transition bias, not by the name of its architecture.
    has_transition = any(name.startswith("markov_head.") for name in found.tensors)
    is_dspark = has_transition or bool(keys.get("markov_rank"))
    named_spark = "DSpark" in _architecture(found.config)
    if named_spark and not is_dspark and keys.get("sample_from_anchor") is not False:
        raise UserError(
            f"{found.folder} is a DFlash whose anchor drafts too (markov_rank 0 of "
            f"{_architecture(found.config)}), which draftsmith's DFlash does not; not supported"
        )
    # Three keys are in use for one fact: the anchor's own slot drafts too. Where none is given, it
    # drafts in DSpark and does not in DFlash.
    anchored = keys.get("sample_from_anchor", keys.get("shift_label"))
    if keys.get("dspark_bonus_anchor"):
        anchored = False
    if anchored is None:
        anchored = is_dspark
    taps = named_taps(found, keys, {})
    if taps is None:
        raise UserError(
            f"{found.path} lacks target_layer_ids; name the hidden states that it fuses with --set "
            "taps=.."
        )
    return _read(
        found, keys, taps, is_dspark, bool(anchored), "dspark" if is_dspark else "dflash", *TABLES
    )


def speculators_block(found: Checkpoint) -> ImportedDrafter:
    """Read the speculators library's layout of both.

    Its taps are indices of hidden states. The anchor does not draft unless `sample_from_anchor` is
    true.
    """
    config, kind = found.config, found.config["speculators_model_type"]
    layer = config[LIBRARY]
    full = set(layer.get("layer_types") or ["full_attention"]) == {"full_attention"}
    if config.get("sliding_window_non_causal") is False and full and not found.answers.ours:
        found.notes.append(
            "sliding_window_non_causal is false and no layer slides: blocks are taken as "
            "non-causal, as they are trained; vLLM takes them as causal"
        )
    taps = found.answers.taps or [*config["aux_hidden_state_layer_ids"]]
    anchored = bool(config.get("sample_from_anchor"))
    keys = merge_tables(found, (LIBRARY,))
    return _read(found, keys, taps, kind == "dspark", anchored, f"speculators {kind}", LIBRARY)


def _read(
    found: Checkpoint,
    keys: JsonObject,
    taps: list[int],
    is_dspark: bool,
    anchored: bool,
    layout: str,
    *tables: str,
) -> ImportedDrafter:
    """Build the drafter that the keys of any layout describe, and fill it.

    `keys` are the config's, from any part of it. `is_dspark` is true for DSpark,
    `anchored` if the anchor's slot drafts, `layout` is the name for messages, and `tables` are the
    tables of the config whose keys are among them. Raises `UserError`.
    """
    found.config = keys
    # The target's own head makes the logits of DFlash, capped as the target caps them. Where the
    # transition bias is added, the cap may apply before or after that.
    check_keys(found, "block", is_dspark, *tables)
    if (reason := _unsupported(found, is_dspark, anchored)) is not None:
        raise UserError(f"{found.folder} is not supported: {reason}")
    found.demand_keys((*BLOCK_KEYS, "markov_rank") if is_dspark else BLOCK_KEYS)
    target, tensors = found.target, found.tensors
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
    }
    for name, size in sizes.items():
        # Only some layouts have the last two.
        if keys.get(name) is not None:
            check_size(found, name, keys[name], size)
    _draft_vocabulary(found)
    drop_embedding(found)
    if (matrix := tensors.pop("lm_head.weight", None)) is not None:
        check_matrix(found, "lm_head.weight", matrix, target.head)
    found.check_taps(taps, 1, target.hidden_size)
    mask = keys["mask_token_id"]
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise UserError(
            f"{found.path} says mask_token_id {mask}, which is not among the target's "
            f"{target.vocab_size} tokens"
        )
    if (block := keys.get("block_size")) is None:
        block = 16
        found.notes.append("the config has no block_size: using 16, as engines do")
    if type(block) is not int or block < 2:
        raise UserError(
            f"{found.path} has an invalid field: block_size is {block!r}, not a whole number of at "
            "least 2"
        )
    found.demand_parts(keys["num_hidden_layers"], "layers")
    kind = DSparkDrafter if is_dspark else DFlashDrafter
    native = {
        "architectures": [kind.architecture],
        **found.layer_keys(keys["num_hidden_layers"], 32768, usual_base=False),
        "block_size": block,
        "num_target_layers": target.num_layers,
        # None for DFlash, which does not read it.
        "markov_rank": keys.get("markov_rank"),
        # None for all tokens.
        "draft_vocab_size": keys.get("draft_vocab_size"),
        INNER: {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps]},
    }
    return found.finished(kind, native, layout)


def _unsupported(found: Checkpoint, is_dspark: bool, anchored: bool) -> str | None:
    """Return the first reason why draftsmith's drafters do not draft as this one does, or None.

    It concerns the anchor, and DSpark's transition bias and confidence head.
    """
    keys = found.config
    if anchored and not is_dspark:
        key = "shift_label" if keys.get("shift_label") else "sample_from_anchor"
        return f"its anchor drafts too ({key}), which draftsmith's DFlash does not"
    if is_dspark and not anchored:
        return "its anchor does not draft (sample_from_anchor is false), as that of DSpark does"
    if not is_dspark:
        return None
    if (head := keys.get("markov_head_type", "vanilla")) != "vanilla":
        return f"its transition bias is of type {head!r}; engines and draftsmith have vanilla"
    has_tensors = any("confidence_head." in name for name in found.tensors)
    if keys.get("enable_confidence_head") is False or not has_tensors:
        return "it has no confidence head, which some engines demand of DSpark, and draftsmith too"
    if keys.get("confidence_head_with_markov") is False:
        return (
            "its confidence is computed without the token before (confidence_head_with_markov is "
            "false)"
        )
    return None


def _draft_vocabulary(found: Checkpoint) -> None:
    """Drop vocabulary maps that name every token, and with them the size of the vocabulary.

    Raises `UserError` for a draft vocabulary of others, whose heads have rows of their own.
    """
    reduced = found.config.get("draft_vocab_size") not in (None, found.config["vocab_size"])
    if not reduced and found.drop_whole_maps() is None:
        found.config.pop("draft_vocab_size", None)
    elif not found.answers.ours:
        raise UserError(
            f"{found.folder} drafts a part of the target's vocabulary (d2t), which block drafters "
            "of others do not here; not supported"
        )


def _architecture(config: JsonObject) -> str:
    return str((config.get("architectures") or [""])[0])
