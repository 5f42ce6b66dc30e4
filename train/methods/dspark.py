"""Training of DSpark drafters (arXiv 2607.05147), which differs from DFlash's in two things.

Each draft also reads the token before it, in training the text's own, and each draft has a
confidence, which learns how much of its distribution the target would accept. Anchors, labels,
teachers and weights are those of `dflash.py`.

Shapes: S positions, R blocks with weight, D drafts of a block, H hidden size, r rank of the
transition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...distill.divergences import Divergence
from ...heads import dspark
from ...heads.artifact import Artifact
from ...heads.dspark import DSparkConfig, DSparkDrafter, shape_for
from ...heads.errors import UserError
from ...inference.causal_model import Hidden
from ...inference.proposers.dflash import RANKS
from ...inference.proposers.dspark import calibrate
from ...inference.replay import accepted_in_chains, rank_of
from ...inference.target import TargetSource
from ..config import RunConfig
from ..data.batches import Batches
from ..objectives import Sums
from ..outline import ConfigOnly, Outline
from .beginnings import shape_before
from .dflash import (
    REPLAYED,
    BlockLoss,
    BlockObjective,
    forced_blocks,
    outline_of,
    ready,
    start,
    writers,
)
from .mask_token import mask_token_for

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


@dataclass
class DSparkLoss(BlockLoss):
    """Settings of a DSpark drafter's loss."""

    loss: Divergence = "lk-hybrid"
    """Divergence of the drafter's distribution from the text's tokens (ce), the target's
    distribution, or both: ce-l1 is the paper's, for billions of tokens. From little data it learns
    next to nothing, since L1 has hardly any gradient where the distributions hardly overlap."""
    weighting: Literal["decay", "survival", "d-pace"] = "decay"
    confidence_weight: float = 1.0
    """Weight of the cross-entropy between each draft's confidence and the overlap of its
    distribution with the target's."""

    def __post_init__(self) -> None:
        if self.confidence_weight < 0:
            raise UserError("objective.confidence_weight must not be negative")
        super().__post_init__()


@dataclass
class Run(RunConfig):
    """Train a DSpark drafter for a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train dspark --config configs/dspark/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    heads: DSparkConfig = field(default_factory=DSparkConfig)
    objective: DSparkLoss = field(default_factory=DSparkLoss)


def features_of(run: Run, target: TargetSource) -> tuple[tuple[int, ...], bool]:
    """Return the taps that the run reads, and `Objective.all_last`."""
    # The taps are the same for any mask token, and none is chosen yet.
    return shape_for(run.heads, target.config, run.heads.mask_token or 0).taps, False


def outline(run: Run, target: ConfigOnly) -> Outline:
    """Return the run's `Outline`, from the target's config alone."""
    shape = shape_for(run.heads, target.config, run.heads.mask_token or 0)
    return outline_of(run, DSparkDrafter(shape, target.embedding_and_head))


def make_drafter(
    run: Run, target: TargetSource, batches: Batches, before: Artifact | None
) -> DSparkDrafter:
    """Return an untrained drafter, or one of the shape of `before`, as `dflash.make_drafter`."""
    if before is not None:
        mask_token_for(before.drafter.shape.mask_token, target, batches)
        shape = shape_before(run, target, before, dspark)
        return DSparkDrafter(shape, target.embedding_and_head)
    mask_token = mask_token_for(run.heads.mask_token, target, batches)
    shape = shape_for(run.heads, target.config, mask_token)
    drafter = DSparkDrafter(shape, target.embedding_and_head)
    start(drafter, target, batches)
    return drafter


def make_objective(run: Run, target: TargetSource, drafter: DSparkDrafter) -> DSparkObjective:
    """Return the run's objective. Raises `UserError` where `dflash.ready` does."""
    ready(run.objective, target, drafter)
    objective = DSparkObjective(run.objective, drafter, target.head, run.seed)
    objective.steps = outline_of(run, drafter).passes
    return objective


class DSparkObjective(BlockObjective):
    """Objective of blocks whose drafts have a confidence."""

    config: DSparkLoss

    def further_loss(
        self, drafter: DSparkDrafter, state: Tensor, alpha: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weighted loss of the confidences `[R, D]`, and the loss itself as a table.

        It is a binary cross-entropy with the overlap `alpha` `[R, D]` as a soft label, which has
        less variance than whether one draft was accepted (docs/objectives.md#confidence).
        """
        confidences = drafter.confidence(state).float()
        # An overlap is a sum of many numbers, and rounding may lift it above 1.
        losses = functional.binary_cross_entropy_with_logits(
            confidences, alpha.clamp(0, 1), reduction="none"
        )
        return self.config.confidence_weight * losses, (losses.detach(),)

    def more_metrics(self, weights: Tensor, *tables: Tensor) -> Sums:
        """Return the sum of the confidences' losses over drafts with weight."""
        return {"confidence_loss": ((tables[0] * weights).sum(), weights.sum())}


@torch.no_grad()
def teacher_forced(drafter: DSparkDrafter, hidden: Hidden, ids: Tensor) -> Tensor:
    """Return `[S, D, 2]`, float: the ranks of `dflash.teacher_forced`, then confidences' logits."""
    outcomes = torch.zeros(len(ids), drafter.drafts, 2, device=ids.device)
    for roots, outputs, before, labels in forced_blocks(drafter, hidden, ids):
        state = drafter.state(outputs, before)
        logits = drafter.logits(state)
        best = logits.topk(min(RANKS, logits.shape[-1])).indices
        outcomes[roots, :, 0] = rank_of(labels, best).float()
        outcomes[roots, :, 1] = drafter.confidence(state).float()
    return outcomes


def accepted_by_root(found: Tensor, calibration: dict[str, Any]) -> list[int]:
    """Return how many drafts of a greedy chain are right at each root.

    `found` `[S, D, 2]` is what `teacher_forced` returns.
    """
    return accepted_in_chains(found[..., 0], calibration)
