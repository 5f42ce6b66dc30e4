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

Shapes: B packed rows, S positions, D heads, R rows with weight, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...distill.divergences import (
    Teacher,
    log_probs,
    loss_of_logits,
    sum_in_chunks,
    teacher_of,
)
from ...distill.settings import LABELS_ONLY, Divergence
from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.medusa import MedusaConfig, MedusaHeads
from ...inference.proposers.shapes import grow
from ...inference.rounds.device import best_of, send
from ...inference.targets.causal_model import Hidden
from ...inference.targets.target import TargetSource
from ..data.batches import Batch, Batches
from ..data.features import Features
from ..method import FeaturesRead, Method
from ..objectives import Sums, depth_metrics, static_decay
from ..outline import FROZEN, TRAINED, ConfigOnly, Outline, matrix_numbers
from .beginnings import check_same
from .ranks import comparable_roots, rank_calibration, ranks_by_root
from .runs import MedusaLoss, MedusaRun

SURENESS = 0.45
"""Factor on the target's output matrix, with which each head begins.

With the matrix as it is, heads are as sure as the target, and wrong: with SmolLM2 the divergences
of three heads begin at 9.0, 11.1 and 11.4, with the matrix times 0.45 at 5.7, 6.7 and 6.8. The
factor with the least divergence lies between 0.4 and 0.5, with the quickstart target too
(EXPERIMENTS.md)."""


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

    def begin(self, progress: float) -> None: ...

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of rows with weight of each head, from masks alone."""
        totals = self._valid(batch).sum((0, 1), dtype=torch.float64).tolist()
        return {f"head{i}": total for i, total in enumerate(totals)}

    def _valid(self, batch: Batch) -> Tensor:
        """Return whether each row has weight for each head `[B, S, D]`, on the CPU."""
        return torch.stack([batch.reply_run(1, 2 + i) for i in range(self._num_heads)], dim=-1)

    def forward(
        self,
        drafter: MedusaHeads,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`."""
        batch, last = features.batch, features.last.flatten(0, 1)
        valid = self._valid(batch).flatten(0, 1)
        # Rows of deeper heads are among those of the first, since R(a .. b) only falls with b. The
        # index is made on the CPU, where its length is known without waiting.
        rows = valid[:, 0].nonzero()[:, 0]
        valid = valid[rows]
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
            partial(self._table, drafter, last, batch.ids.flatten(), measured),
            last[send(rows, last.device)].to(dtype),
            (rows, factors),
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
        last: Tensor,
        ids: Tensor,
        measured: bool,
        hidden: Tensor,
        rows: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the loss of R rows, then tables `[R, D]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap. `last`
        `[positions, H]` are the target's states on the device, `hidden` `[R, H]` those of the rows.
        `ids` `[positions]` and `rows` `[R]` are on the CPU, so that finding the distinct teachers
        waits for nothing.
        """
        # Row t, head i: teacher p[t+1+i], label x[t+2+i], as indices into all packed rows end to
        # end. Heads without weight may point into the next packed row or past the last one, hence
        # the clamps; their factor is 0.
        ahead = rows[:, None] + torch.arange(1, self._num_heads + 1)
        ahead = ahead.clamp(max=ids.shape[0] - 1)
        labels = send(ids[(ahead + 1).clamp(max=ids.shape[0] - 1)], last.device)
        # A position teaches up to D heads (p[6] teaches head 0 of row 5, head 1 of row 4, head 2 of
        # row 3); its distribution is made once.
        distributions, index, name = None, ahead, self._config.loss
        if measured or name not in LABELS_ONLY:
            positions, index = (send(t, last.device) for t in ahead.unique(return_inverse=True))
            with torch.no_grad():
                distributions = Distributions.of(self._target_head(last[positions]), name)
        tables = []
        for i in range(self._num_heads):
            logits, mine = drafter.logits(hidden, i), None
            if distributions is not None:
                mine = distributions.rows(index[:, i])
            log_p, teacher = (None, None) if mine is None else (mine.log_p, mine.teacher)
            other = teacher.p if teacher is not None and measured else None
            found = loss_of_logits(name, logits, log_p, labels[:, i], other, teacher)
            entry = [found.losses]
            if mine is not None and measured:
                assert found.overlaps is not None
                entry += [(found.best == mine.best).float(), found.overlaps]
            tables.append(entry)
        # From tables `[R]` for each head to tables `[R, D]` of all heads.
        losses, *rest = (torch.stack(column, dim=-1) for column in zip(*tables, strict=True))
        loss = (losses * factors).sum()
        return (loss, losses, *rest) if measured else (loss,)


class Distributions(NamedTuple):
    """The target's distributions at R positions, made once for all heads that they teach."""

    log_p: Tensor | None
    """None for a loss that reads `teacher` alone."""
    teacher: Teacher
    best: Tensor

    @classmethod
    def of(cls, logits: Tensor, loss: Divergence) -> Distributions:
        """Return the distributions of `logits` `[R, V]`, as far as a loss reads them."""
        log_p = log_probs(logits)
        # All tokens are in the table, so that it sums to one already.
        return cls(
            None if loss in ("kl", "ce") else log_p, teacher_of(log_p, whole=True), best_of(logits)
        )

    def rows(self, index: Tensor) -> Distributions:
        """Return those of some positions."""
        log_p = None if self.log_p is None else self.log_p[index]
        return Distributions(log_p, self.teacher.rows(index), self.best[index])


@torch.no_grad()
def copy_head(drafter: MedusaHeads, head_weight: Tensor) -> None:
    """Copy the target's output matrix `[V, H]` into every head that owns one."""
    for output in drafter.outputs:
        assert isinstance(output, nn.Linear)
        output.weight.copy_(head_weight)


class MedusaMethod(Method[MedusaRun, MedusaHeads]):
    """Training of Medusa heads."""

    run_class = MedusaRun
    drafter_class = MedusaHeads
    replays_chain = False

    def features_of(self, run: MedusaRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        return (), False

    def outline(self, run: MedusaRun, target: ConfigOnly) -> Outline:
        hidden_size = target.config.hidden_size
        heads = MedusaHeads(
            run.heads, hidden_size, target.vocab_size, target.embedding_and_head.head
        )
        outputs = run.heads.num_heads * hidden_size * target.vocab_size
        head = FROZEN if run.heads.shared_head else TRAINED
        return Outline(
            heads,
            logit_rows=run.objective.rows_per_chunk,
            operations=0.0,
            head_operations=TRAINED * matrix_numbers(heads.blocks) + head * outputs,
        )

    def make_drafter(
        self, run: MedusaRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> MedusaHeads:
        """Return heads, see `Method.make_drafter`.

        An untrained head starts as the target's own output matrix, scaled by `SURENESS`.
        """
        if before is not None:
            shape: MedusaConfig = before.drafter.config
            check_same(run.heads, str(run.init_from), asdict(shape))
            if before.drafter.drafted < target.vocab_size:
                raise UserError(
                    f"init_from {run.init_from} has no rows for the target's added tokens, and "
                    "Medusa heads are trained on all tokens; train new heads for this target"
                )
            return MedusaHeads(shape, target.hidden_size, target.vocab_size, target.head)
        drafter = MedusaHeads(run.heads, target.hidden_size, target.vocab_size, target.head)
        copy_head(drafter, target.head_weight.float() * SURENESS)
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
        return ranks_by_root(ids, count, ids, lambda i, rows: drafter.logits(last[:rows], i))

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the rank accuracies of the heads, from which their tree is grown."""
        return rank_calibration(comparable_roots(outcomes), tree_nodes)

    def accepted_by_root(self, outcome: Tensor, calibration: JsonObject) -> list[int]:
        """Return how many drafts of the calibrated tree are right at each root.

        At each depth at most one rank is right, so the count is the length of the row's longest
        prefix that is a node.
        """
        paths = set(grow(calibration["rank_accuracy"], calibration["tree_nodes"]))
        accepted = []
        for row in outcome.tolist():
            depth = 0
            while depth < len(row) and tuple(row[: depth + 1]) in paths:
                depth += 1
            accepted.append(depth)
        return accepted


METHOD = MedusaMethod()
