"""Features: the target's hidden states for a packed batch, from which drafters learn.

Logits are never stored: objectives make them where they are used.

Shapes: B packed rows, S positions, Ht hidden size of the target.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...heads.errors import UserError
from ...inference.rounds.device import send
from ...inference.rounds.tree import Pass
from ...inference.targets.causal_model import CausalModel, nan_last, relative_error
from ...inference.targets.target import Target
from .batches import Batch


@dataclass
class Features:
    """A packed batch with the target's hidden states on the training device.

    The states have the target's dtype, which need not be the drafter's: a drafter casts them.
    """

    batch: Batch
    last: Tensor
    """Last hidden states `[B, S, Ht]`, after the final norm."""
    taps: tuple[Tensor, ...] = ()
    """One tensor `[B, S, Ht]` for each tap, ascending."""


class FeatureSource(Protocol):
    """Source of features: the live target (whole or sharded over ranks), a store, or a server."""

    def features(self, batch: Batch) -> Features: ...

    def finish(self) -> None:
        """End the extractor of a ring after the last step."""
        ...


class LiveTarget:
    """Source of features that runs the frozen target in this process."""

    def __init__(self, target: Target, taps: tuple[int, ...] = ()) -> None:
        """Raise `UserError` for taps that the target lacks, or if it cannot run packed rows."""
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
        ids = send(batch.ids, device)
        positions = send(batch.positions, device)
        rows = Pass(positions=positions, documents=batch.documents, written=batch.mask)
        hidden = self._target.forward(ids, rows, taps=self._taps)
        return Features(batch, hidden.last, hidden.taps)

    def finish(self) -> None: ...


@torch.no_grad()
def check_packing(model: CausalModel, name: str) -> None:
    """Choose how the model separates the documents of packed rows, and check the features.

    The first of these that works is used: attention document by document, transformers' mask from
    positions that restart at 0, or an explicit mask for every packed row. Raises `UserError`, with
    the model's `name`, if features still differ from those of each document alone.
    """
    # Packed rows have another shape than each document alone, and rounding grows with depth: 3% of
    # the largest feature in 32 layers of bfloat16.
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1
    # Layers with a sliding window need a mask even within a document, and an attention other than
    # torch's was chosen by the user.
    torchs = getattr(model.decoder.config, "_attn_implementation", None) == "sdpa"
    if torchs and model.window is None:
        model.attends_in_documents = True
        with suppress(TypeError):  # of a model whose layers do not accept the arguments
            if packing_error(model) <= tolerance:
                return
        model.attends_in_documents = False
    # `not error <= tolerance` instead of `error > tolerance`: an error of NaN must fail too.
    if not (error := packing_error(model)) <= tolerance:
        model.masks_packed_rows = True
        error = packing_error(model)
    if not error <= tolerance:
        raise UserError(
            f"{name} ({model.config.model_type}) lets packed documents see each other (relative "
            f"difference {error:.1e}); load it with target.attention=sdpa, or report this model "
            "type"
        )


def packing_error(model: CausalModel) -> float:
    """Return the relative difference of features of two packed documents and of each alone."""
    # Documents of 5 and 7 tokens; multiples of 7 give different tokens.
    ids = (torch.arange(12, device=model.device) * 7 % model.vocab_size)[None]
    short = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device=model.device)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    errors = []
    for start in model.trial_starts:
        positions = short + start
        rows = Pass(positions=positions, documents=documents)
        packed = model.forward(ids, rows).last.float()
        alone = []
        for piece in (slice(0, 5), slice(5, 12)):
            of_piece = Pass(positions=positions[:, piece])
            alone.append(model.forward(ids[:, piece], of_piece).last.float())
        errors.append(relative_error(packed, torch.cat(alone, dim=1)))
    return max(errors, key=nan_last)
