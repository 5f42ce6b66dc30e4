"""Drafts compared with the target, and the tokens that a drafter does not have.

One rule holds for a token of the target that is not in the draft vocabulary. Its column is -1. As
the target's best token it makes the draft a miss in the metrics, and the draft has no loss
(`compare_drafts` has the exception); as a label it leaves the losses that read labels at 0. Its
probability counts as missed in overlaps.

Shapes: J teacher positions, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...distill.divergences import (
    RENORMALISED,
    Teacher,
    log_probs,
    loss_of_logits,
    overlap,
    wide_dtype,
)
from ...distill.settings import NEEDS_LABELS, Divergence
from ...heads.vocabulary import VocabularyMaps


class VocabularyMap:
    """Map from target ids to columns of the drafter's head.

    Example: with the draft vocabulary 2, 5, 6 of 8 tokens, the ids 0 .. 7 have the columns
    -1 -1 0 -1 -1 1 2 -1. Without a draft vocabulary, columns are ids.
    """

    def __init__(self, drafter: VocabularyMaps) -> None:
        self._draft_vocab_ids = ids = drafter.draft_vocab_ids
        if ids is not None:
            assert drafter.t2d is not None
            self._columns = torch.full(drafter.t2d.shape, -1, dtype=torch.long, device=ids.device)
            self._columns[ids] = torch.arange(len(ids), device=ids.device)

    @property
    def reduced(self) -> bool:
        """True if there are tokens that cannot be drafted."""
        return self._draft_vocab_ids is not None

    def columns(self, ids: Tensor) -> Tensor:
        """Return the columns of target `ids`, -1 for tokens that cannot be drafted and for -1."""
        if self._draft_vocab_ids is None:
            return ids
        return torch.where(ids < 0, -1, self._columns[ids])

    def restrict(self, probs: Tensor) -> Tensor:
        """Return the draft vocabulary's part `[J, Vd]` of `[J, V]`.

        What is left out is put nowhere else, so probabilities may sum to less than one.
        """
        if self._draft_vocab_ids is None:
            return probs
        # several times as fast on a CPU as indexing by brackets
        return probs.index_select(1, self._draft_vocab_ids)

    def probs(self, target_logits: Tensor) -> Tensor:
        """Return the draft vocabulary's part `[J, Vd]` of the softmax of logits `[J, V]`."""
        dtype = wide_dtype(target_logits.dtype)
        return self.restrict(torch.softmax(target_logits, -1, dtype=dtype))

    def teacher(self, loss: str, target_logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the log-probabilities `[rows, Vd]` that teach by `loss`, of logits `[J, V]`.

        Losses that renormalise them are spared the sum over all tokens.
        """
        inside = self.restrict(target_logits)[rows]
        if loss in RENORMALISED or not self.reduced:
            return log_probs(inside)
        wide = inside.to(wide_dtype(inside.dtype))
        return wide - target_logits.to(wide.dtype).logsumexp(-1, keepdim=True)[rows]


class Drafts(NamedTuple):
    """Drafts compared with what they have to learn; tensors of the shape of their labels."""

    losses: Tensor
    """Losses of the tokens, the only ones that carry a gradient."""
    right: Tensor | None
    """1 where the draft's best token is the target's, else 0; None without one to compare."""
    overlaps: Tensor | None
    """Overlaps of both distributions; None where they were not asked for."""
    log_sums: Tensor
    """The logits less these are log-probabilities."""


def compare_drafts(
    loss: Divergence,
    logits: Tensor,
    labels: Tensor,
    best: Tensor | None,
    log_p: Tensor | None,
    p: Tensor | None = None,
    teacher: Teacher | None = None,
    overlaps: bool = True,
    needs_best: bool = True,
) -> Drafts:
    """Return drafts with `logits` `[.., Vd]`, as the losses of all objectives judge them.

    `labels` and `best`, the text's and the target's best tokens, are columns of the drafter's head.
    `log_p`, or the `teacher` made of it, is what teaches; `overlaps` are those with `p`, else with
    `log_p`. With `needs_best` a draft has no loss where its best token has no column; a loss that
    reads labels alone can do without.
    """
    # A label without a column is clamped to have one; its loss is set to 0.
    found = loss_of_logits(loss, logits, log_p, labels.clamp(min=0), p, teacher)
    losses = found.losses
    if needs_best and best is not None:
        losses = losses.masked_fill(best < 0, 0.0)
    if loss in NEEDS_LABELS:
        losses = losses.masked_fill(labels < 0, 0.0)
    with torch.no_grad():
        # A best token of -1 equals no column, so a draft that cannot be made is a miss.
        right = None if best is None else (found.best == best).float()
        alpha = found.overlaps
        if alpha is None and overlaps and log_p is not None:
            alpha = overlap(logits - found.log_sums[..., None], log_p)
    return Drafts(losses, right, alpha, found.log_sums)


def table(
    drafts: Drafts, factors: Tensor, measured: bool, *more: Tensor, learned: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return a chunk's loss and, if it is `measured`, its tables, as `sum_in_chunks` takes them.

    The loss is the sum of the drafts' losses, or of `learned`, times `factors`. The tables are what
    `depth_metrics` reads: losses, 1 where the best token is the target's, overlaps; then `more`.
    """
    loss = ((drafts.losses if learned is None else learned) * factors).sum()
    if not measured:
        return (loss,)
    assert drafts.right is not None and drafts.overlaps is not None
    return loss, drafts.losses, drafts.right, drafts.overlaps, *more
