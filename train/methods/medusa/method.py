"""Training of Medusa heads (arXiv 2401.10774), all of which read the same frozen state.

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

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ....distill.divergences import Teacher, best_of, sum_in_chunks, teacher_of
from ....distill.settings import LABELS_ONLY, Divergence
from ....heads.artifact import Artifact
from ....heads.files import JsonObject
from ....heads.medusa import MedusaHeads
from ....inference.rounds.device import send
from ....inference.targets.causal_model import Hidden
from ....inference.targets.target import TargetSource
from ...data.batches import Batch, Batches
from ...data.features import Features
from ...losses.first_weights import take_heads_before
from ...losses.ranks import comparable_roots, rank_calibration, ranks_by_root
from ...losses.vocabulary import VocabularyMap, draft_vocabulary
from ...method import Method
from ...objectives import Sums, compared, depth_metrics, static_decay
from ...outline import FROZEN, TRAINED, ConfigOnly, Outline, matrix_numbers
from .config import MedusaLoss, MedusaRun

SURENESS = 0.45
"""Factor on the target's output matrix, with which each head begins.

With the matrix as it is, heads are as sure as the target, and wrong: with SmolLM2 the divergences
of three heads begin at 9.0, 11.1 and 11.4, with the matrix times 0.45 at 5.7, 6.7 and 6.8. The
factor with the least divergence lies between 0.4 and 0.5, with the quickstart target too
(docs/log/2026-11-experiments.md)."""


class MedusaObjective:
    """Objective of Medusa-1: the target is frozen, so decoding stays lossless relative to it."""

    taps: tuple[int, ...] = ()
    all_last = False

    def __init__(
        self, config: MedusaLoss, num_heads: int, target_head: Callable[[Tensor], Tensor]
    ) -> None:
        """`target_head` maps `[..., H]` after the final norm to logits `[..., V]`."""
        self._config, self._num_heads, self._target_head = config, num_heads, target_head
        self.head_weights = static_decay(num_heads, config.head_decay)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of rows with weight of each head, from masks alone."""
        totals = batch.learned(self._num_heads).sum((0, 1), dtype=torch.float64).tolist()
        return {f"head{i}": total for i, total in enumerate(totals)}

    def forward(
        self,
        drafter: MedusaHeads,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`.

        With a draft vocabulary a position whose best token cannot be drafted has no loss, but
        counts in the denominator, and metrics count it as a miss.
        """
        batch, last = features.batch, features.last.flatten(0, 1)
        rows, teachers, text, valid = batch.roots(self._num_heads)
        device_valid = send(valid, last.device)
        # w_i / N_i, N_i being the global count of head i: deep heads have fewer rows, and with one
        # count for all they would weigh less than w_i. A count is a whole number here, so `max`
        # changes only a count of 0, where no row has weight.
        counts = [max(denominators[f"head{i}"], 1.0) for i in range(self._num_heads)]
        scales = [weight / count for weight, count in zip(self.head_weights, counts, strict=True)]
        factors = device_valid * send(scales, last.device)
        # The target's states may be in bfloat16, the heads learn in float32.
        dtype = next(drafter.parameters()).dtype
        loss, *tables = sum_in_chunks(
            partial(self._table, drafter, VocabularyMap(drafter), last, measured),
            last[send(rows, last.device)].to(dtype),
            (teachers, text[:, 1:], factors),
            # all of them: the states are frozen, so each parameter learns within the chunks or not
            # at all
            list(drafter.parameters()),
            self._config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        losses, right, alpha = tables
        return loss, depth_metrics(losses, right, alpha, device_valid)

    def _table(
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
        """Return the loss of R rows, then tables `[R, D]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap. `last`
        `[positions, H]` are the target's states on the device, `hidden` `[R, H]` those of the rows.
        `teachers` and `labels` `[R, D]` are on the CPU, so that finding the distinct teachers waits
        for nothing; where a head has no weight they are arbitrary.
        """
        labels = vocabulary.columns(send(labels, last.device))
        # A position teaches up to D heads (p[6] teaches head 0 of row 5, head 1 of row 4, head 2 of
        # row 3); its distribution is made once.
        best = log_p = teacher = p = outside = None
        index, name = teachers, self._config.loss
        if measured or name not in LABELS_ONLY or vocabulary.reduced:
            positions, index = (send(t, last.device) for t in teachers.unique(return_inverse=True))
            with torch.no_grad():
                # Not kept under a name: no logits of all tokens are there beside those of heads.
                best, log_p, teacher, p = distributions(
                    self._target_head(last[positions]), name, vocabulary, measured
                )
        tables = []
        for i in range(self._num_heads):
            at = index[:, i]
            own_teacher = None if teacher is None else teacher.rows(at)
            shared = own_teacher is not None and teacher is not None and p is teacher.p
            own_best, own_log_p, own_p = (
                None if x is None else x[at] for x in (best, log_p, None if shared else p)
            )
            if vocabulary.reduced and own_best is not None:
                outside = own_best < 0
            drafts = compared(
                name, drafter.logits(hidden, i), labels[:, i], own_best, own_log_p,
                own_teacher.p if shared and own_teacher is not None else own_p, own_teacher,
                outside=outside, overlaps=False,
            )  # fmt: skip
            tables.append([x for x in drafts[:3] if x is not None] if measured else [drafts.losses])
        # From tables `[R]` for each head to tables `[R, D]` of all heads.
        losses, *rest = (torch.stack(column, dim=-1) for column in zip(*tables, strict=True))
        loss = (losses * factors).sum()
        return (loss, losses, *rest) if measured else (loss,)


def distributions(
    logits: Tensor, loss: Divergence, vocabulary: VocabularyMap, measured: bool
) -> tuple[Tensor, Tensor | None, Teacher | None, Tensor | None]:
    """Return the target's distributions by `logits` `[R, V]`, as far as loss or metrics need them.

    They are the columns `[R]` of the best tokens, -1 for those that cannot be drafted; the
    log-probabilities `[R, Vd]` that teach, or in their place what `kl` learns; and the
    probabilities `[R, Vd]` for overlaps, which sum to less than one with a draft vocabulary.
    """
    best = vocabulary.columns(best_of(logits))
    log_p = teacher = p = None
    if loss not in LABELS_ONLY:
        log_p = vocabulary.teacher(loss, logits, slice(None))
    if loss == "kl":  # whose teacher sums to one
        assert log_p is not None
        log_p, teacher = None, teacher_of(log_p, whole=True)
    if measured:
        # Without a draft vocabulary one large table is enough for both.
        whole = teacher is not None and not vocabulary.reduced
        p = teacher.p if teacher is not None and whole else vocabulary.probs(logits)
    return best, log_p, teacher, p


@torch.no_grad()
def copy_head(drafter: MedusaHeads, head_weight: Tensor) -> None:
    """Copy the target's rows `[Vd, H]` of the drafted tokens into every head that owns some."""
    for output in drafter.outputs:
        assert isinstance(output, nn.Linear)
        output.weight.copy_(head_weight)


class MedusaMethod(Method[MedusaRun, MedusaHeads]):
    """Training of Medusa heads."""

    run_class = MedusaRun
    drafter_class = MedusaHeads

    def resolve(self, run: MedusaRun, target: ConfigOnly) -> None:
        take_heads_before(run)

    def outline(self, run: MedusaRun, target: ConfigOnly) -> Outline:
        hidden_size = target.config.hidden_size
        heads = MedusaHeads(run.heads, hidden_size, target.vocab_size, target.embedding_and_head)
        outputs = run.heads.num_heads * hidden_size * heads.drafted
        head = FROZEN if run.heads.shared_head else TRAINED
        # Two tables of each head wait for the backward pass of a chunk, and four of the target.
        drafted = run.heads.num_heads * heads.drafted / target.vocab_size
        return Outline(
            heads,
            logit_rows=round(run.objective.rows_per_chunk * (drafted + 2) / 2),
            operations=0.0,
            head_operations=TRAINED * matrix_numbers(heads.blocks) + head * outputs,
        )

    def make_drafter(
        self, run: MedusaRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> MedusaHeads:
        """Return heads, see `Method.make_drafter`.

        An untrained head starts as the target's own rows of the tokens that it drafts, scaled by
        `SURENESS`.
        """
        sizes = target.hidden_size, target.vocab_size, target.embedding_and_head
        if before is not None:
            return MedusaHeads(before.drafter.config, *sizes)
        drafter, rows = MedusaHeads(run.heads, *sizes), target.head_weight
        if (ids := draft_vocabulary(drafter.drafted, target, batches)) is not None:
            drafter.set_maps(ids)
            rows = rows[ids]
        copy_head(drafter, rows.float() * SURENESS)
        return drafter

    def make_objective(
        self, run: MedusaRun, target: TargetSource, drafter: MedusaHeads
    ) -> MedusaObjective:
        # For the heads that the drafter has: a run that begins with a drafter takes its shape,
        # whatever `heads` says.
        return MedusaObjective(run.objective, drafter.config.num_heads, target.head)

    @torch.no_grad()
    def teacher_forced(self, drafter: MedusaHeads, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return `ranks_by_root`; of `hidden` only the last state is read."""
        count, last = drafter.config.num_heads, hidden.last
        columns = VocabularyMap(drafter).columns(ids)
        return ranks_by_root(ids, count, columns, lambda i, rows: drafter.logits(last[:rows], i))

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the rank accuracies of the heads, from which their tree is grown."""
        return rank_calibration(comparable_roots(outcomes), tree_nodes)


METHOD = MedusaMethod()
