"""Training of block drafters: blocks at random roots of the target's own text, with the tokens that
followed there as labels.

Index table (drafter-recipes 0.3): the d-th draft of a block at anchor a, d >= 1, has the label
x[a+d], the teacher p[a+d-1] and the weight R(a .. a+d), whichever slot makes it.

Shapes: B packed rows, S positions, A anchors, D drafts of a block, R blocks with weight, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...distill.divergences import Divergence, divergence, log_probs, overlap, sum_in_chunks
from ...heads import dflash
from ...heads.artifact import Artifact
from ...heads.dflash import DFlashConfig, DFlashDrafter, shape_for
from ...heads.errors import UserError
from ...heads.layers import begin_unsure
from ...inference.proposers.dflash import RANKS, calibrate
from ...inference.target import Hidden, Target
from ..config import RunConfig
from ..data.batches import Batch, Batches
from ..data.rollouts import Rollouts, Writer
from ..features import Features
from ..memory import Memory
from ..objectives import Sums, depth_metrics, smoothed, survival_weights
from ..outline import ConfigOnly, Outline
from .blocks import Anchors, contexts, run_blocks
from .mask_token import mask_token_for
from .unroll import Backend

log = logging.getLogger(__name__)

__all__ = ["REPLAYED", "Run", "accepted_by_root", "calibrate", "features_of", "make_drafter",
"make_objective",
           "outline", "teacher_forced", "writers"]  # fmt: skip

REPLAYED = {"width": 1}  # how the proposer drafts what `accepted_by_root` estimates: a chain
# of the first logits: states made of a mask token's embedding hold the tokens of texts for unlikely
SPREAD = 0.25
PLACES = 32  # anchors that `teacher_forced` runs at one time


@dataclass
class BlockLoss(Memory):
    """Loss settings."""

    loss: Divergence = "ce"
    """Between the drafter's distribution and the text's tokens (ce), or the target's
    distribution."""
    weighting: Literal["decay", "survival", "d-pace"] = "d-pace"
    """Weights of a block's drafts: exp(-(d - 1) / gamma); what each would earn in accepted drafts
    by its overlap (with lk-alpha this is end-to-end TV); or the same by the smoothed probability of
    the label (D-PACE, for ce)."""
    gamma: float | None = None
    """Of decay; half the block if not given (the paper: 7, 5, 4 for blocks of 16, 10, 8)."""
    smoothing: float = 0.5
    """D-PACE's: 0 weighs by the probabilities themselves, 1 not at all."""
    token_weight: float = 1.0
    """Weight of the loss above."""
    feature_weight: float = 0.0
    """Weight of SmoothL1 between what the head reads of a draft and what it reads of the target;
    for runs on little text."""
    anchors: int = 512
    """Blocks in a packed row, at roots drawn anew each time that the row is seen. Rows with fewer
    roots leave some over."""
    attention: Backend = "auto"
    """How the blocks' attention runs: sdpa, flex (GPU), plain (a reference, block by block), or
    whichever fits."""
    rows_per_chunk: int = 16
    """Blocks whose logits exist at one time."""

    def __post_init__(self) -> None:
        if min(self.anchors, self.rows_per_chunk) < 1:
            raise UserError("objective.anchors and objective.rows_per_chunk must be at least 1")
        if not 0 <= self.smoothing <= 1 or (self.gamma is not None and self.gamma <= 0):
            raise UserError("objective.smoothing must lie in [0, 1], objective.gamma be above 0")
        if self.gamma is not None and self.weighting != "decay":
            raise UserError(
                f"objective.gamma is of weighting decay, not {self.weighting}; leave it out"
            )
        if self.weighting == "d-pace" and self.loss != "ce":
            raise UserError(
                f"d-pace weighs ce, not {self.loss}; give objective.weighting decay or survival "
                "with it"
            )
        if min(self.token_weight, self.feature_weight) < 0:
            raise UserError("objective.token_weight and feature_weight must not be negative")
        super().__post_init__()


@dataclass
class Run(RunConfig):
    """Train a DFlash drafter for a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train dflash --config configs/dflash/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    heads: DFlashConfig = field(default_factory=DFlashConfig)
    objective: BlockLoss = field(default_factory=BlockLoss)


def features_of(run: Run, target: Target) -> tuple[tuple[int, ...], bool]:
    """Taps that the run reads, and whether it reads the last state everywhere; see `Objective`."""
    return shape_for(run.heads, target.config, run.heads.mask_token or 0).taps, False


def outline(run: Run, target: ConfigOnly) -> Outline:
    """See `Outline`."""
    return outline_of(
        run,
        DFlashDrafter(
            shape_for(run.heads, target.config, run.heads.mask_token or 0),
            target.embedding_and_head,
        ),
    )


def outline_of(run: Any, drafter: DFlashDrafter) -> Outline:
    """A step runs all rows of all blocks, whatever a packed row has of roots. That the context
    makes keys and values is left out, and `fc`, which only the context goes through, is counted as
    often as the rest: a few percent, either way."""
    shape = drafter.shape
    passes = run.objective.anchors * shape.block_size / run.data.max_length
    return Outline(
        drafter, passes, shape.hidden_size * shape.vocab_size, shape.num_layers, drafter.drafts
    )


def make_drafter(
    run: Run, target: Target, batches: Batches, before: Artifact | None
) -> DFlashDrafter:
    """An untrained drafter, or the shape of the drafter `before`, to be filled with its weights.

    A warm start keeps its shape, and says so; asking for another than the default one is an error.
    """
    if before is not None:
        return DFlashDrafter(
            shape_before(run, target, batches, before, dflash), target.embedding_and_head
        )
    mask_token = mask_token_for(run.heads.mask_token, target, batches)
    drafter = DFlashDrafter(
        shape_for(run.heads, target.config, mask_token), target.embedding_and_head
    )
    start(drafter, target, batches)
    return drafter


def start(drafter: DFlashDrafter, target: Target, batches: Batches) -> None:
    """Give an untrained drafter what it can have of its target and of the texts."""
    norm = target.final_norm_weight()
    drafter.start_from(norm.float().cpu() if norm is not None else None)
    drafter.rescale(target.tap_sizes(drafter.taps), keep=False)
    ids = batches.sample_ids(target.max_positions - 1)
    taps = tuple(tap.cpu() for tap in target.tap_sample(ids, drafter.taps))
    drafter.attend_nearby(taps, torch.tensor(ids))
    _, outputs, _, _ = next(forced_blocks(drafter, Hidden(taps[0], taps), torch.tensor(ids)))
    logits = target.embedding_and_head.head(
        drafter.norm(outputs).to(target.device, target.dtype)
    ).cpu()
    begin_unsure(drafter.norm, logits, SPREAD)


def shape_before(run: Any, target: Target, batches: Batches, before: Artifact, method: Any) -> Any:
    """The shape of the drafter that the run starts from; differences to its target are reported.
    Raises `UserError` if the run asks for another. `method`: its file in heads/."""
    shape = before.drafter.shape
    asked, default, has = asdict(run.heads), asdict(type(run.heads)()), method.config_of(shape)
    for name, value in asked.items():
        if value not in (default[name], has[name]):
            raise UserError(
                f"init_from {run.init_from} has {name} {has[name]}, heads.{name} says {value}; "
                "leave it out"
            )
    mask_token_for(shape.mask_token, target, batches)
    log.info(
        "going on from %s: %s",
        run.init_from,
        ", ".join(f"{name} {value}" for name, value in has.items()),
    )
    now = asdict(method.shape_for(type(run.heads)(**has), target.config, shape.mask_token))
    for name, value in asdict(shape).items():
        if now[name] != value:
            log.warning("the drafter keeps %s %s, though the target has %s", name, value, now[name])
    return shape


def make_objective(run: Run, target: Target, drafter: DFlashDrafter) -> BlockObjective:
    ready(run.objective, target, drafter)
    objective = BlockObjective(run.objective, drafter, target.head, run.seed)
    objective.steps = outline_of(run, drafter).passes
    return objective


def ready(config: BlockLoss, target: Target, drafter: DFlashDrafter) -> None:
    """Make a drafter, new or from disk, fit to learn. Raises `UserError` where gradients cannot
    pass."""
    if config.attention == "flex" and target.device.type == "cpu":
        raise UserError("objective.attention is flex, which has no gradients on a CPU; use auto")
    if target.dtype == torch.float16:
        raise UserError(
            "block drafters learn through the target's head, and float16 loses their gradients; "
            "give --target.dtype bfloat16 or "
            "float32"
        )
    if bool((drafter.tap_scales == 1).all()):
        drafter.rescale(target.tap_sizes(drafter.taps), keep=True)


def writers(run: Run, target: Target, drafter: DFlashDrafter) -> list[tuple[str, Rollouts, Writer]]:
    """Nothing is written while blocks are trained: they draft from the target's states and one
    token, whatever was drafted."""
    return []


class BlockObjective:
    """Random blocks, their drafts weighed within each block."""

    all_last = False
    steps = 1.0
    """Passes over a position, for the estimate of what a step computes."""

    def __init__(
        self,
        config: BlockLoss,
        drafter: DFlashDrafter,
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
    ) -> None:
        self.config, self.taps, self._target_head, self._seed = (
            config,
            drafter.taps,
            target_head,
            seed,
        )
        self._drafts, size = drafter.drafts, drafter.shape.block_size
        gamma = config.gamma or (size + 1) // 2
        self._decay = torch.tensor([math.exp(-d / gamma) for d in range(self._drafts)])
        # weights that depend on the forward pass are divided by what there is to weigh
        if config.weighting != "decay":
            self._decay = torch.ones(self._drafts)

    def begin(self, progress: float) -> None: ...

    def anchors(self, batch: Batch) -> Anchors:
        return Anchors.drawn(batch, self.config.anchors, self._drafts, self._seed)

    def weights(self, batch: Batch) -> dict[str, float]:
        return {
            "drafts": float((self.anchors(batch).weights * self._decay).sum(dtype=torch.float64))
        }

    def forward(
        self, drafter: Any, features: Features, denominators: dict[str, float]
    ) -> tuple[Tensor, Sums]:
        batch, device, config = features.batch, features.last.device, self.config
        anchors = self.anchors(batch)
        context = contexts(drafter, batch, features.taps)
        outputs = run_blocks(drafter, batch, anchors.places, context, config.attention, config)
        blocks = anchors.weights[..., 0].flatten().nonzero()[:, 0]  # on the CPU; may be none
        there = blocks.to(device, non_blocking=True)
        offsets = torch.arange(len(batch.ids))[:, None] * batch.ids.shape[1]
        teachers = anchors.ahead(offsets + torch.arange(batch.ids.shape[1]), torch.device("cpu"), 0)
        before, labels = (
            anchors.ahead(batch.ids, device, places).flatten(0, 1)[there] for places in (0, 1)
        )
        weights = anchors.weights.flatten(0, 1)[blocks].to(device, non_blocking=True)
        last = features.last.flatten(0, 1)
        factors = weights * self._decay.to(device) / max(denominators["drafts"], 1e-9)
        loss, *tables = sum_in_chunks(
            lambda state, *rows: self._table(drafter, last, state, *rows),
            drafter.state(outputs.flatten(0, 1)[there], before),
            (teachers.flatten(0, 1)[blocks], labels, weights, factors),
            drafter.head_parameters,
            config.rows_per_chunk,
        )
        losses, right, alpha, *more = tables
        return loss, depth_metrics(losses, right, alpha, weights) | self.more_metrics(
            weights, *more
        )

    def more_metrics(self, weights: Tensor, *tables: Tensor) -> Sums:
        """What a method measures besides."""
        return {}

    def _table(
        self,
        drafter: Any,
        last: Tensor,
        state: Tensor,
        teachers: Tensor,
        labels: Tensor,
        weights: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Of blocks `[R]`: the loss, and `[R, D]` each: losses, whether the best token is right,
        overlap.

        `state` `[R, D, ..]` as the drafter's head reads it; `last` `[positions, H]`; the rest `[R,
        D]`: `teachers` (on the CPU, so that finding the distinct ones waits for nothing;
        neighbouring blocks share them), `labels`, `weights` and `factors`.
        """
        positions, places = (
            t.to(last.device, non_blocking=True) for t in teachers.unique(return_inverse=True)
        )
        with torch.no_grad():
            log_p = log_probs(self._target_head(last[positions]))[places]
        log_q = log_probs(drafter.logits(state))
        losses = self.config.token_weight * divergence(self.config.loss, log_q, log_p, labels)
        if self.config.feature_weight:
            goal = last[positions][places].to(state.dtype)
            felt = functional.smooth_l1_loss(
                drafter.norm(state[..., : goal.shape[-1]]), goal, reduction="none"
            ).mean(-1)
            losses = losses + self.config.feature_weight * felt
        with torch.no_grad():
            right = (log_q.argmax(-1) == log_p.argmax(-1)).float()
            alpha = overlap(log_q, log_p)
            scale = factors
            if self.config.weighting != "decay":
                likely = log_q.gather(-1, labels[..., None])[..., 0].exp()
                chances = (
                    alpha
                    if self.config.weighting == "survival"
                    else smoothed(likely, self.config.smoothing)
                )
                scale = factors * survival_weights(chances, weights > 0)
        more, tables = self.further_loss(drafter, state, alpha)
        return ((losses + more) * scale).sum(), losses, right, alpha, *tables

    def further_loss(
        self, drafter: Any, state: Tensor, alpha: Tensor
    ) -> tuple[Tensor | float, tuple[Tensor, ...]]:
        """What is added to the losses `[R, D]`, and tables of it."""
        return 0.0, ()


@torch.no_grad()
def teacher_forced(drafter: Any, hidden: Hidden, ids: Tensor) -> Tensor:
    """Teacher-forced ranks `[S, D]` by the training pass: place of the text's own token among the
    best of draft d from root n.

    `ids` `[S]`, `hidden` of them. -1 where the token is not among the best, or lies outside the
    text.
    """
    ranks = torch.full((len(ids), drafter.drafts), -1, dtype=torch.long, device=ids.device)
    for rows, outputs, before, coming in forced_blocks(drafter, hidden, ids):
        ranks[rows] = ranks_among_best(drafter.logits(drafter.state(outputs, before)), coming)
    return ranks


def ranks_among_best(logits: Tensor, coming: Tensor) -> Tensor:
    """Place `[..]` of the tokens `coming` `[..]` among the best of `logits` `[.., V]`; -1 where
    they are not among those."""
    hit = logits.topk(min(RANKS, logits.shape[-1])).indices == coming[..., None]
    return torch.where(hit.any(-1), hit.int().argmax(-1), -1)


def forced_blocks(
    drafter: Any, hidden: Hidden, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield, some roots at a time: the roots, their blocks' outputs `[n, D, H]`, the text's tokens
    before each draft `[n, D]` and in their places `[n, D]` (-1: none)."""
    length = len(ids)
    batch = Batch(
        ids[None].cpu(),
        torch.arange(length)[None],
        torch.zeros(1, length, dtype=torch.long),
        torch.ones(1, length) > 0,
    )
    context = contexts(drafter, batch, tuple(tap[None] for tap in hidden.taps))
    ahead = torch.arange(1, drafter.drafts + 1, device=ids.device)
    for start in range(0, length, PLACES):
        roots = torch.arange(start, min(start + PLACES, length))
        outputs = run_blocks(drafter, batch, roots[None], context)[0]
        at = roots.to(ids.device)[:, None] + ahead
        coming = torch.where(at < length, ids[at.clamp(max=length - 1)], -1)
        before = ids[(at - 1).clamp(max=length - 1)]
        yield roots.to(ids.device), outputs, before, coming


def accepted_by_root(ranks: Tensor, calibration: dict[str, Any]) -> list[int]:
    """How many drafts of a greedy chain are right at each root, from `teacher_forced` `[S, D]`."""
    return (ranks == 0)[:, : calibration["length"]].int().cumprod(-1).sum(-1).tolist()
