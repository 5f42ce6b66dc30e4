"""Loss of Medusa heads (arXiv 2401.10774), all of which read the same frozen state.

Each head has its own label and its own global count of rows. Index table
(docs/objectives.md#index-tables): head i = 0, 1, .. at row t reads h_t, its label is x[t+2+i], its
teacher p[t+1+i], its weight R(t+1 .. t+2+i).

Example: prompt 0 .. 3, reply 4 .. 8, three heads. The root of row t is t + 1.

    row   reads   labels           teachers         weights
    3     h3      x5   x6   x7     p4   p5   p6     1  1  1
    4     h4      x6   x7   x8     p5   p6   p7     1  1  1
    5     h5      x7   x8   -      p6   p7   -      1  1  0
    6     h6      x8   -    -      p7   -    -      1  0  0

Shapes: B packed rows, S positions, D heads, R rows with weight, H hidden size, V vocabulary, Vd
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....distill.divergences import Teacher, best_of, sum_in_chunks, teacher_of
from ....distill.settings import LABELS_ONLY, Divergence
from ....heads.medusa import MedusaHeads
from ....inference.rounds.device import send
from ...data.features import Features
from ...losses.vocabulary import Drafts, VocabularyMap, compare_drafts, table
from ...objectives import DepthObjective, Sums, depth_metrics
from .config import MedusaLoss


class MedusaObjective(DepthObjective):
    """Objective of Medusa-1: the target is frozen, so decoding stays lossless relative to it."""

    def __init__(
        self, config: MedusaLoss, num_heads: int, target_head: Callable[[Tensor], Tensor]
    ) -> None:
        """`target_head` maps `[..., H]` after the final norm to logits `[..., V]`."""
        super().__init__(num_heads, config.head_decay)
        self._config, self._target_head = config, target_head

    def forward(
        self,
        drafter: MedusaHeads,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        last = features.last.flatten(0, 1)
        rows, teachers, text, valid = features.batch.roots(self.depths)
        valid = send(valid, last.device)
        # The target's states may be in bfloat16, the heads learn in float32.
        dtype = next(drafter.parameters()).dtype
        loss, *tables = sum_in_chunks(
            partial(self._chunk, drafter, VocabularyMap(drafter), last, measured),
            last[send(rows, last.device)].to(dtype),
            (teachers, text[:, 1:], self.factors(valid, denominators)),
            # all of them: the states are frozen, so each parameter learns within the chunks or not
            # at all
            list(drafter.parameters()),
            self._config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        losses, right, alpha = tables
        return loss, depth_metrics(losses, right, alpha, valid)

    def _chunk(
        self,
        drafter: MedusaHeads,
        vocabulary: VocabularyMap,
        last: Tensor,
        measured: bool,
        hidden: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the `table` of R rows with the drafts of all heads.

        `last` `[positions, H]` are the target's states, `hidden` `[R, H]` those of the rows.
        `teachers` and `labels` `[R, D]` are on the CPU, so that finding the distinct teachers waits
        for nothing; where a head has no weight they are arbitrary.
        """
        labels = vocabulary.columns(send(labels, last.device))
        # A position teaches up to D heads (p[6] teaches head 0 of row 5, head 1 of row 4, head 2 of
        # row 3); its distribution is made once.
        best = log_p = teacher = p = None
        index, name = teachers, self._config.loss
        if measured or name not in LABELS_ONLY or vocabulary.reduced:
            positions, index = (send(t, last.device) for t in teachers.unique(return_inverse=True))
            with torch.no_grad():
                # Logits of all tokens have no name, so that they are freed before the heads run.
                best, log_p, teacher, p = distributions(
                    self._target_head(last[positions]), name, vocabulary, measured
                )
        by_head = []
        for i in range(self.depths):
            at = index[:, i]
            own_best, own_log_p, own_p = (None if x is None else x[at] for x in (best, log_p, p))
            own_teacher = None if teacher is None else teacher.rows(at)
            if measured and own_p is None and own_teacher is not None:
                own_p = own_teacher.p
            drafts = compare_drafts(
                name, drafter.logits(hidden, i), labels[:, i], own_best, own_log_p, own_p,
                own_teacher, overlaps=False,
            )  # fmt: skip
            by_head.append(drafts)
        # From tensors `[R]` of each head to tensors `[R, D]` of all heads.
        columns: Any = zip(*by_head, strict=True)
        stacked: Any = (None if c[0] is None else torch.stack(c, dim=-1) for c in columns)
        return table(Drafts(*stacked), factors, measured)


def distributions(
    logits: Tensor, loss: Divergence, vocabulary: VocabularyMap, measured: bool
) -> tuple[Tensor, Tensor | None, Teacher | None, Tensor | None]:
    """Return the target's distributions by `logits` `[R, V]`, as far as loss or metrics need them.

    They are the columns `[R]` of the best tokens, -1 for those that cannot be drafted; the
    log-probabilities `[R, Vd]` that teach, or in their place what `kl` learns; and, unless that has
    them already, the probabilities `[R, Vd]` for overlaps, which sum to less than one with a draft
    vocabulary.
    """
    best = vocabulary.columns(best_of(logits))
    log_p = teacher = p = None
    if loss not in LABELS_ONLY:
        log_p = vocabulary.teacher(loss, logits, slice(None))
        if loss == "kl":  # whose teacher sums to one
            log_p, teacher = None, teacher_of(log_p, whole=True)
    if measured and (teacher is None or vocabulary.reduced):
        p = vocabulary.probs(logits)
    return best, log_p, teacher, p
