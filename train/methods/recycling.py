"""Base of the methods whose drafters go on from their own output: EAGLE drafters and MTP layers.

Shapes: S positions, D unrolled steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...heads.layers import RecyclingDrafter
from ...inference.targets.causal_model import Hidden
from ...inference.targets.target import Target
from ..data.rollouts import Rollouts, Writer, decoded_rounds
from ..method import RunT
from .ranks import RankedMethod, batch_of_text, ranks_by_root
from .unroll import unroll
from .vocabulary import VocabularyMap

RecyclingT = TypeVar("RecyclingT", bound=RecyclingDrafter)


class RecyclingMethod(RankedMethod[RunT, RecyclingT]):
    """Base with the decoding of texts in training, and the ranks of unrolled steps."""

    def writers(
        self, run: Any, target: Target, drafter: RecyclingDrafter
    ) -> list[tuple[str, Rollouts, Writer]]:
        """Return what decodes texts with the current drafter."""
        return [("errors", run.errors, partial(decoded_rounds, run.errors, target, drafter))]

    @torch.no_grad()
    def teacher_forced(
        self, drafter: RecyclingDrafter, hidden: Hidden, ids: Tensor, steps: int = 7
    ) -> Tensor:
        """Return `ranks_by_root` of the training pass."""
        taps = tuple(tap[None] for tap in hidden.taps)
        outputs = unroll(drafter, batch_of_text(ids), taps, hidden.last[None], steps, "sdpa")
        columns = VocabularyMap(drafter).columns(ids)
        return ranks_by_root(
            ids, steps, columns, lambda k, rows: drafter.logits(outputs[k][0, :rows])
        )
