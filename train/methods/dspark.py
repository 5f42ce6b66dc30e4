"""How a DSpark drafter learns: as DFlash does, with the text's own token before each draft, and its
confidence beside.

Shapes: B packed rows, S positions, R blocks with weight, D drafts of a block, H hidden size, r rank
of the transition.
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
from ...inference.proposers.dspark import calibrate
from ...inference.target import Hidden, Target
from ..config import RunConfig
from ..data.batches import Batches
from ..objectives import Sums
from ..outline import ConfigOnly, Outline
from . import dflash
from .dflash import (
    REPLAYED,
    BlockLoss,
    BlockObjective,
    forced_blocks,
    outline_of,
    ranks_among_best,
    ready,
    shape_before,
    start,
    writers,
)
from .mask_token import mask_token_for

__all__ = ["REPLAYED", "Run", "accepted_by_root", "calibrate", "features_of", "make_drafter",
"make_objective",
           "outline", "teacher_forced", "writers"]  # fmt: skip


@dataclass
class DSparkLoss(BlockLoss):
    """Loss settings."""

    loss: Divergence = "lk-hybrid"
    """Between the drafter's distribution and the target's, the text's tokens (ce), or both: ce-l1
    is the paper's, for data by the billion tokens. Of little data it learns next to nothing, since
    L1 has no gradient where the two hardly overlap."""
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


def features_of(run: Run, target: Target) -> tuple[tuple[int, ...], bool]:
    """Taps that the run reads, and whether it reads the last state everywhere; see `Objective`."""
    return shape_for(run.heads, target.config, run.heads.mask_token or 0).taps, False


def outline(run: Run, target: ConfigOnly) -> Outline:
    """See `Outline`."""
    return outline_of(
        run,
        DSparkDrafter(
            shape_for(run.heads, target.config, run.heads.mask_token or 0),
            target.embedding_and_head,
        ),
    )


def make_drafter(
    run: Run, target: Target, batches: Batches, before: Artifact | None
) -> DSparkDrafter:
    """As `dflash.make_drafter`."""
    if before is not None:
        return DSparkDrafter(
            shape_before(run, target, batches, before, dspark), target.embedding_and_head
        )
    mask_token = mask_token_for(run.heads.mask_token, target, batches)
    drafter = DSparkDrafter(
        shape_for(run.heads, target.config, mask_token), target.embedding_and_head
    )
    start(drafter, target, batches)
    return drafter


def make_objective(run: Run, target: Target, drafter: DSparkDrafter) -> DSparkObjective:
    ready(run.objective, target, drafter)
    objective = DSparkObjective(run.objective, drafter, target.head, run.seed)
    objective.steps = outline_of(run, drafter).passes
    return objective


class DSparkObjective(BlockObjective):
    """Blocks with a confidence for each draft, which learns how much of its distribution the target
    would accept."""

    config: DSparkLoss

    def further_loss(
        self, drafter: DSparkDrafter, state: Tensor, alpha: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Binary cross-entropy with a soft label: of less variance than accepted or not
        (objectives.md section 8)."""
        said = drafter.confidence(state).float()
        surprise = functional.binary_cross_entropy_with_logits(
            said, alpha.clamp(0, 1), reduction="none"
        )
        return self.config.confidence_weight * surprise, (surprise.detach(),)

    def more_metrics(self, weights: Tensor, *tables: Tensor) -> Sums:
        return {"confidence_loss": ((tables[0] * weights).sum(), weights.sum())}


@torch.no_grad()
def teacher_forced(drafter: DSparkDrafter, hidden: Hidden, ids: Tensor) -> Tensor:
    """As `dflash.teacher_forced`, with the confidences' logits beside the ranks: `[S, D, 2]`,
    float."""
    found = torch.zeros(len(ids), drafter.drafts, 2, device=ids.device)
    for rows, outputs, before, coming in forced_blocks(drafter, hidden, ids):
        state = drafter.state(outputs, before)
        found[rows, :, 0] = ranks_among_best(drafter.logits(state), coming).float()
        found[rows, :, 1] = drafter.confidence(state).float()
    return found


def accepted_by_root(found: Tensor, calibration: dict[str, Any]) -> list[int]:
    """How many drafts of a greedy chain are right at each root, from `teacher_forced` `[S, D,
    2]`."""
    return dflash.accepted_by_root(found[..., 0], calibration)
