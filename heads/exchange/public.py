"""Other people's checkpoints, read into our drafters: Medusa, EAGLE-1/2, EAGLE-3 of SafeAILab,
SpecForge and speculators, and the block drafters of `public_blocks`.

Every tensor has to be there by name and shape, and none besides. What a layout leaves open (which
unit taps are in, which state is recycled) is taken where only one reading is possible, and asked
for otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..eagle import ARCHITECTURES, EagleDrafter, default_taps
from ..errors import UserError
from ..files import read_json
from ..medusa import MedusaConfig, MedusaHeads
from ..stored_tensors import StoredTensors
from .foreign import (
    Answers,
    Checkpoint,
    Public,
    TargetSide,
    drop_embedding,
    rope_of,
    same_matrix,
    same_size,
)
from .public_blocks import block_drafter, is_block, speculators_block

MIDDLE = re.compile(r"^midlayer\.")
LAYER = re.compile(r"^layers\.(\d+)\.")
MEDUSA = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
WRAPPERS = ("draft_model.", "model.")  # what trainers keep a head in
TAP_NORMS = {"aux_norm_low.weight": "fc_norm.0.weight", "aux_norm_mid.weight": "fc_norm.1.weight"}
TAP_NORMS |= {"aux_norm_high.weight": "fc_norm.2.weight"}  # older names
PLAIN_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK_ROW = "mask_embedding.pt"  # vLLM and llama.cpp put it in place of the target's
INNER_KEYS = (
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "hidden_size",
    "vocab_size",
)


def read_public(folder: Path, target: TargetSide, answers: Answers) -> Public:
    """The drafter in `folder`. Raises `UserError` with what is missing, surplus, contradictory or
    open."""
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
    names = {plain_name(name, stored): name for name in stored if not DERIVED.search(name)}
    read = recognise(config, list(names), folder)
    tensors = {name: stored[there] for name, there in names.items() if wanted(name, read)}
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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"garbles a field ({error})"
        raise UserError(f"{path} {what}; it is needed to build the drafter") from error


def recognise(
    config: Mapping[str, Any], names: Sequence[str], folder: Path
) -> Callable[[Checkpoint], Public]:
    """Who wrote it, by what only they write. Raises `UserError` if nobody known did."""
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
    if "medusa_num_heads" in config or any(MEDUSA.match(name) for name in names):
        return medusa
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
        f"{folder} is no Medusa, EAGLE, DFlash, DSpark or speculators checkpoint: it has "
        f"{', '.join(sorted(names)[:3])}"
    )


def plain_name(name: str, stored: Mapping[str, Any]) -> str:
    """A tensor's name without the module that a trainer kept the head in, and by today's name."""
    for wrapper in WRAPPERS:
        if f"{wrapper}fc.weight" in stored:
            name = name.removeprefix(wrapper)
    return TAP_NORMS.get(name, name)


def wanted(name: str, read: Callable[[Checkpoint], Public]) -> bool:
    """Whether a tensor is the drafter's: Medusa v1.0 stores its heads inside the whole model."""
    return read is not medusa or not name.startswith(("model.", "lm_head."))


def medusa(found: Checkpoint) -> Public:
    """FasterDecoding's names: `0.0.linear.weight` (v0.1), or `medusa_head.0.0.linear.weight` within
    a whole model (v1.0)."""
    config, tensors = found.config, found.tensors
    inside = any(name.startswith("medusa_head.") for name in tensors)
    found.tensors = tensors = {
        re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()
    }
    places = [(int(m[1]), int(m[2]), m[3]) for name in tensors if (m := MEDUSA.match(name))]
    if not any(kind != "weight" for *_, kind in places):
        raise UserError(
            f"{found.folder} has no tensors of Medusa heads, though its config speaks of some"
        )
    blocks = [(head, layer) for head, layer, kind in places if kind != "weight"]
    heads, layers = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    for key, there in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
        if (said := config.get(key)) is not None and said != there:
            if key == "medusa_num_heads" and said < there and not inside:
                found.notes.append(
                    f"config.json says {said} heads, the file holds {there}: all are taken"
                )
            else:
                raise UserError(f"{found.path} says {key} {said}, the file holds {there}")
    shared = not any(kind == "weight" for *_, kind in places)
    # vLLM has the target's head beside the heads
    if shared and (own := tensors.pop("lm_heads.0.weight", None)) is not None:
        same_matrix(found, "lm_heads.0.weight", own, found.target.head)
    hidden = len(tensors["0.0.linear.weight"])
    biases = [tensor for name, tensor in tensors.items() if name.endswith("linear.bias")]
    if config.get("medusa_fc_bias") is False and any(bias.any() for bias in biases):
        raise UserError(
            f"{found.path} says that the blocks have no bias (medusa_fc_bias), and the file holds "
            "some"
        )
    if not biases:
        tensors.update(
            {
                f"{h}.{i}.linear.bias": torch.zeros(hidden, dtype=found.dtype)
                for h in range(heads)
                for i in range(layers)
            }
        )
        found.notes.append("the blocks have no bias: zeros are taken")
    if inside:
        found.notes.append(
            "the heads stand in a whole model, with which they were trained: give that very model "
            "as target"
        )
    head = found.target.embedding_and_head.head if shared else None
    drafter = MedusaHeads(
        MedusaConfig(heads, layers, shared), hidden, found.target.vocab_size, head
    )
    same_size(found, "hidden_size", hidden, found.target.hidden_size)
    return found.finished(drafter, "medusa v1.0" if inside else "medusa v0.1")


def eagle1(found: Checkpoint) -> Public:
    """SafeAILab's EAGLE-1 and EAGLE-2, which have the same weights, and what engines are given of
    them."""
    config, tensors = found.config, found.tensors
    drop_embedding(found)
    bias = "fc.bias" in tensors
    if bias and not tensors["fc.bias"].any():
        del tensors["fc.bias"]  # as SGLang needs it
        bias = False
    elif not bias and config.get("bias"):
        found.notes.append(
            "config.json says that fc has a bias, of which there is none: none is taken"
        )
    native = _llama_layers(found, version=1) | {"bias": bias}
    return found.finished(
        EagleDrafter.from_serving_config(native, found.target.embedding_and_head), "eagle1"
    )


def eagle3(found: Checkpoint) -> Public:
    """SafeAILab's and SpecForge's files, and all that engines call plain."""
    inner = found.config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{found.path} says use_aux_hidden_state false: the head is fed by the last state, "
            "which is not supported"
        )
    taps = _plain_taps(found, inner)

    def flag(name, default=False):
        return bool(inner.get(name, found.config.get(name, default)))

    norm_output = flag("norm_output")
    if found.answers.norm_output is not None:
        norm_output = found.answers.norm_output
    elif norm_output and not found.answers.ours:
        raise UserError(
            f"{found.path} says norm_output true, by which SpecForge meant until 2026-09 the norm "
            "before lm_head that all heads "
            "have; say --norm-output if drafts recycle the normed state (EAGLE-3.1), "
            "--no-norm-output if not; else "
            "evaluate both ways"
        )
    elif (
        "norm_output" in found.config
        and not found.answers.ours
        and bool((found.tensors.get("norm.weight", torch.zeros(1)) == 1).all())
    ):
        found.notes.append(
            "norm.weight is all ones, as where SpecForge trained lm_head on states without it: "
            "see that it accepts"
        )
    flags = {
        "norm_before_residual": _open(
            found.answers.norm_before_residual, flag("norm_before_residual")
        ),
        "norm_before_fc": flag("norm_before_fc"),
        "fc_norm": flag(
            "fc_norm", bool(inner.get("use_aux_norm", found.config.get("use_aux_norm", False)))
        ),
        "norm_output": norm_output,
    }
    return _eagle3(found, found.config, taps, flags, "eagle3")


def speculators(found: Checkpoint) -> Public:
    """The speculators library's format."""
    layer, config = found.config["transformer_layer_config"], found.config
    taps = found.answers.taps or config.get("eagle_aux_hidden_state_layer_ids")
    if not taps:
        taps = default_taps(found.target.num_layers)
        found.notes.append(f"no taps are named: {list(taps)} are taken, as engines do")
    elif taps[0] == 1 and found.answers.taps is None and not found.answers.ours:
        found.notes.append(
            f"the first of the taps {taps} is 1: converted heads exist whose taps are one too "
            "low; see that it accepts"
        )
    before = _open(found.answers.norm_before_residual, config.get("norm_before_residual"))
    if before is None:
        raise UserError(
            f"{found.path} does not say norm_before_residual, of which the library's default is "
            "false and vLLM's true; say "
            "--norm-before-residual or --no-norm-before-residual"
        )
    flags = {name: bool(config.get(name, False)) for name in ("norm_before_fc", "fc_norm")}
    flags |= {
        "norm_before_residual": before,
        "norm_output": bool(_open(found.answers.norm_output, config.get("norm_output", False))),
    }
    outer = {
        key: config[key]
        for key in ("draft_vocab_size", "target_hidden_size")
        if config.get(key) is not None
    }
    return _eagle3(found, {**layer, **outer}, list(taps), flags, "speculators")


def _open(answer: Any, otherwise: Any) -> Any:
    return otherwise if answer is None else answer


def _eagle3(
    found: Checkpoint, config: dict[str, Any], taps: list[int], flags: dict[str, bool], layout: str
) -> Public:
    """What both layouts of EAGLE-3 have in common. `config`: the layer's own."""
    found.config = config
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise UserError(
            f"{found.path} says fc_norm and norm_before_fc, of which a head can have one"
        )
    if sorted(set(taps)) != taps or not all(0 <= tap < found.target.num_layers for tap in taps):
        raise UserError(
            f"taps {taps} must be ascending, distinct and between 0 and "
            f"{found.target.num_layers - 1}; say --taps"
        )
    drop_embedding(found)
    native = _llama_layers(found, version=3)
    tensors, vocab = found.tensors, native["vocab_size"]
    drafted = config.get("draft_vocab_size") or vocab
    _vocabulary(found, drafted, vocab)
    wide = config.get("target_hidden_size") or native["hidden_size"]
    same_size(found, "target_hidden_size", wide, found.target.hidden_size)
    if "fc.weight" in tensors and tensors["fc.weight"].shape[1] != len(taps) * wide:
        many = tensors["fc.weight"].shape[1] / wide
        raise UserError(
            f"{found.folder}: fc.weight fuses {many:g} taps of width {wide}, the config names "
            f"{len(taps)}: {taps}"
        )
    if "lm_head.weight" not in tensors and drafted == vocab and found.target.head is not None:
        tensors["lm_head.weight"] = found.target.head.to("cpu", found.dtype)
        found.notes.append("it has no lm_head: the target's is taken, as engines do")
    native |= flags | {
        "draft_vocab_size": drafted,
        "bias": "fc.bias" in tensors,
        "eagle_aux_hidden_state_layer_ids": taps,
        "target_hidden_size": wide,
    }
    return found.finished(
        EagleDrafter.from_serving_config(native, found.target.embedding_and_head), layout
    )


def _plain_taps(found: Checkpoint, inner: Mapping[str, Any]) -> list[int]:
    """Taps as indices of hidden states. The top-level key has these; the nested one has layers
    counted from 0, but for vLLM, which reads it as it stands: alone it is open, unless only one
    reading gives the default taps."""
    if found.answers.taps is not None:
        return found.answers.taps
    key = "eagle_aux_hidden_state_layer_ids"
    top, nested = found.config.get(key) or None, inner.get(key) or None
    usual = list(default_taps(found.target.num_layers)) if found.target.num_layers >= 7 else None
    if top is not None:
        if nested is not None and nested not in ([tap - 1 for tap in top], top):
            raise UserError(
                f"{found.path} names taps {top} and, inside eagle_config, {nested}, which is "
                "neither these nor one less"
            )
        return list(top)
    if nested is None:
        found.notes.append(f"no taps are named: {usual} are taken, as every engine does")
        return list(usual if usual is not None else default_taps(found.target.num_layers))
    shifted = [layer + 1 for layer in nested]
    if usual in (shifted, nested):
        return list(usual or [])
    raise UserError(
        f"{found.path} names taps {nested} inside eagle_config only: hidden states {shifted} for "
        f"SpecForge and SGLang, {nested} "
        f"for vLLM; say which with --taps '{shifted}' or --taps '{nested}'"
    )


def _llama_layers(found: Checkpoint, version: int) -> dict[str, Any]:
    """The part of our own config that describes the layers; tensors are renamed to our names."""
    config, tensors = found.config, found.tensors
    missing = [key for key in INNER_KEYS if config.get(key) is None]
    if missing:
        raise UserError(f"{found.path} lacks {missing[0]}; it is needed to build the drafter")
    same_size(found, "vocab_size", config["vocab_size"], found.target.vocab_size)
    if version == 1:
        same_size(found, "hidden_size", config["hidden_size"], found.target.hidden_size)
    for name in [
        name
        for name in tensors
        if name.endswith("self_attn.o_proj.bias") and not tensors[name].any()
    ]:
        del tensors[name]  # as vLLM needs it
    layers = 1 + max([int(m[1]) for name in tensors if (m := LAYER.match(name))], default=0)
    if config.get("num_hidden_layers", 1) != layers:
        found.notes.append(
            f"config.json says {config['num_hidden_layers']} layers, the file holds {layers}: "
            "these are taken"
        )
    if version == 3:
        single = layers == 1
        found.tensors = {MIDDLE.sub("layers.0.", name): tensor for name, tensor in tensors.items()}
        if single:
            found.tensors = {
                LAYER.sub("midlayer.", name): tensor for name, tensor in found.tensors.items()
            }
    heads = config["num_attention_heads"]

    def has(part):
        return any(part in name for name in tensors)

    return {
        "architectures": [ARCHITECTURES[version, has("q_norm")]],  # type: ignore[index]
        "num_hidden_layers": layers,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_act": config.get("hidden_act") or "silu",
        "rms_norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "rope_parameters": rope_of(found),
        "attention_bias": has("q_proj.bias"),
    }


def _vocabulary(found: Checkpoint, drafted: int, vocab: int) -> None:
    """Demand maps where tokens are left out, and none elsewhere; make the one that can be made."""
    tensors = found.tensors
    if drafted == vocab:
        for name in ("d2t", "t2d"):
            trivial = not tensors[name].any() if name == "d2t" and name in tensors else True
            if name in tensors and not (trivial and (name == "d2t" or bool(tensors[name].all()))):
                raise UserError(
                    f"{found.folder}: {name} leaves tokens out, but draft_vocab_size is the whole "
                    "vocabulary"
                )
            tensors.pop(name, None)
        return
    if "d2t" not in tensors:
        raise UserError(
            f"{found.folder}: d2t is missing, so nobody knows which {drafted} of {vocab} tokens "
            "are drafted"
        )
    tensors["d2t"] = offsets = tensors["d2t"].long()
    ids = offsets + torch.arange(len(offsets))
    kept = torch.zeros(vocab, dtype=torch.bool)
    if len(ids) == drafted and bool(((ids >= 0) & (ids < vocab)).all()):
        kept[ids] = True
    if "t2d" not in tensors:
        tensors["t2d"] = kept
        found.notes.append("t2d is missing: it is made from d2t")
    tensors["t2d"] = tensors["t2d"].bool()
