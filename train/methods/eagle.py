"""Training of EAGLE drafters.

EAGLE-3 (arXiv 2503.01840) is unrolled over its own states; EAGLE-1 (arXiv 2401.15077) learns one
step towards the target's next feature.

Index table (docs/objectives.md#index-tables): step k at row t reads its own state of step k - 1
(step 0: the target's features of t) and the token x[t+1+k]; its label is x[t+2+k], its teacher
p[t+1+k], its weight R(t+1 .. t+2+k).

Example: prompt 0 .. 3, reply 4 .. 8, three steps. The root of row t is t + 1.

    row   tokens read      labels           teachers         weights
    3     x4   x5   x6     x5   x6   x7     p4   p5   p6     1  1  1
    4     x5   x6   x7     x6   x7   x8     p5   p6   p7     1  1  1
    5     x6   x7   x8     x7   x8   -      p6   p7   -      1  1  0
    6     x7   x8   -      x8   -    -      p7   -    -      1  0  0

Shapes: B packed rows, S positions, D unrolled steps, J teacher positions, R roots, H hidden size,
Ht the target's, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...distill.divergences import (
    NEEDS_LABELS,
    Divergence,
    divergence,
    log_probs,
    overlap,
    sum_in_chunks,
)
from ...heads import eagle
from ...heads.artifact import Artifact
from ...heads.eagle import EagleConfig, EagleDrafter, shape_for
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.layers import begin_unsure
from ...heads.vocabulary import most_frequent
from ...inference.proposers.eagle import DEFAULT_LENGTH, DEFAULT_WIDTH
from ...inference.targets.causal_model import Hidden
from ...inference.targets.target import Target, TargetSource
from ..config import RunConfig
from ..data.batches import Batch, Batches
from ..data.rollouts import Errors, Rollouts, Writer, decoded_rounds
from ..features import Features
from ..memory import Memory
from ..method import FeaturesRead, Method
from ..objectives import Sums, depth_metrics, smoothed, static_decay, survival_weights
from ..outline import ConfigOnly, Outline
from .beginnings import shape_before
from .ranks import (
    accepted_in_chains,
    batch_of_text,
    comparable_roots,
    rank_calibration,
    ranks_in,
)
from .teachers import TeacherPlaces, VocabularyMap
from .unroll import Backend, check_backend, unroll

log = logging.getLogger(__name__)

NOISE_LENGTH = 512  # length of a document in which the noise has just the size `objective.noise`
STATES = 64  # random states, like those of an untrained layer, by which its logits are judged


@dataclass
class EagleLoss(Memory):
    """Settings of an EAGLE drafter's loss."""

    loss: Divergence = "kl"
    """Divergence of the drafter's distribution from the target's, or from the text's tokens (ce;
    ce-l1: both)."""
    steps: int | None = None
    """Unrolled steps; if not given, 7 for version 3, 1 for version 1."""
    single_step_share: float = 0.0
    """Share of the run that trains the first step alone, at a fraction of the cost, before the
    others join: worth it for short runs, in which a drafter that is wrong at once learns little
    from going on."""
    weighting: Literal["decay", "survival", "d-pace"] = "decay"
    """Weights of the steps. decay: `decay`^k over their sum for step k. survival: the accepted
    drafts that a better step k would earn, by the overlaps (with lk-alpha this is end-to-end TV).
    d-pace: the same by the smoothed probabilities of the labels (D-PACE, for ce)."""
    decay: float = 0.8
    """Base of the steps' weights with weighting decay."""
    smoothing: float = 0.5
    """Smoothing of weighting d-pace: 0 weighs by the probabilities themselves, 1 not at all."""
    out_of_vocabulary: Literal["drop", "keep"] = "drop"
    """Loss of a position whose best token cannot be drafted: none (drop; it still counts in the
    loss's denominator), or that over the tokens that can be drafted (keep). Metrics count it as a
    miss either way."""
    feature_weight: float | None = None
    """Weight of SmoothL1 between the drafter's state, taken before a final norm of its own, and the
    target's next feature; if not given, 1 for version 1, 0 for version 3. With little data it helps
    version 3 too, together with token_weight 0.1 and freeze_head."""
    token_weight: float | None = None
    """Weight of `loss`; if not given, 0.1 for version 1, 1 for version 3."""
    freeze_head: bool = False
    """Version 3: keep final norm and head as they begin, the target's own."""
    noise: float | None = None
    """Largest size of the uniform noise on the features, times 512 / document length; if not given,
    0.1 for version 1, 0 for version 3."""
    attention: Backend = "auto"
    """Backend of the unrolled attention: sdpa, flex (GPU), plain (a reference that holds every
    score), or whichever fits."""
    rows_per_chunk: int = 128
    """Teacher positions whose logits exist at one time, each for all steps."""

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or self.rows_per_chunk < 1:
            raise UserError("objective.steps and objective.rows_per_chunk must be at least 1")
        super().__post_init__()
        if not (
            0 < self.decay <= 1 and 0 <= self.smoothing <= 1 and 0 <= self.single_step_share < 1
        ):
            raise UserError(
                "objective.decay must lie in (0, 1], objective.smoothing in [0, 1], "
                "objective.single_step_share in [0, 1)"
            )
        sizes = (self.feature_weight, self.token_weight, self.noise)
        if any(value is not None and value < 0 for value in sizes):
            raise UserError("objective.feature_weight, token_weight and noise must not be negative")

    def resolved(self, version: int) -> EagleLoss:
        """Return these settings with the defaults of an EAGLE version filled in.

        Raises `UserError` for noise with version 3.
        """
        defaults = {"steps": 7, "feature_weight": 0.0, "token_weight": 1.0, "noise": 0.0}
        if version == 1:
            defaults = {"steps": 1, "feature_weight": 1.0, "token_weight": 0.1, "noise": 0.1}
        if version == 3 and self.noise:
            raise UserError(
                "objective.noise is for version 1; the taps of version 3 differ in size too much "
                "for one noise"
            )
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass
class EagleRun(RunConfig):
    """Train an EAGLE drafter for a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train eagle --config configs/eagle/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    heads: EagleConfig = field(default_factory=EagleConfig)
    objective: EagleLoss = field(default_factory=EagleLoss)
    errors: Errors = field(default_factory=Errors)


class EagleObjective:
    """Objective of both versions.

    By default EAGLE-1 is one step with a feature loss and noise, EAGLE-3 seven steps with neither.
    """

    def __init__(
        self,
        config: EagleLoss,
        taps: tuple[int, ...],
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
        accepted_weight: float = 1.0,
        all_last: bool = False,
    ) -> None:
        """`config` is resolved; `target_head` maps last states `[..., Ht]` to logits `[..., V]`.

        `accepted_weight` is that of accepted drafts in texts decoded with the drafter. With
        `all_last` rows read the last state too, as in version 1.
        """
        assert config.steps is not None, "resolve the config first"
        self.all_last = all_last
        self._accepted_weight = accepted_weight
        self.config, self.taps, self._target_head, self._seed = config, taps, target_head, seed
        self.begin(1.0)  # all steps, for callers that have no run

    @property
    def passes(self) -> float:
        return float(self.steps)

    def begin(self, progress: float) -> None:
        """Set the steps of an optimiser step that begins after this share of the run."""
        assert self.config.steps is not None
        self.steps = 1 if progress < self.config.single_step_share else self.config.steps
        self.step_weights = static_decay(self.steps, self.config.decay)

    def row_weights(self, batch: Batch) -> Tensor:
        """Return the weight of each row at each step, `[B, S, D]`, on the CPU."""
        runs = torch.stack([batch.reply_run(1, 2 + k) for k in range(self.steps)], dim=-1)
        # Row t drafts from the root at t + 1, so the weights of drafts, which stand at their roots,
        # move one row up; the last row has no root.
        draft_weights = batch.draft_weights(self.steps, self._accepted_weight)
        return runs * functional.pad(draft_weights[:, 1:], (0, 0, 0, 1))

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the sum of the rows' weights at each step, from masks alone."""
        totals = self.row_weights(batch).sum((0, 1), dtype=torch.float64).tolist()
        return {f"step{k}": total for k, total in enumerate(totals)}

    def forward(
        self, drafter: EagleDrafter, features: Features, denominators: dict[str, float]
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
        vocabulary = VocabularyMap(drafter, last.device)
        measure = partial(self._table, drafter, last.flatten(0, 1), vocabulary)
        ids = batch.ids.flatten().to(last.device, non_blocking=True)
        # The label stands one after its teacher. A teacher with weight is not the last position, so
        # the remainder never wraps; it keeps the index in range.
        labels = ids[(places.teachers + 1) % batch.ids.numel()]
        rows = (places.teachers, labels)
        factors = self._factors(places, measure, hidden, rows, denominators)
        loss, losses, right, alpha, _ = sum_in_chunks(
            measure, hidden, (*rows, factors), drafter.head_parameters, self.config.rows_per_chunk
        )
        # Survival is a product along the steps of a root, so metrics need tables by root.
        tables = (places.by_root(table) for table in (losses, right, alpha, places.weights))
        return loss, depth_metrics(*tables)

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
            scaled = []
            for step_weight, count in zip(self.step_weights, counts, strict=True):
                scaled.append(step_weight / count)
            return places.weights * torch.tensor(scaled, device=hidden.device)
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
        drafter: EagleDrafter,
        last: Tensor,
        vocabulary: VocabularyMap,
        hidden: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the loss of J teacher positions, then tables `[J, D]`.

        The tables are: losses, 1 where the best token is the target's, overlap, q(label). A
        position's distribution serves the D drafts about it: `hidden` `[J, D, H]`, `factors`
        `[J, D]`; `teachers` and `labels` are `[J]`, `last` `[positions, Ht]` the target's states.
        """
        with torch.no_grad():
            log_p = log_probs(self._target_head(last[teachers]))
            # As columns of the drafter's head, from here on; -1 for tokens that it does not have.
            best = vocabulary.columns(log_p.argmax(-1))
            log_p = vocabulary.restrict(log_p)
            labels = vocabulary.columns(labels)
        log_q = log_probs(drafter.logits(hidden))
        # A label without a column is clamped to have one; what is computed of it counts as 0 below.
        label_columns = labels.clamp(min=0)[:, None].expand(hidden.shape[:2])
        # One teacher for all drafts about it: `[J, 1, Vd]` against `[J, D, Vd]`.
        losses = divergence(self.config.loss, log_q, log_p[:, None], label_columns) * (
            self.config.token_weight or 0.0
        )
        if self.config.out_of_vocabulary == "drop":
            losses = losses.masked_fill((best < 0)[:, None], 0.0)
        if self.config.loss in NEEDS_LABELS:
            losses = losses.masked_fill((labels < 0)[:, None], 0.0)
        if self.config.feature_weight:
            # The feature to come is h_{t+1+k}, the state that the teacher's logits are made of.
            target_feature = last[teachers].to(hidden.dtype)[:, None].expand_as(hidden)
            distances = functional.smooth_l1_loss(
                drafter.feature(hidden), target_feature, reduction="none"
            )
            losses = losses + self.config.feature_weight * distances.mean(-1)
        with torch.no_grad():
            # A best token of -1 equals no column, so a position that cannot be drafted is a miss.
            right = log_q.argmax(-1) == best[:, None]
            alpha = overlap(log_q, log_p[:, None])
            label_probs = log_q.gather(-1, label_columns[..., None])[..., 0].exp()
            label_probs = label_probs * (labels >= 0)[:, None]
        return (losses * factors).sum(), losses, right.float(), alpha, label_probs


def special_ids(target: TargetSource) -> set[int]:
    """Return tokens that have to be drafted for a reply ever to end.

    These are the end tokens and all that the tokenizer calls special.
    """
    special = set(target.eos_ids)
    if (tokenizer := target.tokenizer) is not None:
        tokens = [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
        # A tokenizer may have more tokens than the target's embedding has rows.
        special |= {token for token in tokens if token < target.vocab_size}
    return special


class EagleMethod(Method[EagleRun, EagleDrafter]):
    """Training of EAGLE drafters of version 1 or 3."""

    run_class = EagleRun
    drafter_class = EagleDrafter

    def features_of(self, run: EagleRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        shape = shape_for(run.heads, target.config)
        # No loss is about most rows of a prompt, but later rows attend to them: EAGLE-1 needs the
        # last state everywhere.
        return shape.taps, shape.version == 1

    def outline(self, run: EagleRun, target: ConfigOnly) -> Outline:
        shape = shape_for(run.heads, target.config)
        steps = run.objective.resolved(shape.version).steps or 1
        return Outline(
            EagleDrafter(shape, target.embedding_and_head),
            logit_rows=run.objective.rows_per_chunk * steps,
            passes=steps,
            borrowed_params=shape.hidden_size * shape.vocab_size if shape.version == 1 else 0,
            layers=shape.num_layers,
        )

    def make_drafter(
        self, run: EagleRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> EagleDrafter:
        """Return a drafter, see `Method.make_drafter`.

        An untrained drafter's head starts as the target's. A drafter that is trained on keeps taps,
        vocabulary and norms, which are logged.
        """
        if before is not None:
            shape = shape_before(run.heads, str(run.init_from), target, before, eagle)
            return EagleDrafter(shape, target.embedding_and_head)
        shape = shape_for(run.heads, target.config)
        drafter = EagleDrafter(shape, target.embedding_and_head)
        ids = None
        if shape.draft_vocab_size < shape.vocab_size:
            ids = most_frequent(
                batches.token_counts(shape.vocab_size), shape.draft_vocab_size, special_ids(target)
            )
        norm = target.final_norm_weight()
        weight = norm.float().cpu() if norm is not None else None
        drafter.start_from(
            target.head_weight.float().cpu(), weight, ids, target.tap_sizes(shape.taps)
        )
        loss = run.objective.resolved(shape.version)
        # `begin_unsure` scales the final norm down. A feature loss compares states in the target's
        # own scale, and a frozen head could not scale it up again; both need the target's norm as
        # it is.
        if shape.version == 3 and not loss.feature_weight and not loss.freeze_head:
            generator = torch.Generator().manual_seed(run.seed)
            states = torch.randn(STATES, shape.hidden_size, generator=generator)
            begin_unsure(drafter.norm, drafter.logits(states))
        return drafter

    def make_objective(
        self, run: EagleRun, target: TargetSource, drafter: EagleDrafter
    ) -> EagleObjective:
        config, shape = run.objective.resolved(drafter.shape.version), drafter.shape
        if config.feature_weight and shape.hidden_size != shape.target_hidden_size:
            raise UserError(
                "objective.feature_weight compares states of the target's width; leave out "
                "heads.hidden_size"
            )
        check_backend(config.attention, target.device)
        if shape.version == 1 and target.dtype == torch.float16:
            raise UserError(
                "EAGLE-1 learns through the target's head, and float16 loses its gradients; give "
                "--target.dtype bfloat16 or float32"
            )
        if config.freeze_head:
            drafter.freeze_head()
        weight = run.errors.accepted_weight
        return EagleObjective(
            config, drafter.taps, target.head, run.seed, weight, shape.version == 1
        )

    def writers(
        self, run: EagleRun, target: Target, drafter: EagleDrafter
    ) -> list[tuple[str, Rollouts, Writer]]:
        """Return what decodes texts with the current drafter."""
        return [("errors", run.errors, partial(decoded_rounds, run.errors, target, drafter))]

    @torch.no_grad()
    def teacher_forced(
        self, drafter: EagleDrafter, hidden: Hidden, ids: Tensor, steps: int = 7
    ) -> Tensor:
        """Return ranks `[S, D]` by the training pass.

        Row n, column k is the place of the text's own token x[n+1+k] among the best of the draft of
        depth k + 1 from root n. It is -1 where the token is not among the best, cannot be drafted,
        or lies outside the text.
        """
        length, taps = len(ids), tuple(tap[None] for tap in hidden.taps)
        outputs = unroll(drafter, batch_of_text(ids), taps, hidden.last[None], steps, "sdpa")
        vocabulary = VocabularyMap(drafter, ids.device)
        ranks = torch.full((length, steps), -1, dtype=torch.long, device=ids.device)
        for k in range(min(steps, length - 2)):
            # Rows t = 0 .. S - 3 - k have a label x[t+2+k], and the root of row t is t + 1. With 5
            # tokens and k = 1: rows 0 and 1, labels x[3] and x[4], roots 1 and 2.
            rows = length - 2 - k
            labels = vocabulary.columns(ids[2 + k :])
            ranks[1 : 1 + rows, k] = ranks_in(drafter.logits(outputs[k][0, :rows]), labels)
        return ranks

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the rank accuracies of the drafter, and the tree of evaluation."""
        calibration = rank_calibration(comparable_roots(outcomes), tree_nodes)
        return calibration | {"length": min(DEFAULT_LENGTH, tree_nodes), "width": DEFAULT_WIDTH}

    def accepted_by_root(self, outcome: Tensor, calibration: JsonObject) -> list[int]:
        return accepted_in_chains(outcome, calibration)


METHOD = EagleMethod()
