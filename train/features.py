"""What the target gives a drafter to learn from. Logits are never stored: objectives make them
where they are used.

Shapes: B packed rows, S positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..heads.errors import UserError
from ..inference.target import Hidden, Target
from .data.batches import Batch


@dataclass
class Features:
    """A batch with the target's states on the training device."""

    batch: Batch
    last: Tensor
    """[B, S, H] after the final norm."""
    taps: tuple[Tensor, ...] = ()
    """One [B, S, H] for each tap, ascending."""


class FeatureSource(Protocol):
    """Where features come from: the live target, a sharded one, or a store on disk."""

    def features(self, batch: Batch) -> Features: ...

    def finish(self) -> None:
        """The run has come to its end."""
        ...


class LiveTarget:
    """Features from the frozen target in this process."""

    def __init__(self, target: Target, taps: tuple[int, ...] = ()) -> None:
        if any(not 0 <= tap < target.num_layers for tap in taps) or sorted(set(taps)) != list(taps):
            raise UserError(
                f"taps {list(taps)} must be ascending, distinct and below the target's "
                f"{target.num_layers} layers"
            )
        self._target, self._taps = target, taps
        check_packing(target, f"target {target.name}")

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        device = self._target.device
        ids, positions = (
            batch.ids.to(device, non_blocking=True),
            batch.positions.to(device, non_blocking=True),
        )
        if self._target.spread == "tensor":
            hidden = self._in_turn(ids, positions)
        else:
            hidden = self._target.forward(ids, positions, taps=self._taps)
        return Features(batch, hidden.last, hidden.taps)

    def _in_turn(self, ids: Tensor, positions: Tensor) -> Hidden:
        """A model split within its layers runs one batch at a time, by all ranks: each rank's in
        turn, which keeps it."""
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        shapes: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(shapes, tuple(ids.shape))
        own = None
        for turn, shape in enumerate(shapes):
            both = torch.stack([ids, positions]) if turn == rank else ids.new_empty(2, *shape)
            torch.distributed.broadcast(both, turn)
            hidden = self._target.forward(both[0], both[1], taps=self._taps)
            own = hidden if turn == rank else own
        assert own is not None
        return own

    def finish(self) -> None: ...


@torch.no_grad()
def check_packing(model: Target, name: str) -> None:
    """Demand that two documents in one packed row get the features that each gets alone; raises
    `UserError` otherwise.

    A model that takes no notice of positions that restart is given a mask with each packed row from
    here on.
    """
    error = packing_error(model)
    # In low precision the rows are computed in another shape than each document alone, and rounding
    # grows with depth: 3% of the largest feature in 32 layers of bfloat16.
    if not error <= (tolerance := 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1):
        model.masks_packed_rows = True
        error = packing_error(model)
    if not error <= tolerance:
        raise UserError(
            f"{name} ({model.config.model_type}) lets packed documents see each other (relative "
            f"difference {error:.1e}); load it "
            "with target.attention=sdpa, or report this model type"
        )


def packing_error(model: Target) -> float:
    """Difference of two documents' features in one packed row from those that each gets alone,
    relative to their size (Frobenius norms)."""
    ids = (torch.arange(12, device=model.device) * 7 % model.vocab_size)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device=model.device)
    packed = model.forward(ids, positions).last.float()
    alone = torch.cat(
        [model.forward(part).last for part in (ids[:, :5], ids[:, 5:])], dim=1
    ).float()
    return float((packed - alone).norm() / alone.norm())
