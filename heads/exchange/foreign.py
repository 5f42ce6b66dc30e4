"""A folder of somebody else's, on the way to a drafter: its config and tensors, and a person's word
where these leave it open."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..embedding_and_head import EmbeddingAndHead
from ..errors import UserError
from ..layout import fill_from, place

SAME = 2**-7  # relative: an embedding that was rounded to bf16 on the way is still the target's


@dataclass
class TargetSide:
    """What is known of the target that a checkpoint belongs to."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_and_head: EmbeddingAndHead
    embedding: Tensor | None = None
    """[V, H]."""
    head: Tensor | None = None
    """[V, H]; of a drafter that shares it."""


@dataclass
class Answers:
    """What a person says where a checkpoint leaves it open; None: not asked."""

    taps: list[int] | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    target_embedding: bool = False
    """Use the target's embedding though the checkpoint's differs."""
    ours: bool = False
    """The files are an export of ours, which means by each key what engines mean."""


@dataclass
class Public:
    """A checkpoint that was read."""

    drafter: Any
    layout: str
    dtype: torch.dtype
    notes: list[str] = field(default_factory=list)
    """What was taken for granted."""


@dataclass
class Checkpoint:
    """A folder's contents, on the way to a drafter."""

    folder: Path
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: TargetSide
    answers: Answers
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """One that holds every floating tensor without loss."""
        return reduce(
            torch.promote_types, (t.dtype for t in self.tensors.values() if t.is_floating_point())
        )

    def finished(self, drafter: Any, layout: str) -> Public:
        """The drafter with the tensors in it, checked."""
        dtype = self.dtype
        place(drafter, torch.device("cpu"), dtype)
        expected = drafter.serving_state()
        cast = {
            name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()
        }
        fill_from(cast, expected, self.folder, dtype)
        drafter.check()
        drafter.eval().requires_grad_(False)
        return Public(drafter, layout, dtype, self.notes)


def rope_of(found: Checkpoint) -> dict[str, Any]:
    """Rotary parameters in either spelling; base 10000 where none is given, as every loader has
    it."""
    config = found.config
    new, old = config.get("rope_parameters") or {}, dict(config.get("rope_scaling") or {})
    if (kind := old.pop("type", None)) is not None:
        old.setdefault("rope_type", kind)
    base = config.get("rope_theta")
    if base is None and "rope_theta" not in new:
        found.notes.append("no rope_theta is given: 10000 is taken, as engines do")
    if base is not None and new.get("rope_theta", base) != base:
        raise UserError(
            f"{found.path} says rope_theta {base} and, in rope_parameters, {new['rope_theta']}; "
            "engines read either"
        )
    share = (
        {}
        if (part := config.get("partial_rotary_factor")) is None
        else {"partial_rotary_factor": part}
    )
    return {"rope_type": "default", "rope_theta": float(base or 10000.0)} | share | old | new


def drop_embedding(found: Checkpoint) -> None:
    """Drop an embedding that is the target's. Raises `UserError` for another one."""
    name = "embed_tokens.weight"
    if name not in found.tensors or found.config.get("target_hidden_size") not in (
        None,
        found.config.get("hidden_size"),
    ):
        return
    own, theirs = found.tensors.pop(name), found.target.embedding
    if found.answers.target_embedding:
        found.notes.append("its own embedding is left out for the target's")
        return
    same_matrix(
        found, name, own, theirs, ", or say --target-embedding to use the target's all the same"
    )


def same_matrix(
    found: Checkpoint, name: str, own: Tensor, theirs: Tensor | None, otherwise: str = ""
) -> None:
    """Demand that a matrix is the target's. Raises `UserError`."""
    if theirs is None or own.shape != theirs.shape:
        shape = None if theirs is None else list(theirs.shape)
        raise UserError(
            f"{found.folder}: {name} has shape {list(own.shape)}, the target's {shape}; is it of "
            "this target?"
        )
    theirs = theirs.detach().to("cpu", torch.float32)
    far = float((own.float() - theirs).abs().max() / theirs.abs().max())
    if far > SAME:
        raise UserError(
            f"{found.folder}: {name} is up to {far:.1%} from the target's; check the "
            f"target{otherwise}"
        )


def same_size(found: Checkpoint, name: str, here: Any, there: int) -> None:
    if type(here) is not int:
        raise UserError(f"{found.path} garbles a field: {name} is {here!r}, not a whole number")
    if here != there:
        raise UserError(
            f"{found.folder} is for another target: {name} is {here}, the target's {there}"
        )
