"""Training of EAGLE drafters and MTP layers: rows, teachers and weights of the unrolled steps.

Index table (docs/objectives.md#index-tables): step k at row t reads its own state of step k - 1
(step 0: the target's features of t) and the token x[t+1+k]; its label is x[t+2+k], its teacher
p[t+1+k], its weight R(t+1 .. t+2+k). The root of row t is t + 1; `TeacherPlaces` has an example.

Shapes: B packed rows, S positions, D unrolled steps, J teacher positions, R roots, H hidden size,
Ht the target's, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...distill.divergences import best_of, overlap_of_probs, sum_in_chunks
from ...distill.settings import LABELS_ONLY
from ...heads.layers import RecyclingDrafter
from ...inference.rounds.device import send
from ...inference.rounds.outcome import Hidden
from ..data.batches import Batch
from ..data.features import Features
from ..method import RunT
from ..objectives import DepthObjective, Sums, depth_metrics
from ..outline import MetaTarget, Outline, work_of
from .calibration import RankedMethod, batch_of_text, ranks_by_root
from .settings import UnrolledLoss
from .unroll import unroll
from .vocabulary import VocabularyMap, compare_drafts, table

NOISE_LENGTH = 512  # length of a document in which the noise has the size that it is given


class UnrolledObjective(DepthObjective):
    """Objective of drafters that are trained over their own states."""

    def __init__(
        self,
        config: UnrolledLoss,
        drafter: RecyclingDrafter,
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
        noise: float = 0.0,
    ) -> None:
        """`config` is resolved; `target_head` maps last states `[..., Ht]` to logits `[..., V]`.

        `noise` is the largest size of the noise on the features.
        """
        assert config.steps is not None, "resolve the config first"
        super().__init__(config.steps, config.decay)
        self.taps, self.all_last = drafter.taps, drafter.reads_last
        self.config, self._target_head = config, target_head
        self._seed, self._noise = seed, noise

    def forward(
        self,
        drafter: RecyclingDrafter,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        batch, last = features.batch, features.last
        taps, noisy_last = self._disturbed(batch, features)
        outputs = unroll(drafter, batch, taps, noisy_last, self.depths, memory=self.config)
        places = TeacherPlaces(batch.learned(self.depths), last.device)
        hidden = places.by_teacher(outputs)
        ids = send(batch.ids.flatten(), last.device)
        # The label is one after its teacher. A teacher with weight is not the last position, so
        # the remainder never wraps; it keeps the index in range.
        labels = ids[(places.teachers + 1) % batch.ids.numel()]
        loss, *tables = sum_in_chunks(
            # Teachers are the target's states without the noise that the drafter reads.
            partial(self._chunk, drafter, VocabularyMap(drafter), last.flatten(0, 1), measured),
            hidden,
            (places.teachers, labels, self.factors(places.weights, denominators)),
            drafter.head_parameters,
            self.config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        # Survival is a product along the steps of a root, so metrics need tables by root.
        return loss, depth_metrics(*map(places.by_root, (*tables, places.weights)))

    def _disturbed(self, batch: Batch, features: Features) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return taps and last state with uniform noise.

        It lies in +-`noise` * 512 / document length. It is a pure function of seed and place
        in the data, on any number of ranks.
        """
        if not self._noise:
            return features.taps, features.last
        device, shape = features.last.device, features.last.shape
        generator = torch.Generator(device)
        noise = []
        for number in batch.numbers:
            generator.manual_seed(self._seed * 1_000_003 + number)
            # from [0, 1) to [-1, 1)
            noise.append(2 * torch.rand(shape[1:], generator=generator, device=device) - 1)
        lengths = batch.document_lengths().to(device)[..., None]
        scaled = torch.stack(noise) * self._noise * NOISE_LENGTH / lengths
        return tuple(tap + scaled for tap in features.taps), features.last + scaled

    def _chunk(
        self,
        drafter: RecyclingDrafter,
        vocabulary: VocabularyMap,
        last: Tensor,
        measured: bool,
        hidden: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the `table` of J teacher positions, each with the D drafts that it teaches.

        `hidden` is `[J, D, H]`, `factors` `[J, D]`; `teachers` and `labels` are `[J]`, `last`
        `[positions, Ht]` the target's states.
        """
        config, states = self.config, last[teachers]
        feature_weight, token_weight = config.term_weights
        with torch.no_grad():
            target_logits = self._target_head(states)
            # Columns of the drafter's head from here on, -1 for tokens that it does not have.
            best = vocabulary.columns(best_of(target_logits))[:, None]
            columns = vocabulary.columns(labels)[:, None].expand(factors.shape)
            kept: Any = slice(None)
            rest = None
            # Positions without a loss need no logits of the drafter. On a GPU the host would have
            # to wait for their number.
            if vocabulary.reduced and hidden.device.type == "cpu" and not feature_weight:
                kept = (best[:, 0] >= 0).nonzero()[:, 0]
                rest = (best[:, 0] < 0).nonzero()[:, 0]
            # One teacher for all drafts about it: `[J, 1, Vd]` against `[J, D, Vd]`.
            teacher = p = p_of_rest = None
            if config.loss not in LABELS_ONLY:
                teacher = vocabulary.teacher(config.loss, target_logits, kept)[:, None]
            if measured:
                p = vocabulary.probs(target_logits)[:, None]
                p, p_of_rest = p[kept], None if rest is None else p[rest]
        drafts = compare_drafts(
            config.loss, drafter.logits(hidden[kept]), columns[kept], best[kept], teacher, p,
            overlaps=False,
        )  # fmt: skip
        losses = drafts.losses * token_weight
        if feature_weight:
            # The feature to come is h_{t+1+k}, the state that the teacher's logits are made of.
            target_feature = states.to(hidden.dtype)[:, None].expand_as(hidden)
            distances = functional.smooth_l1_loss(
                drafter.feature(hidden), target_feature, reduction="none"
            )
            losses = losses + feature_weight * distances.mean(-1)
        loss, *tables = table(drafts._replace(losses=losses), factors[kept], measured)
        if rest is None or p_of_rest is None:
            return loss, *tables
        with torch.no_grad():
            losses, right, overlaps = (
                x.new_zeros(factors.shape).index_copy(0, kept, x) for x in tables
            )
            # Of the other positions overlaps alone are more than zero.
            q = torch.softmax(drafter.logits(hidden[rest]), -1, dtype=overlaps.dtype)
            overlaps[rest] = overlap_of_probs(q, p_of_rest)
        return loss, losses, right, overlaps


RecyclingT = TypeVar("RecyclingT", bound=RecyclingDrafter)


class RecyclingMethod(RankedMethod[RunT, RecyclingT]):
    """Base of methods whose drafters continue from their own output: EAGLE drafters, MTP layers."""

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

    def unrolled_outline(
        self, drafter: RecyclingT, loss: UnrolledLoss, target: MetaTarget, head: int
    ) -> Outline:
        """Return a drafter's outline for resolved settings; `head` is `FROZEN` or `TRAINED`."""
        steps, hidden = loss.steps or 1, drafter.shape.hidden_size
        drafted = target.vocab_size if drafter.d2t is None else len(drafter.d2t)
        return Outline(
            drafter,
            # Each chunk has the logits of all steps, and those of the target for all of them.
            logit_rows=round(loss.rows_per_chunk * (steps * drafted / target.vocab_size + 1)),
            head_operations=head * hidden * drafted * steps,
            **work_of(
                drafter.layers, drafter.fc, hidden, loss.recompute, repeated=steps,
                config=target.config,
            ),
        )  # fmt: skip


class TeacherPlaces:
    """Tables of the drafts with weight, by teacher and by root.

    Step k of row t is taught by position t + 1 + k, so up to D drafts share one distribution of the
    target. Losses are computed by teacher, `[J, D]`, where that distribution is made once; metrics
    couple the steps of a root, so they need the numbers by root, `[R, D]`.

    Example: prompt 0 .. 3, reply 4 .. 8, three steps. Roots' rows are t = 3 .. 6, teachers are
    4 .. 7. Teacher 6 teaches row 5 at step 0, row 4 at step 1 and row 3 at step 2.

        by teacher: row of each step        by root: teacher of each step
        teacher 4     3   -   -             row 3     4   5   6
        teacher 5     4   3   -             row 4     5   6   7
        teacher 6     5   4   3             row 5     6   7   -
        teacher 7     6   5   4             row 6     7   -   -

    Entry (teacher 7, step 1) of the one table is entry (row 5, step 1) of the other: rows of a
    table change, columns do not.
    """

    def __init__(self, valid: Tensor, device: torch.device) -> None:
        """`valid` `[B, S, D]` says which rows have a label at which step.

        It is on the CPU, so that nothing here waits for a device.
        """
        batch, length, steps = valid.shape
        k = torch.arange(steps)
        # The row that position j teaches at step k; none before the text.
        back = torch.arange(length)[:, None] - 1 - k
        by_teacher = (valid[:, back.clamp(min=0), k] & (back >= 0)).flatten(0, 1)
        # From here on positions count through all packed rows: position t of row r is r * S + t. A
        # draft with weight never crosses into the next packed row, so t + 1 + k stays what it is.
        teachers = by_teacher.any(-1).nonzero()[:, 0]
        valid = valid.flatten(0, 1)
        roots = valid.any(-1).nonzero()[:, 0]
        # Index of each position among the teachers. A position that is not among them gets the
        # length of the list, where `by_root` adds a row of zeros: 4 4 4 4 0 1 2 3 4 .. in the
        # example.
        among_teachers = torch.full((batch * length + steps + 1,), len(teachers))
        among_teachers[teachers] = torch.arange(len(teachers))
        # Both tables above as indices. In the example teacher_of has the rows 0 1 2 / 1 2 3 /
        # 2 3 4 / 3 4 4.
        row_of = (teachers[:, None] - 1 - k).clamp(min=0)
        # Without weight, t + 1 + k may lie past the last position: hence the longer table.
        teacher_of = torch.where(
            valid[roots], among_teachers[roots[:, None] + 1 + k], len(teachers)
        )
        self.teachers = send(teachers, device)
        self.weights = send(by_teacher[teachers].float(), device)
        self._row_of, self._k = send(row_of, device), send(k, device)
        self._teacher_of = send(teacher_of, device)

    def by_teacher(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of the steps, D tensors `[B, S, H]`, as `[J, D, H]`.

        Where a step has no weight, some other row is taken; its factor is 0.
        """
        columns = [x.flatten(0, 1)[self._row_of[:, k]] for k, x in enumerate(outputs)]
        return torch.stack(columns, dim=1)

    def by_root(self, table: Tensor) -> Tensor:
        """Return `[J, D]` by teacher as `[R, D]` by root, 0 without weight."""
        return functional.pad(table, (0, 0, 0, 1))[self._teacher_of, self._k]
