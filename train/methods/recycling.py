"""Base of the methods whose drafters go on from their own output: EAGLE drafters and MTP layers.

Shapes: S positions, D unrolled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...heads.files import JsonObject
from ...heads.recycling import RecyclingDrafter
from ...inference.proposers.eagle import DEFAULT_LENGTH, DEFAULT_WIDTH
from ...inference.targets.causal_model import Hidden
from ...inference.targets.target import Target
from ..data.rollouts import Rollouts, Writer, decoded_rounds
from ..method import Method, RunT
from .ranks import (
    accepted_in_chains,
    batch_of_text,
    comparable_roots,
    rank_calibration,
    ranks_by_root,
)
from .unroll import unroll
from .vocabulary import VocabularyMap

RecyclingT = TypeVar("RecyclingT", bound=RecyclingDrafter)


class RecyclingMethod(Method[RunT, RecyclingT]):
    """Base with the decoding of texts in training and calibrations by ranks of unrolled steps."""

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

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the rank accuracies of the drafter, and the tree of evaluation."""
        calibration = rank_calibration(comparable_roots(outcomes), tree_nodes)
        return calibration | {"length": min(DEFAULT_LENGTH, tree_nodes), "width": DEFAULT_WIDTH}

    def accepted_by_root(self, outcome: Tensor, calibration: JsonObject) -> list[int]:
        return accepted_in_chains(outcome, calibration)
