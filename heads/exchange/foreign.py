"""Checkpoint of another project on its way to a drafter: config, tensors, and a user's answers.

The checks against the target that several layouts share are here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..documents import DocumentError, convert
from ..errors import UserError
from ..files import JsonObject
from ..layout import EmbeddingAndHead, fill_from, place, stored_as
from .engines.engine import EAGLE_TAPS

LAYER_IDS = "target_layer_ids"
# Largest difference between two matrices that count as equal, relative to the largest element:
# bfloat16 has 8 bits, so a matrix that was rounded to it on the way is still the target's.
MATRIX_TOLERANCE = 2**-7
# Keys without which no decoder layer can be built.
NEEDED_KEYS = (
    "num_attention_heads", "intermediate_size", "rms_norm_eps", "hidden_size", "vocab_size",
)  # fmt: skip


@dataclass
class TargetParts:
    """Sizes and matrices of the target that a checkpoint belongs to."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_and_head: EmbeddingAndHead
    embedding: Tensor | None = None
    """`[V, Ht]`; None if it is not known."""
    head: Tensor | None = None
    """Output matrix `[V, Ht]`; None if it is not known."""


@dataclass
class Answers:
    """Answers of the user to what a checkpoint leaves open; None for an open question."""

    taps: list[int] | None = None
    """Indices of hidden states, in place of those that the config names."""
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    target_embedding: bool = False
    """Use the target's embedding though the checkpoint's differs."""
    ours: bool = False
    """The files are an export of draftsmith, in which no key is ambiguous."""


@dataclass
class ImportedDrafter:
    """Drafter that was read from a checkpoint."""

    drafter: Any
    layout: str
    dtype: torch.dtype
    notes: list[str] = field(default_factory=list)
    """Assumptions that were made, as sentences for the user."""


@dataclass
class Checkpoint:
    """Contents of a folder. Readers change `config` and `tensors` until they are native."""

    folder: Path
    path: Path
    """Its `config.json`, for messages."""
    config: JsonObject
    tensors: dict[str, Tensor]
    """Tensors that the drafter is filled with, by name."""
    target: TargetParts
    answers: Answers
    notes: list[str] = field(default_factory=list)
    original: JsonObject = field(init=False)
    """The config as it was read."""

    def __post_init__(self) -> None:
        self.original = self.config

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every floating tensor without loss."""
        dtypes = (t.dtype for t in self.tensors.values() if t.is_floating_point())
        return reduce(torch.promote_types, dtypes)

    def finished(self, drafter_type: Any, native: JsonObject, layout: str) -> ImportedDrafter:
        """Return the drafter of the native config `native`, filled with the tensors.

        `drafter_type` is its class, with the interface of `layout.DrafterModule`. Raises
        `UserError` for a size out of bounds, and unless the tensors are exactly the drafter's by
        name and shape; both before anything of these sizes is made.
        """
        try:
            convert(native, drafter_type.document)
        except DocumentError as error:
            raise UserError(f"{self.path} has an invalid field: {error}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        lender = self.target.embedding_and_head
        drafter = drafter_type.of_shapes(native, lender, shapes, self.folder)
        # Files of mixed types exist, and a drafter has one type: the one that rounds nothing.
        dtype = self.dtype
        # Before `serving_state` is asked for: it gives views of the weights as they are then.
        place(drafter, torch.device("cpu"), dtype)
        expected = drafter.serving_state()
        # Vocabulary maps keep their integers.
        cast = {name: tensor.to(stored_as(tensor, dtype)) for name, tensor in self.tensors.items()}
        fill_from(cast, expected, self.folder, dtype)
        drafter.check()
        drafter.eval().requires_grad_(False)
        return ImportedDrafter(drafter, layout, dtype, self.notes)

    def demand_parts(self, count: int, what: str) -> None:
        """Raise `UserError` for more parts, such as layers, than there are tensors.

        Names and config may ask for any number of them, and each takes memory and time to make.
        """
        if count > len(self.tensors):
            raise UserError(
                f"{self.folder} asks for {count:,} {what} and holds {len(self.tensors)} tensors; "
                "its names or its config are damaged, copy or download it again"
            )

    def demand_keys(self, keys: Sequence[str]) -> None:
        """Raise `UserError` for the first of `keys` without which no drafter can be built."""
        for key in keys:
            if self.config.get(key) is None:
                raise UserError(f"{self.path} lacks {key}; it is needed to build the drafter")

    def check_taps(self, taps: list[int], least: int, width: int) -> None:
        """Raise `UserError` unless the target has `taps`, from `least`, and `fc` fuses them.

        `width` is the number of columns of `fc` for each of them.
        """
        most = self.target.num_layers - 1
        if most + 1 in taps:
            raise UserError(
                f"{self.path}: taps {taps} include {most + 1}, the state after the last layer: "
                "engines take it before the target's final norm, which is not done here, so the "
                "drafter cannot be imported"
            )
        # The type is compared because a config may hold 2.0 or true, which equal a number.
        fit = all(type(tap) is int and least <= tap <= most for tap in taps)
        if not fit or sorted(set(taps)) != taps:
            raise UserError(
                f"taps {taps} must be ascending, distinct and between {least} and {most}; say "
                "--set taps=.."
            )
        fc = self.tensors.get("fc.weight")
        if fc is not None and fc.shape[1] != len(taps) * width:
            # Not rounded: 2.5 taps tell the user that it is the width that is wrong.
            raise UserError(
                f"{self.folder}: fc.weight fuses {fc.shape[1] / width:g} taps of width {width}, "
                f"the config names {len(taps)}: {taps}"
            )

    def layer_keys(self, layers: int, positions: int, usual_base: bool) -> JsonObject:
        """Return the part of the native config that describes the layers, `layers` in number.

        `positions` is their number where the config does not say it; `usual_base` is that of
        `rope_of`. Zeros for the bias of an output projection are dropped: exports for vLLM hold
        them, because its class needs them, and no drafter has this bias.
        """
        config, tensors, heads = self.config, self.tensors, self.config["num_attention_heads"]
        for name in list(tensors):
            if name.endswith("self_attn.o_proj.bias") and not tensors[name].any():
                del tensors[name]
        kv_heads = config.get("num_key_value_heads")
        return {
            **{key: config[key] for key in NEEDED_KEYS},
            "num_hidden_layers": layers,
            "num_key_value_heads": heads if kv_heads is None else kv_heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "hidden_act": config.get("hidden_act") or "silu",
            "max_position_embeddings": config.get("max_position_embeddings") or positions,
            "rope_parameters": rope_of(self, usual_base),
            "attention_bias": any("q_proj.bias" in name for name in tensors),
        }

    def drop_whole_maps(self) -> str | None:
        """Drop vocabulary maps that name every token; return one that leaves tokens out, if any."""
        maps = {name: self.tensors[name] for name in ("d2t", "t2d") if name in self.tensors}
        for name, numbers in maps.items():
            # `d2t` holds offsets, `t2d` is true for what can be drafted.
            whole = not numbers.any() if name == "d2t" else numbers.all()
            if not whole:
                return name
        for name in maps:
            del self.tensors[name]
        return None


def named_taps(found: Checkpoint, config: JsonObject, inner: JsonObject) -> list[int] | None:
    """Return the taps that `config` names for sure, as indices of hidden states; None for none.

    The user's answer comes first. `target_layer_ids` holds layers counted from 0, as DeepSpec and
    z-lab write them, and vLLM's key at the top indices of hidden states. In the table `inner` both
    units are in use for that key. Raises `UserError` where they contradict each other.
    """
    if found.answers.taps is not None:
        return found.answers.taps
    layers = inner.get(LAYER_IDS) or config.get(LAYER_IDS)
    top, nested = config.get(EAGLE_TAPS) or None, inner.get(EAGLE_TAPS) or None
    taps = [layer + 1 for layer in layers] if layers else top
    if taps is None:
        return None
    named = f"{taps} ({LAYER_IDS} {layers})" if layers else f"{taps}"
    if top not in (None, taps):
        raise UserError(
            f"{found.path} names taps {named} and other hidden states, {top}, under {EAGLE_TAPS}; "
            "choose with --set taps=.."
        )
    if nested not in (None, taps, [tap - 1 for tap in taps]):
        raise UserError(
            f"{found.path} names taps {named} and, inside eagle_config, {nested}, which is neither "
            "these nor one less; choose with --set taps=.."
        )
    return list(taps)


BASES = ("rope_theta", "rope_base", "rotary_emb_base")
OTHER_ROPE_KEYS = ("partial_rotary_factor", "original_max_position_embeddings")
"""Rotary parameters that some configs have at the top."""


def rope_of(found: Checkpoint, usual_base: bool) -> JsonObject:
    """Return the rotary parameters of a config that holds them in one spelling or in several.

    With `usual_base` the base is 10000 where none is given, as in the engines, and a note says so.
    Raises `UserError` for a parameter with two different values, and for a scaling without a type.
    """
    rope: JsonObject = {}
    keys: dict[str, str] = {}
    for key, name, value in rope_parameters(found):
        if rope.setdefault(name, value) != value:
            raise UserError(
                f"{found.path} says {name} {rope[name]} ({keys[name]}) and {value} ({key}); "
                "engines read either, so remove the wrong one"
            )
        keys.setdefault(name, key)
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] == "default":
        # Only scaled positions depend on it.
        rope.pop("original_max_position_embeddings", None)
        if rope.pop("factor", None) not in (None, 1):
            raise UserError(
                f"{found.path} says factor ({keys['factor']}) for positions that are not scaled "
                "(rope_type is default or not given); add the rope_type of the training"
            )
    if "rope_theta" not in rope:
        if not usual_base:
            raise UserError(
                f"{found.path} lacks rope_theta, for which engines take different ones; add that "
                "of the training"
            )
        found.notes.append("the config has no rope_theta: using 10000, as engines do")
    return {**rope, "rope_theta": float(rope.get("rope_theta", 10000.0))}


def rope_parameters(found: Checkpoint) -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the name and the value of each rotary parameter that a config gives.

    Raises `UserError` for one that is not a table.
    """
    config = found.config
    for name in (*BASES, *OTHER_ROPE_KEYS):
        if config.get(name) is not None:
            yield name, "rope_theta" if name in BASES else name, config[name]
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise UserError(f"{found.path} has an invalid field: {key} is {table!r}, not a table")
        # Where the kinds of layers differ, there is a table for each kind.
        table = table.get("full_attention") or table
        for name, value in table.items():
            # The oldest configs call the type `type`.
            name = "rope_type" if name == "type" else "rope_theta" if name in BASES else name
            # The axes of a position in an image; of one in a text all have the same number.
            value = "default" if (name, value) == ("rope_type", "mrope") else value
            if value is not None and not isinstance(value, dict):
                yield f"{key}.{name}", name, value


def drop_embedding(found: Checkpoint) -> None:
    """Drop a copy of the target's embedding, which drafters borrow instead.

    A drafter of another width than the target's keeps its embedding. Raises `UserError` for an
    embedding of the target's width with other numbers, unless the user chose the target's.
    """
    name, config = "embed_tokens.weight", found.config
    widths = (None, config.get("hidden_size"))
    if name not in found.tensors or config.get("target_hidden_size") not in widths:
        return
    embedding = found.tensors.pop(name)
    if found.answers.target_embedding:
        found.notes.append("its own embedding is left out for the target's")
        return
    remedy = ", or give --set embedding=target to use the target's all the same"
    check_matrix(found, name, embedding, found.target.embedding, remedy)


def check_matrix(
    found: Checkpoint, name: str, own: Tensor, theirs: Tensor | None, otherwise: str = ""
) -> None:
    """Raise `UserError` unless the tensor `own` called `name` is the target's matrix `theirs`.

    Differences up to `MATRIX_TOLERANCE` are allowed. `otherwise` is added to the message's advice.
    """
    if theirs is None or own.shape != theirs.shape:
        shape = None if theirs is None else list(theirs.shape)
        raise UserError(
            f"{found.folder}: {name} has shape {list(own.shape)}, the target's {shape}; is it of "
            "this target?"
        )
    theirs = theirs.detach().to("cpu", torch.float32)
    # Compared in float32: the difference of two bfloat16 matrices would be rounded itself.
    difference = float((own.float() - theirs).abs().max() / theirs.abs().max())
    if difference > MATRIX_TOLERANCE:
        raise UserError(
            f"{found.folder}: {name} is up to {difference:.1%} from the target's; check the "
            f"target{otherwise}"
        )


def check_size(found: Checkpoint, name: str, here: Any, there: int) -> None:
    """Raise `UserError` unless the config's value `here` of the key `name` is the target's."""
    # The type is compared because True == 1 and 2048.0 == 2048.
    if type(here) is not int:
        raise UserError(
            f"{found.path} has an invalid field: {name} is {here!r}, not a whole number"
        )
    if here != there:
        raise UserError(
            f"{found.folder} is for another target: {name} is {here}, the target's {there}"
        )
