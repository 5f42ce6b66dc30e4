"""Checkpoint of another project on its way to a drafter: config, tensors, and a user's answers.

The checks against the target that several layouts share are here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..documents import DocumentError, convert
from ..embedding_and_head import EmbeddingAndHead
from ..errors import UserError
from ..files import JsonObject
from ..layout import check_same, fill_from, place

# Largest difference between two matrices that count as equal, relative to the largest element:
# bfloat16 has 8 bits, so a matrix that was rounded to it on the way is still the target's.
SAME = 2**-7


@dataclass
class TargetSide:
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
    """Answers of the user to what a checkpoint leaves open; None where there is no answer."""

    taps: list[int] | None = None
    """Indices of hidden states, in place of those that the config names."""
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    target_embedding: bool = False
    """Use the target's embedding though the checkpoint's differs."""
    ours: bool = False
    """The files are an export of draftsmith, in which no key is ambiguous."""


@dataclass
class Public:
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
    target: TargetSide
    answers: Answers
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every floating tensor without loss."""
        dtypes = (t.dtype for t in self.tensors.values() if t.is_floating_point())
        return reduce(torch.promote_types, dtypes)

    def finished(self, drafter_type: Any, native: JsonObject, layout: str) -> Public:
        """Return the drafter of the native config `native`, filled with the tensors.

        `drafter_type` is its class, with the interface of `layout.EngineLayout`. Raises
        `UserError` for a size out of bounds, and unless the tensors are exactly the drafter's by
        name and shape; both before anything of these sizes is made.
        """
        try:
            convert(native, drafter_type.document)
        except DocumentError as error:
            raise UserError(f"{self.path} garbles a field: {error}") from error
        lender = self.target.embedding_and_head
        # Without memory first: a size that no tensor has must not be allocated.
        with torch.device("meta"):
            outline = drafter_type.from_serving_config(native, lender).serving_state()
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        check_same(outline, shapes, self.folder)
        drafter = drafter_type.from_serving_config(native, lender)
        # Files of mixed types exist, and a drafter has one type: the one that rounds nothing.
        dtype = self.dtype
        # Before `serving_state` is asked for: it gives views of the weights as they are then.
        place(drafter, torch.device("cpu"), dtype)
        expected = drafter.serving_state()
        # Vocabulary maps keep their integers.
        cast: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            cast[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        fill_from(cast, expected, self.folder, dtype)
        drafter.check()
        drafter.eval().requires_grad_(False)
        return Public(drafter, layout, dtype, self.notes)

    def demand_parts(self, count: int, what: str) -> None:
        """Raise `UserError` for more parts, such as layers, than there are tensors.

        Names and config may ask for any number of them, and each takes memory and time to make.
        """
        if count > len(self.tensors):
            raise UserError(
                f"{self.folder} asks for {count:,} {what} and holds {len(self.tensors)} tensors; "
                "its names or its config are damaged, copy or download it again"
            )


def rope_of(found: Checkpoint) -> JsonObject:
    """Return the rotary parameters of a config that holds them in one spelling or in both.

    The base is 10000 where none is given, as in the engines, and a note says so. Raises `UserError`
    for two different bases.
    """
    config = found.config
    parameters = config.get("rope_parameters") or {}
    scaling = dict(config.get("rope_scaling") or {})
    # The oldest configs call the type `type`.
    if (kind := scaling.pop("type", None)) is not None:
        scaling.setdefault("rope_type", kind)
    base = config.get("rope_theta")
    if base is None and "rope_theta" not in parameters:
        found.notes.append("no rope_theta is given: 10000 is taken, as engines do")
    if base is not None and parameters.get("rope_theta", base) != base:
        raise UserError(
            f"{found.path} says rope_theta {base} and, in rope_parameters, "
            f"{parameters['rope_theta']}; engines read either"
        )
    rope: JsonObject = {"rope_type": "default", "rope_theta": float(base or 10000.0)}
    if (factor := config.get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = factor
    # `rope_parameters`, the newer spelling, has precedence.
    return rope | scaling | parameters


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
    remedy = ", or say --target-embedding to use the target's all the same"
    same_matrix(found, name, embedding, found.target.embedding, remedy)


def same_matrix(
    found: Checkpoint, name: str, own: Tensor, theirs: Tensor | None, otherwise: str = ""
) -> None:
    """Raise `UserError` unless the tensor `own` called `name` is the target's matrix `theirs`.

    Differences up to `SAME` are allowed. `otherwise` is added to the message's advice.
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
    if difference > SAME:
        raise UserError(
            f"{found.folder}: {name} is up to {difference:.1%} from the target's; check the "
            f"target{otherwise}"
        )


def same_size(found: Checkpoint, name: str, here: Any, there: int) -> None:
    """Raise `UserError` unless the config's value `here` of the key `name` is the target's."""
    # The type is compared because True == 1 and 2048.0 == 2048.
    if type(here) is not int:
        raise UserError(f"{found.path} garbles a field: {name} is {here!r}, not a whole number")
    if here != there:
        raise UserError(
            f"{found.folder} is for another target: {name} is {here}, the target's {there}"
        )
