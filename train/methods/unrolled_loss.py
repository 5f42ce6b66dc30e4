"""Loss of EAGLE drafters and MTP layers: rows, teachers and weights of the unrolled steps.

Index table (docs/objectives.md#index-tables): step k at row t reads its own state of step k - 1
(step 0: the target's features of t) and the token x[t+1+k]; its label is x[t+2+k], its teacher
p[t+1+k], its weight R(t+1 .. t+2+k). The root of row t is t + 1; `teachers.py` has an example.

Shapes: B packed rows, S positions, D unrolled steps, J teacher positions, R roots, H hidden size,
Ht the target's, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...distill.divergences import (
    NEEDS_LABELS,
    loss_of_logits,
    overlap_of_probs,
    sum_in_chunks,
)
from ...distill.settings import LABELS_ONLY
from ...heads.layers import RecyclingDrafter
from ...inference.rounds.device import best_of, send
from ..data.batches import Batch
from ..data.features import Features
from ..objectives import Sums, depth_metrics, smoothed, static_decay, survival_weights
from .runs import EagleLoss, MtpLoss
from .teachers import TeacherPlaces
from .unroll import unroll
from .vocabulary import VocabularyMap

NOISE_LENGTH = 512  # length of a document in which the noise has just the size `objective.noise`


class Judged(NamedTuple):
    """The target's verdict on J teacher positions.

    Tokens are columns of the drafter's head, -1 for those that it does not have.
    """

    states: Tensor
    """The target's states `[J, Ht]`."""
    best: Tensor
    """The target's best tokens `[J, 1]`."""
    labels: Tensor
    """The text's tokens `[J, 1]`."""
    kept: Tensor | slice
    """Positions that may have a loss."""
    rest: Tensor | None
    """The other positions; None if all are kept."""
    teacher: Tensor | None
    """Distributions `[kept, 1, Vd]` in the form that the loss takes, None for labels alone."""
    p: Tensor | None
    """Probabilities `[kept, 1, Vd]`, None if nothing is measured."""
    p_of_rest: Tensor | None
    """Those of the other positions."""


class UnrolledObjective:
    """Objective of EAGLE drafters and MTP layers.

    By default EAGLE-1 is one step with a feature loss and noise, EAGLE-3 seven steps with neither.
    """

    def __init__(
        self,
        config: EagleLoss | MtpLoss,
        drafter: RecyclingDrafter,
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
        accepted_weight: float = 1.0,
    ) -> None:
        """`config` is resolved; `target_head` maps last states `[..., Ht]` to logits `[..., V]`.

        `accepted_weight` is that of accepted drafts in texts decoded with the drafter.
        """
        self.taps, self.all_last = drafter.taps, drafter.reads_last
        self._accepted_weight = accepted_weight
        self.config, self._target_head, self._seed = config, target_head, seed
        self.begin(1.0)  # all steps, for callers that have no run

    def begin(self, progress: float) -> None:
        """Set the steps of an optimiser step that begins after this share of the run."""
        assert self.config.steps is not None, "resolve the config first"
        self.steps = 1 if progress < self.config.single_step_share else self.config.steps
        self.step_weights = static_decay(self.steps, self.config.decay)

    def row_weights(self, batch: Batch) -> Tensor:
        """Return the weight of each row at each step, `[B, S, D]`, on the CPU."""
        runs = batch.learned(self.steps)
        # Row t drafts from the root at t + 1, so the weights of drafts, which are at their roots,
        # move one row up; the last row has no root.
        draft_weights = batch.draft_weights(self.steps, self._accepted_weight)
        return runs * functional.pad(draft_weights[:, 1:], (0, 0, 0, 1))

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the sum of the rows' weights at each step, from masks alone."""
        totals = self.row_weights(batch).sum((0, 1), dtype=torch.float64).tolist()
        return {f"step{k}": total for k, total in enumerate(totals)}

    def forward(
        self,
        drafter: RecyclingDrafter,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`."""
        batch, last = features.batch, features.last
        taps, noisy_last = self._disturbed(batch, features)
        outputs = unroll(
            drafter, batch, taps, noisy_last, self.steps, self.config.attention, memory=self.config
        )
        places = TeacherPlaces(self.row_weights(batch), last.device)
        hidden = places.by_teacher(outputs)
        # Teachers are the target's states without the noise that the drafter reads.
        vocabulary = VocabularyMap(drafter)
        measure = partial(self._table, drafter, last.flatten(0, 1), vocabulary)
        ids = send(batch.ids.flatten(), last.device)
        # The label is one after its teacher. A teacher with weight is not the last position, so
        # the remainder never wraps; it keeps the index in range.
        labels = ids[(places.teachers + 1) % batch.ids.numel()]
        rows = (places.teachers, labels)
        factors = self._factors(places, measure, hidden, rows, denominators)
        loss, *tables = sum_in_chunks(
            partial(measure, measured=measured),
            hidden,
            (*rows, factors),
            drafter.head_parameters,
            self.config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        losses, right, alpha, _ = tables
        # Survival is a product along the steps of a root, so metrics need tables by root.
        by_root = (places.by_root(table) for table in (losses, right, alpha, places.weights))
        return loss, depth_metrics(*by_root)

    def _disturbed(self, batch: Batch, features: Features) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return taps and last state with the uniform noise of EAGLE-1.

        The noise lies in +-`noise` * 512 / document length. It is a pure function of seed and place
        in the data, whatever the ranks.
        """
        if not self.config.noise:
            return features.taps, features.last
        device, shape = features.last.device, features.last.shape
        generator = torch.Generator(device)
        noise = []
        for number in batch.numbers:
            generator.manual_seed(self._seed * 1_000_003 + number)
            # from [0, 1) to [-1, 1)
            noise.append(2 * torch.rand(shape[1:], generator=generator, device=device) - 1)
        lengths = batch.document_lengths().to(device)[..., None]
        scaled = torch.stack(noise) * self.config.noise * NOISE_LENGTH / lengths
        return tuple(tap + scaled for tap in features.taps), features.last + scaled

    def _factors(
        self,
        places: TeacherPlaces,
        measure: Callable[..., tuple[Tensor, ...]],
        hidden: Tensor,
        rows: tuple[Tensor, ...],
        denominators: dict[str, float],
    ) -> Tensor:
        """Return the factor of each loss, `[J, D]`, 0 where a draft has no weight.

        `measure` is `_table` without its last arguments; `hidden` `[J, D, H]`, and `rows` are
        teachers and labels `[J]`.
        """
        # A step for which no rank has a draft has the count 0; its weights are 0 too, and 0 / 0 is
        # NaN. Counts are sums of weights, which may be fractions, so the least one is far below 1.
        counts = [max(denominators[f"step{k}"], 1e-9) for k in range(self.steps)]
        if self.config.weighting == "decay":
            scaled = [w / count for w, count in zip(self.step_weights, counts, strict=True)]
            return places.weights * send(scaled, hidden.device)
        # Dynamic weights of a root depend on all its steps, which have different teachers and so
        # may lie in different chunks. A pass without gradients over all chunks comes first.
        with torch.no_grad():
            zeros = torch.zeros(places.weights.shape, device=hidden.device)
            _, _, _, alpha, label_probs = sum_in_chunks(
                measure, hidden, (*rows, zeros), [], self.config.rows_per_chunk
            )
        chances = alpha
        if self.config.weighting == "d-pace":
            chances = smoothed(label_probs, self.config.smoothing)
        weights = survival_weights(places.by_root(chances), places.by_root(places.weights).bool())
        # Divided by the number of drafts: the weights themselves were not known when denominators
        # were summed over the ranks.
        return places.to_teacher(weights) * places.weights / sum(counts)

    def _table(
        self,
        drafter: RecyclingDrafter,
        last: Tensor,
        vocabulary: VocabularyMap,
        hidden: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
        measured: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the loss of J teacher positions, then tables `[J, D]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap, q(label). A
        position's distribution serves the D drafts about it: `hidden` `[J, D, H]`, `factors`
        `[J, D]`; `teachers` and `labels` are `[J]`, `last` `[positions, Ht]` the target's states.
        """
        on_cpu = hidden.device.type == "cpu"
        judged = self._judged(last[teachers], vocabulary, labels, on_cpu, measured)
        kept, labels = judged.kept, judged.labels
        logits = drafter.logits(hidden[kept])
        # A label without a column is clamped to have one; what is computed of it counts as 0 below.
        columns = labels.clamp(min=0).expand(factors.shape)
        found = loss_of_logits(self.config.loss, logits, judged.teacher, columns[kept], judged.p)
        losses, overlaps = self._complete(found.losses, judged, drafter, hidden), found.overlaps
        loss = (losses * factors[kept]).sum()
        if judged.p is None or overlaps is None:
            return (loss,)
        with torch.no_grad():
            label_logits = logits.gather(-1, columns[kept][..., None])[..., 0]
            label_probs = (label_logits - found.log_sums).exp() * (labels[kept] >= 0)
            # A best token of -1 equals no column, so a position that cannot be drafted is a miss.
            right = (found.best == judged.best[kept]).float()
            tables = losses, right, overlaps, label_probs
            if (rest := judged.rest) is None or judged.p_of_rest is None:
                return loss, *tables
            losses, right, overlaps, label_probs = (
                table.new_zeros(factors.shape).index_copy(0, kept, table) for table in tables
            )
            # Of the other positions overlaps and labels alone are more than zero.
            q = torch.softmax(drafter.logits(hidden[rest]), -1, dtype=overlaps.dtype)
            overlaps[rest] = overlap_of_probs(q, judged.p_of_rest)
            of_labels = q.gather(-1, columns[rest][..., None])[..., 0]
            label_probs[rest] = of_labels * (labels[rest] >= 0)
        return loss, losses, right, overlaps, label_probs

    @torch.no_grad()
    def _judged(
        self,
        states: Tensor,
        vocabulary: VocabularyMap,
        labels: Tensor,
        on_cpu: bool,
        measured: bool,
    ) -> Judged:
        """Return what the target says of J teacher positions by its `states` `[J, Ht]`.

        `labels` `[J]` are tokens; with `measured` there are the probabilities for the tables.
        """
        config, teacher, p, rest, p_of_rest = self.config, None, None, None, None
        target_logits = self._target_head(states)
        best = vocabulary.columns(best_of(target_logits))[:, None]
        labels = vocabulary.columns(labels)[:, None]
        kept: Tensor | slice = slice(None)
        drops = vocabulary.reduced and config.out_of_vocabulary == "drop"
        if drops and not config.feature_weight and on_cpu:
            # Positions without a loss need no logits of the drafter. On a GPU the host would have
            # to wait for their number.
            kept, rest = (best >= 0).nonzero()[:, 0], (best < 0).nonzero()[:, 0]
        if config.loss not in LABELS_ONLY:
            # One teacher for all drafts about it: `[J, 1, Vd]` against `[J, D, Vd]`.
            teacher = vocabulary.teacher(config.loss, target_logits, kept)[:, None]
        if measured:
            p = vocabulary.probs(target_logits)[:, None]
            if rest is not None:
                p, p_of_rest = p[kept], p[rest]
        return Judged(states, best, labels, kept, rest, teacher, p, p_of_rest)

    def _complete(
        self, losses: Tensor, judged: Judged, drafter: RecyclingDrafter, hidden: Tensor
    ) -> Tensor:
        """Return the losses `[J, D]` of drafts: weighed, none where there is nothing to teach, and
        with the loss of the features."""
        config, kept = self.config, judged.kept
        losses = losses * (config.token_weight or 0.0)
        if config.out_of_vocabulary == "drop":
            losses = losses.masked_fill(judged.best[kept] < 0, 0.0)
        if config.loss in NEEDS_LABELS:
            losses = losses.masked_fill(judged.labels[kept] < 0, 0.0)
        if config.feature_weight:
            # The feature to come is h_{t+1+k}, the state that the teacher's logits are made of.
            target_feature = judged.states.to(hidden.dtype)[:, None].expand_as(hidden)
            distances = functional.smooth_l1_loss(
                drafter.feature(hidden), target_feature, reduction="none"
            )
            losses = losses + config.feature_weight * distances.mean(-1)
        return losses
