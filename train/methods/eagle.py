"""How an EAGLE drafter learns: unrolled over its own states (EAGLE-3), or one step towards the
target's next feature (EAGLE-1).

Index table (drafter-recipes 0.3): step k at row t reads its own state of step k - 1 (step 0: the
target's features of t) and the token x[t+1+k]; its label is x[t+2+k], its teacher p[t+1+k], its
weight R(t+1 .. t+2+k).

Shapes: B packed rows, S positions, K steps, J teacher positions, H hidden size, V vocabulary, Vd
draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
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
from ...heads.artifact import Artifact
from ...heads.eagle import EagleConfig, EagleDrafter, EagleShape, config_of, shape_for
from ...heads.errors import UserError
from ...heads.layers import begin_unsure
from ...heads.vocabulary import most_frequent
from ...inference.proposers.eagle import RANKS, calibrate
from ...inference.target import Hidden, Target
from ..config import RunConfig
from ..data.batches import Batch, Batches
from ..data.rollouts import Errors, Rollouts, Writer, decoded_rounds
from ..features import Features
from ..memory import Memory
from ..objectives import Sums, depth_metrics, smoothed, static_decay, survival_weights
from ..outline import ConfigOnly, Outline
from .unroll import Backend, unroll

log = logging.getLogger(__name__)

__all__ = [
    "REPLAYED",
    "Run",
    "accepted_by_root",
    "calibrate",
    "features_of",
    "make_drafter",
    "make_objective",
    "outline",
    "teacher_forced",
    "writers",
]

REPLAYED = {"width": 1}  # how the proposer drafts what `accepted_by_root` estimates: a chain
NOISE_LENGTH = 512
# of random direction, as an untrained layer's are, by which the size of its logits is judged
STATES = 64


@dataclass
class EagleLoss(Memory):
    """Loss settings."""

    loss: Divergence = "kl"
    """Between the drafter's distribution and the target's, or the text's tokens (ce)."""
    steps: int | None = None
    """Unrolled steps: 7 for version 3, 1 for version 1."""
    single_step_share: float = 0.0
    """Share of the run that trains the first step alone, at a fraction of the cost, before the
    others join: worth it for short runs, in which a drafter that is wrong at once learns little
    from going on."""
    weighting: Literal["decay", "survival", "d-pace"] = "decay"
    """Weights of the steps: decay^k over their sum; what each would earn in accepted drafts by its
    overlap (with lk-alpha this is end-to-end TV); or the same by the smoothed probability of the
    label (D-PACE, for ce)."""
    decay: float = 0.8
    smoothing: float = 0.5
    """D-PACE's: 0 weighs by the probabilities themselves, 1 not at all."""
    out_of_vocabulary: Literal["drop", "keep"] = "drop"
    """What a position teaches whose best token cannot be drafted: nothing (it still counts in the
    loss's denominator, as 0), or the distribution over the tokens that can. Metrics count it as a
    miss either way."""
    feature_weight: float | None = None
    """Weight of SmoothL1 towards the target's next feature, before a final norm of the drafter's
    own: 1 for version 1, 0 for version 3. With little data it helps version 3 too, together with
    token_weight 0.1 and freeze_head."""
    token_weight: float | None = None
    """Weight of the loss above: 0.1 for version 1, 1 for version 3."""
    freeze_head: bool = False
    """Version 3: keep final norm and head as they begin, the target's own."""
    noise: float | None = None
    """Features get uniform noise of this size * 512 / document length: 0.1 for version 1, 0 for
    version 3."""
    attention: Backend = "auto"
    """How the unrolled attention runs: sdpa, flex (GPU), plain (a reference that holds every
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
        if any(
            value is not None and value < 0
            for value in (self.feature_weight, self.token_weight, self.noise)
        ):
            raise UserError("objective.feature_weight, token_weight and noise must not be negative")

    def resolved(self, version: int) -> EagleLoss:
        """With the defaults of an EAGLE version filled in."""
        defaults = (
            {"steps": 1, "feature_weight": 1.0, "token_weight": 0.1, "noise": 0.1}
            if version == 1
            else {"steps": 7, "feature_weight": 0.0, "token_weight": 1.0, "noise": 0.0}
        )
        if version == 3 and self.noise:
            raise UserError(
                "objective.noise is for version 1; the taps of version 3 differ in size too much "
                "for one noise"
            )
        return replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )


@dataclass
class Run(RunConfig):
    """Train an EAGLE drafter for a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train eagle --config configs/eagle/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    heads: EagleConfig = field(default_factory=EagleConfig)
    objective: EagleLoss = field(default_factory=EagleLoss)
    errors: Errors = field(default_factory=Errors)


def features_of(run: Run, target: Target) -> tuple[tuple[int, ...], bool]:
    """Taps that the run reads, and whether it reads the last state everywhere; see `Objective`."""
    shape = shape_for(run.heads, target.config)
    return shape.taps, shape.version == 1


def outline(run: Run, target: ConfigOnly) -> Outline:
    """See `Outline`."""
    shape = shape_for(run.heads, target.config)
    steps = run.objective.resolved(shape.version).steps or 1
    borrowed = shape.hidden_size * shape.vocab_size if shape.version == 1 else 0
    return Outline(
        EagleDrafter(shape, target.embedding_and_head), steps, borrowed, shape.num_layers, steps
    )


def make_drafter(
    run: Run, target: Target, batches: Batches, before: Artifact | None
) -> EagleDrafter:
    """An untrained drafter whose head starts as the target's, or the shape of the drafter `before`,
    to be filled with its weights.

    A warm start keeps taps, vocabulary and norms, and says so; asking for others than the default
    ones is an error.
    """
    if before is not None:
        return EagleDrafter(_shape_before(run, target, before), target.embedding_and_head)
    shape = shape_for(run.heads, target.config)
    drafter = EagleDrafter(shape, target.embedding_and_head)
    ids = None
    if shape.draft_vocab_size < shape.vocab_size:
        ids = most_frequent(
            batches.token_counts(shape.vocab_size), shape.draft_vocab_size, special_ids(target)
        )
    norm = target.final_norm_weight()
    weight = norm.float().cpu() if norm is not None else None
    drafter.start_from(target.head_weight.float().cpu(), weight, ids, target.tap_sizes(shape.taps))
    loss = run.objective.resolved(shape.version)
    # these compare states in the target's own scale
    if shape.version == 3 and not loss.feature_weight and not loss.freeze_head:
        states = torch.randn(
            STATES, shape.hidden_size, generator=torch.Generator().manual_seed(run.seed)
        )
        begin_unsure(drafter.norm, drafter.logits(states))
    return drafter


def _shape_before(run: Run, target: Target, before: Artifact) -> EagleShape:
    """The shape of the drafter that the run starts from; differences to its target are reported."""
    shape: EagleShape = before.drafter.shape
    asked, default, has = asdict(run.heads), asdict(EagleConfig()), config_of(shape)
    for name, value in asked.items():
        if value not in (default[name], has[name]):
            raise UserError(
                f"init_from {run.init_from} has {name} {has[name]}, heads.{name} says {value}; "
                "leave it out"
            )
    log.info(
        "going on from %s: %s",
        run.init_from,
        ", ".join(f"{name} {value}" for name, value in has.items()),
    )
    now = asdict(shape_for(EagleConfig(**has), target.config))
    for name, value in asdict(shape).items():
        if now[name] != value:
            log.warning("the drafter keeps %s %s, though the target has %s", name, value, now[name])
    return shape


def special_ids(target: Target) -> set[int]:
    """Tokens that have to be drafted for a reply ever to end: the end tokens and all that the
    tokenizer calls special."""
    tokenizer = target.tokenizer
    own = (
        [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
        if tokenizer is not None
        else []
    )
    return set(target.eos_ids) | {token for token in own if token < target.vocab_size}


def make_objective(run: Run, target: Target, drafter: EagleDrafter) -> EagleObjective:
    config, shape = run.objective.resolved(drafter.shape.version), drafter.shape
    if config.feature_weight and shape.hidden_size != shape.target_hidden_size:
        raise UserError(
            "objective.feature_weight compares states of the target's width; leave out "
            "heads.hidden_size"
        )
    if config.attention == "flex" and target.device.type == "cpu":
        raise UserError("objective.attention is flex, which has no gradients on a CPU; use auto")
    if shape.version == 1 and target.dtype == torch.float16:
        raise UserError(
            "EAGLE-1 learns through the target's head, and float16 loses its gradients; give "
            "--target.dtype bfloat16 or float32"
        )
    if config.freeze_head:
        drafter.freeze_head()
    return EagleObjective(
        config, drafter.taps, target.head, run.seed, run.errors.accepted_weight, shape.version == 1
    )


def writers(run: Run, target: Target, drafter: EagleDrafter) -> list[tuple[str, Rollouts, Writer]]:
    """What writes texts while the run goes on: name, how often, how."""
    return [("errors", run.errors, partial(decoded_rounds, run.errors, target, drafter))]


class EagleObjective:
    """Both versions: EAGLE-1 is one step with a feature loss and noise, EAGLE-3 several steps with
    neither."""

    def __init__(
        self,
        config: EagleLoss,
        taps: tuple[int, ...],
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
        accepted_weight: float = 1.0,
        all_last: bool = False,
    ) -> None:
        """`all_last`: rows read the last state too, as in version 1."""
        assert config.steps is not None, "resolve the config first"
        self.all_last = all_last
        self._accepted_weight = accepted_weight
        self.config, self.taps, self._target_head, self._seed = config, taps, target_head, seed
        self.begin(1.0)

    def begin(self, progress: float) -> None:
        assert self.config.steps is not None
        self.steps = 1 if progress < self.config.single_step_share else self.config.steps
        self.step_weights = static_decay(self.steps, self.config.decay)

    def row_weights(self, batch: Batch) -> Tensor:
        """`[B, S, K]` on the CPU: the weight of each row at each step; row t drafts from the root
        at t + 1."""
        runs = torch.stack([batch.reply_run(1, 2 + k) for k in range(self.steps)], dim=-1)
        return runs * functional.pad(
            batch.draft_weights(self.steps, self._accepted_weight)[:, 1:], (0, 0, 0, 1)
        )

    def weights(self, batch: Batch) -> dict[str, float]:
        return {
            f"step{k}": total
            for k, total in enumerate(
                self.row_weights(batch).sum((0, 1), dtype=torch.float64).tolist()
            )
        }

    def forward(
        self, drafter: EagleDrafter, features: Features, denominators: dict[str, float]
    ) -> tuple[Tensor, Sums]:
        batch, last = features.batch, features.last
        taps, seen = self._disturbed(batch, features)
        outputs = unroll(drafter, batch, taps, seen, self.steps, self.config.attention, self.config)
        places = TeacherPlaces(self.row_weights(batch), last.device)
        hidden = places.by_teacher(outputs)
        measure = partial(
            self._table, drafter, last.flatten(0, 1), VocabularyMap(drafter, last.device)
        )
        rows = (
            places.teachers,
            batch.ids.flatten().to(last.device, non_blocking=True)[
                (places.teachers + 1) % batch.ids.numel()
            ],
        )
        factors = self._factors(places, measure, hidden, rows, denominators)
        loss, losses, right, alpha, _ = sum_in_chunks(
            measure, hidden, (*rows, factors), drafter.head_parameters, self.config.rows_per_chunk
        )
        sums = depth_metrics(
            *(places.by_root(table) for table in (losses, right, alpha, places.weights))
        )
        return loss, sums

    def _disturbed(self, batch: Batch, features: Features) -> tuple[tuple[Tensor, ...], Tensor]:
        """The features with uniform noise of EAGLE-1: a pure function of seed and place in the
        data, whatever the ranks."""
        if not self.config.noise:
            return features.taps, features.last
        device, shape = features.last.device, features.last.shape
        generator = torch.Generator(device)
        noise = []
        for number in batch.numbers:
            generator.manual_seed(self._seed * 1_000_003 + number)
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
        """`[J, K]`: what each position's loss is multiplied with, 0 where it has no weight."""
        counts = [max(denominators[f"step{k}"], 1e-9) for k in range(self.steps)]
        if self.config.weighting == "decay":
            scaled = [w / n for w, n in zip(self.step_weights, counts, strict=True)]
            return places.weights * torch.tensor(scaled, device=hidden.device)
        # the weights couple the steps of a root, so a pass over all of them comes first
        with torch.no_grad():
            zeros = torch.zeros(places.weights.shape, device=hidden.device)
            _, _, _, alpha, likely = sum_in_chunks(
                measure, hidden, (*rows, zeros), [], self.config.rows_per_chunk
            )
        chances = (
            alpha
            if self.config.weighting == "survival"
            else smoothed(likely, self.config.smoothing)
        )
        weights = survival_weights(places.by_root(chances), places.by_root(places.weights).bool())
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
        """Of teacher positions `[J]`: the loss, and `[J, K]` each: losses, whether the best token
        is right, overlap, q(label).

        A position's distribution serves the K drafts about it: `hidden` `[J, K, H]`, `factors` `[J,
        K]`, `labels` `[J]`.
        """
        with torch.no_grad():
            log_p = log_probs(self._target_head(last[teachers]))
            best = vocabulary.columns(log_p.argmax(-1))
            log_p = vocabulary.restrict(log_p)
            labels = vocabulary.columns(labels)
        log_q = log_probs(drafter.logits(hidden))
        named = labels.clamp(min=0)[:, None].expand(hidden.shape[:2])
        losses = divergence(self.config.loss, log_q, log_p[:, None], named) * (
            self.config.token_weight or 0.0
        )
        if self.config.out_of_vocabulary == "drop":
            losses = losses.masked_fill((best < 0)[:, None], 0.0)
        if self.config.loss in NEEDS_LABELS:
            losses = losses.masked_fill((labels < 0)[:, None], 0.0)
        if self.config.feature_weight:
            goal = last[teachers].to(hidden.dtype)[:, None].expand_as(hidden)
            felt = drafter.feature(hidden)
            losses = losses + self.config.feature_weight * functional.smooth_l1_loss(
                felt, goal, reduction="none"
            ).mean(-1)
        with torch.no_grad():
            right = log_q.argmax(-1) == best[:, None]
            alpha = overlap(log_q, log_p[:, None])
            likely = log_q.gather(-1, named[..., None])[..., 0].exp() * (labels >= 0)[:, None]
        return (losses * factors).sum(), losses, right.float(), alpha, likely


class VocabularyMap:
    """From target ids to columns of the drafter's head."""

    def __init__(self, drafter: EagleDrafter, device: torch.device) -> None:
        self._draft_vocab_ids = drafter.draft_vocab_ids
        if self._draft_vocab_ids is not None:
            self._columns = torch.full(
                (drafter.shape.vocab_size,), -1, dtype=torch.long, device=device
            )
            self._columns[self._draft_vocab_ids] = torch.arange(
                len(self._draft_vocab_ids), device=device
            )

    def columns(self, ids: Tensor) -> Tensor:
        """-1 for tokens that cannot be drafted."""
        return ids if self._draft_vocab_ids is None else self._columns[ids]

    def restrict(self, probs: Tensor) -> Tensor:
        """`[J, V]` -> `[J, Vd]`; what is left out is not put anywhere else."""
        return probs if self._draft_vocab_ids is None else probs[:, self._draft_vocab_ids]


class TeacherPlaces:
    """The rows with weight, sorted by teacher: step k of row t is taught by position t + 1 + k, so
    up to K drafts share one distribution.

    Prompt 0..3, reply 4..8, three steps: roots' rows t = 3..6, teachers 4..7; teacher 6 teaches row
    5 at step 0, row 4 at step 1, row 3 at step 2. Tables `[J, K]` by teacher and `[R, K]` by root
    hold the same numbers.
    """

    def __init__(self, weights: Tensor, device: torch.device) -> None:
        """`weights` `[B, S, K]` on the CPU, so that finding rows waits for nothing; 0 where a row
        has none."""
        batch, length, steps = weights.shape
        valid = weights > 0
        k = torch.arange(steps)
        back = torch.arange(length)[:, None] - 1 - k  # the row that position j teaches at step k
        by_teacher = (weights[:, back.clamp(min=0), k] * (back >= 0)).flatten(0, 1)
        taught = by_teacher > 0
        teachers = taught.any(-1).nonzero()[:, 0]
        valid = valid.flatten(0, 1)
        roots = valid.any(-1).nonzero()[:, 0]
        # Where each position stands among the teachers, and among the roots; one past the end means
        # nowhere.
        among_teachers = torch.full((batch * length + steps + 1,), len(teachers))
        among_teachers[teachers] = torch.arange(len(teachers))
        among_roots = torch.full((batch * length,), len(roots))
        among_roots[roots] = torch.arange(len(roots))
        row_of = (teachers[:, None] - 1 - k).clamp(min=0)
        root_of = torch.where(taught[teachers], among_roots[row_of], len(roots))
        teacher_of = torch.where(
            valid[roots], among_teachers[roots[:, None] + 1 + k], len(teachers)
        )

        def send(x):
            return x.to(device, non_blocking=True)

        self.teachers, self.weights = send(teachers), send(by_teacher[teachers].float())
        self._row_of, self._root_of, self._teacher_of, self._k = (
            send(row_of),
            send(root_of),
            send(teacher_of),
            send(k),
        )

    def by_teacher(self, outputs: list[Tensor]) -> Tensor:
        """K tensors `[B, S, H]` -> `[J, K, H]`."""
        return torch.stack(
            [x.flatten(0, 1)[self._row_of[:, k]] for k, x in enumerate(outputs)], dim=1
        )

    def by_root(self, table: Tensor) -> Tensor:
        """`[J, K]` by teacher -> `[R, K]` by root, 0 where there is no weight."""
        return functional.pad(table, (0, 0, 0, 1))[self._teacher_of, self._k]

    def to_teacher(self, table: Tensor) -> Tensor:
        """`[R, K]` by root -> `[J, K]` by teacher, 0 where there is no weight."""
        return functional.pad(table, (0, 0, 0, 1))[self._root_of, self._k]


@torch.no_grad()
def teacher_forced(drafter: EagleDrafter, hidden: Hidden, ids: Tensor, steps: int = 7) -> Tensor:
    """Teacher-forced ranks `[S, K]` by the training pass: place of the text's own token among the
    best at depth d from root n.

    `ids` `[S]`, `hidden` of them. -1 where the token is not among the best, cannot be drafted, or
    lies outside the text.
    """
    length = len(ids)
    batch = Batch(
        ids[None].cpu(),
        torch.arange(length)[None],
        torch.zeros(1, length, dtype=torch.long),
        torch.ones(1, length) > 0,
    )
    outputs = unroll(
        drafter, batch, tuple(tap[None] for tap in hidden.taps), hidden.last[None], steps, "sdpa"
    )
    vocabulary = VocabularyMap(drafter, ids.device)
    ranks = torch.full((length, steps), -1, dtype=torch.long, device=ids.device)
    for k in range(min(steps, length - 2)):
        rows = length - 2 - k
        logits = drafter.logits(outputs[k][0, :rows])
        best = logits.topk(min(RANKS, logits.shape[-1])).indices
        hit = best == vocabulary.columns(ids[2 + k :])[:, None]
        ranks[1 : 1 + rows, k] = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    return ranks


def accepted_by_root(ranks: Tensor, calibration: dict) -> list[int]:
    """How many drafts of a greedy chain are right at each root, from `teacher_forced` `[S, K]`."""
    return (ranks == 0)[:, : calibration["length"]].int().cumprod(-1).sum(-1).tolist()
