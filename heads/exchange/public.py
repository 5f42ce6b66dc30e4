"""Import of public checkpoints as artifacts: EAGLE-1 to 3, and recognition of all layouts.

Block drafters are read by `public_blocks`. The tensors have to be exactly the drafter's by name and
shape. A layout may leave open in which unit its taps are counted, or which state is recycled: it is
read where only one reading is possible, and the user is asked otherwise. The table of layouts is
docs/checkpoint-formats.md#public-checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifact import CONFIG_ERRORS
from ..eagle import ARCHITECTURES, EagleDrafter, default_taps
from ..errors import UserError, out_of_memory
from ..files import JsonObject, read_json
from ..stored_tensors import StoredTensors
from ..vocabulary import ids_of_offsets
from .config_keys import check_keys, merge_tables
from .engines.engine import EAGLE_TAPS
from .foreign import (
    NEEDED_KEYS,
    Answers,
    Checkpoint,
    ImportedDrafter,
    TargetParts,
    check_size,
    drop_embedding,
    named_taps,
)
from .public_blocks import LIBRARY, block_drafter, is_block, speculators_block

MIDDLE = re.compile(r"^midlayer\.")
LAYER = re.compile(r"^layers\.(\d+)\.")
# Rotary frequencies, which older trainers stored although they follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
WRAPPERS = ("draft_model.", "model.")  # names of modules in which trainers keep a drafter
# Older names of the norms of each tap.
TAP_NORMS = {"aux_norm_low.weight": "fc_norm.0.weight", "aux_norm_mid.weight": "fc_norm.1.weight"}
TAP_NORMS |= {"aux_norm_high.weight": "fc_norm.2.weight"}
PLAIN_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INNER = "eagle_config"  # in which SpecForge and SGLang keep some keys
MASK_ROW = "mask_embedding.pt"  # vLLM and llama.cpp use it instead of the target's embedding


def read_public(folder: Path, target: TargetParts, answers: Answers) -> ImportedDrafter:
    """Read the drafter in `folder`, whoever wrote it.

    Raises `UserError` that names what is missing, surplus, contradictory, not supported or open.
    """
    path = folder / "config.json"
    config = read_json(path)
    if (folder / MASK_ROW).exists():
        raise UserError(
            f"{folder} has an embedding of its own for the mask token ({MASK_ROW}), which is not "
            "supported"
        )
    stored = StoredTensors(folder)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a table of keys; copy or download it again")
    stored_names = {plain_name(name, stored): name for name in stored if not DERIVED.search(name)}
    # The names alone decide who wrote the files, so that only the drafter's tensors are read.
    read = recognise(config, list(stored_names), folder)
    tensors = {name: stored[stored_name] for name, stored_name in stored_names.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in PLAIN_TYPES:
            raise UserError(
                f"{folder}: {name} is {tensor.dtype}, which is not read here; convert it to "
                "bfloat16"
            )
    try:
        return read(Checkpoint(folder, path, config, tensors, target, answers))
    except UserError:
        raise
    # A config that lacks a key, or holds a value of another type, fails somewhere in the reader.
    except (AttributeError, *CONFIG_ERRORS) as error:
        if out_of_memory(error):
            raise
        what = (
            f"lacks {error}" if isinstance(error, KeyError) else f"has an invalid field ({error})"
        )
        raise UserError(f"{path} {what}; it is needed to build the drafter") from error


def recognise(
    config: JsonObject, names: Sequence[str], folder: Path
) -> Callable[[Checkpoint], ImportedDrafter]:
    """Return the reader of a checkpoint, recognised by keys and names that only its layout has.

    `names` are those of its tensors. Raises `UserError` if no reader fits.
    """
    if (kind := config.get("speculators_model_type")) is not None:
        readers = {"eagle3": speculators, "dflash": speculators_block, "dspark": speculators_block}
        if kind not in readers:
            raise UserError(
                f"{folder} is a speculators checkpoint of type {kind!r}; only "
                f"{', '.join(readers)} are read here"
            )
        return readers[kind]
    if is_block(config, names):
        return block_drafter
    if "medusa_num_heads" in config:
        raise UserError(
            f"{folder} holds Medusa heads, which are not imported; train some (draftsmith train "
            "medusa), or use draftsmith's own as they are"
        )
    if any(".hidden_norm." in name for name in names) or "draft_vocab_size" in config:
        return eagle3
    if "fc.weight" in names and any(LAYER.match(name) for name in names):
        return eagle1
    if any(name.startswith("model.layers.") for name in names):
        raise UserError(
            f"{folder} is a whole language model, which needs no import: give it to --drafter as "
            "it is"
        )
    raise UserError(
        f"{folder} is not an EAGLE, DFlash, DSpark or speculators checkpoint: it has "
        f"{', '.join(sorted(names)[:3])}"
    )


def plain_name(name: str, stored: Container[str]) -> str:
    """Return a tensor's current name, without the module in which a trainer kept the drafter."""
    for wrapper in WRAPPERS:
        if f"{wrapper}fc.weight" in stored:
            name = name.removeprefix(wrapper)
    return TAP_NORMS.get(name, name)


def eagle1(found: Checkpoint) -> ImportedDrafter:
    """Read SafeAILab's EAGLE-1 and EAGLE-2, whose weights are alike, and exports of EAGLE-1."""
    check_keys(found, "eagle1", False)
    # Exports for SGLang hold a bias of zeros, because its class would otherwise have a random one.
    if "fc.bias" in found.tensors and not found.tensors["fc.bias"].any():
        del found.tensors["fc.bias"]
    native = _llama_layers(found, version=1) | {"bias": "fc.bias" in found.tensors}
    drop_embedding(found)
    return found.finished(EagleDrafter, native, "eagle1")


def eagle3(found: Checkpoint) -> ImportedDrafter:
    """Read EAGLE-3 of SafeAILab or SpecForge, and exports in the native layout."""
    check_keys(found, "eagle3", True, INNER)
    # Where both places name taps, their units may differ.
    config = merge_tables(found, (INNER,), apart=(EAGLE_TAPS,))
    if config.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{found.path} says use_aux_hidden_state false: the head is fed by the last state, "
            "which is not supported"
        )
    taps = _plain_taps(found, found.config.get(INNER) or {})

    def flag(name, default=False):
        return bool(config.get(name, default))

    before_residual = flag("norm_before_residual")
    flags = {
        "norm_before_residual": _answer_or(found.answers.norm_before_residual, before_residual),
        "norm_before_fc": flag("norm_before_fc"),
        "fc_norm": flag("fc_norm", flag("use_aux_norm")),
        "norm_output": _norm_output(found, flag("norm_output")),
    }
    return _eagle3(found, config, taps, flags, "eagle3")


def _norm_output(found: Checkpoint, declared: bool) -> bool:
    """Return true if drafts recycle the state after the final norm, as in EAGLE-3.1.

    `declared` is the config's `norm_output`, which SpecForge gave another meaning until 2026-09.
    Raises `UserError` where it is true and the user has not said which meaning it has.
    """
    if found.answers.norm_output is not None:
        return found.answers.norm_output
    if found.answers.ours:
        return declared
    if declared:
        raise UserError(
            f"{found.path} says norm_output true, by which SpecForge meant until 2026-09 the norm "
            "before lm_head that all heads have; give --set norm_output=true if drafts recycle the "
            "normed state (EAGLE-3.1), norm_output=false if not; else evaluate both ways"
        )
    # Where that older key was false, SpecForge trained the head without the final norm, whose
    # weights stayed at one.
    norm_weight = found.tensors.get("norm.weight", torch.zeros(1))
    if "norm_output" in found.config and bool((norm_weight == 1).all()):
        found.notes.append(
            "norm.weight is all ones, as where SpecForge trained lm_head on states without it: "
            "check its acceptance"
        )
    return declared


def speculators(found: Checkpoint) -> ImportedDrafter:
    """Read EAGLE-3 in the speculators library's layout."""
    check_keys(found, "eagle3", True, LIBRARY)
    config = found.config
    taps = found.answers.taps or config.get(EAGLE_TAPS)
    if not taps:
        taps = default_taps(found.target.num_layers)
        found.notes.append(f"the config names no taps: using {list(taps)}, as engines do")
    elif taps[0] == 1 and found.answers.taps is None and not found.answers.ours:
        found.notes.append(
            f"the first of the taps {taps} is 1: converted heads exist whose taps are one too "
            "low; check its acceptance"
        )
    before_residual = _answer_or(
        found.answers.norm_before_residual, config.get("norm_before_residual")
    )
    if before_residual is None:
        raise UserError(
            f"{found.path} does not say norm_before_residual, of which the library's default is "
            "false and vLLM's true; give --set norm_before_residual=true or =false"
        )
    flags = {name: bool(config.get(name, False)) for name in ("norm_before_fc", "fc_norm")}
    flags |= {
        "norm_before_residual": before_residual,
        "norm_output": bool(
            _answer_or(found.answers.norm_output, config.get("norm_output", False))
        ),
    }
    return _eagle3(found, merge_tables(found, (LIBRARY,)), list(taps), flags, "speculators")


def _answer_or(answer: Any, otherwise: Any) -> Any:
    return otherwise if answer is None else answer


def _eagle3(
    found: Checkpoint, config: JsonObject, taps: list[int], flags: dict[str, bool], layout: str
) -> ImportedDrafter:
    """Build the drafter that both layouts of EAGLE-3 describe, and fill it.

    `config` holds the layer's sizes at its top, `flags` is by the names of the native config, and
    `layout` is the name for messages. Raises `UserError` where config and tensors contradict.
    """
    found.config = config
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise UserError(
            f"{found.path} says fc_norm and norm_before_fc, of which a head can have one"
        )
    native = _llama_layers(found, version=3)
    drop_embedding(found)
    tensors, vocab = found.tensors, native["vocab_size"]
    drafted = config.get("draft_vocab_size") or vocab
    _vocabulary(found, drafted, vocab)
    wide = config.get("target_hidden_size") or native["hidden_size"]
    check_size(found, "target_hidden_size", wide, found.target.hidden_size)
    found.check_taps(taps, 0, wide)
    shared = found.answers.ours and config.get("shared_head", False)
    whole = drafted == vocab and not shared
    if "lm_head.weight" not in tensors and whole and found.target.head is not None:
        tensors["lm_head.weight"] = found.target.head.to("cpu", found.dtype)
        found.notes.append("it has no lm_head: using the target's, as engines do")
    native |= flags | {
        "draft_vocab_size": drafted,
        "bias": "fc.bias" in tensors,
        "shared_head": shared,
        EAGLE_TAPS: taps,
        "target_hidden_size": wide,
    }
    return found.finished(EagleDrafter, native, layout)


def _plain_taps(found: Checkpoint, inner: JsonObject) -> list[int]:
    """Return a plain EAGLE-3 checkpoint's taps, as indices of hidden states.

    Where vLLM's key is alone inside `eagle_config`, it holds layers counted from 0 for SpecForge
    and SGLang, and indices of hidden states for vLLM: it is read only if one of both readings gives
    the default taps. Raises `UserError` where it does not, and for keys that contradict each other.
    """
    if (taps := named_taps(found, found.config, inner)) is not None:
        return taps
    nested, layers = inner.get(EAGLE_TAPS), found.target.num_layers
    # The default taps of a target of fewer than 7 layers would not be distinct.
    usual = list(default_taps(layers)) if nested is None or layers >= 7 else []
    if nested is None:
        found.notes.append(f"the config names no taps: using {usual}, as every engine does")
        return usual
    # Example of 28 layers, whose default taps are 2, 14 and 25: 1, 13, 24 are taken for layers and
    # 2, 14, 25 for indices of hidden states. Any other numbers could be either.
    shifted = [layer + 1 for layer in nested]
    if usual in (shifted, nested):
        return usual
    raise UserError(
        f"{found.path} names taps {nested} inside eagle_config only: hidden states {shifted} for "
        f"SpecForge and SGLang, {nested} for vLLM; choose with --set taps=.."
    )


def _llama_layers(found: Checkpoint, version: int) -> JsonObject:
    """Return the part of the native config that describes the layers; rename tensors as in it.

    Raises `UserError` for a missing size, or one that contradicts the target.
    """
    config, tensors = found.config, found.tensors
    found.demand_keys(NEEDED_KEYS)
    check_size(found, "vocab_size", config["vocab_size"], found.target.vocab_size)
    if version == 1:
        check_size(found, "hidden_size", config["hidden_size"], found.target.hidden_size)
    # Numbered from 0. A file with `midlayer` has no numbers, and one layer.
    layers = 1
    for name in tensors:
        if match := LAYER.match(name):
            layers = max(layers, 1 + int(match[1]))
    found.demand_parts(layers, "layers")
    if config.get("num_hidden_layers", 1) != layers:
        found.notes.append(
            f"config.json says {config['num_hidden_layers']} layers, the file holds {layers}: "
            "using these"
        )
    if version == 3:
        # The native name of a single layer is `midlayer`; several are numbered from 0.
        pattern, prefix = (LAYER, "midlayer.") if layers == 1 else (MIDDLE, "layers.0.")
        found.tensors = {pattern.sub(prefix, name): tensor for name, tensor in tensors.items()}
    q_norm = version == 3 and any("q_norm" in name for name in tensors)
    return {
        "architectures": [ARCHITECTURES[version, q_norm]],
        **found.layer_keys(layers, 2048, usual_base=True),
    }


def _vocabulary(found: Checkpoint, drafted: int, vocab: int) -> None:
    """Make sure that there are both vocabulary maps if `drafted` is less than `vocab`, else none.

    A missing `t2d` is made from `d2t`. Raises `UserError` for a missing `d2t`, and for maps that
    leave tokens out although all are drafted. Maps that contradict each other are found by
    the drafter's own `check`.
    """
    tensors = found.tensors
    if drafted == vocab:
        if (name := found.drop_whole_maps()) is not None:
            raise UserError(
                f"{found.folder}: {name} leaves tokens out, but draft_vocab_size is the whole "
                "vocabulary"
            )
        return
    if "d2t" not in tensors:
        raise UserError(
            f"{found.folder}: d2t is missing, so it is unknown which {drafted} of {vocab} "
            "tokens are drafted"
        )
    tensors["d2t"] = tensors["d2t"].long()
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][ids_of_offsets(tensors["d2t"], vocab)] = True
        found.notes.append("t2d is missing: it is computed from d2t")
    tensors["t2d"] = tensors["t2d"].bool()
