"""Configuration of a run that distils a draft model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....distill.settings import NEEDS_LABELS, Divergence, DraftModelConfig
from ....heads.errors import UserError
from ...config import Memory, RunConfig, examples_of
from ...data.config import Rollouts


@dataclass
class DistillLoss(Memory):
    """Settings of a draft model's loss."""

    loss: Divergence = "kl"
    """Divergence of the draft model's distribution from the target's; ce learns the text's tokens:
    sequence-level distillation if the target wrote them, plain language modelling if not."""


@dataclass
class DistillRun(RunConfig):
    """Distil a draft model from a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("distill")

    draft_model: DraftModelConfig = field(default_factory=DraftModelConfig)
    objective: DistillLoss = field(default_factory=DistillLoss)
    rollouts: Rollouts = field(default_factory=Rollouts)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Labels of rollouts are tokens that the draft model wrote, not the target.
        if self.objective.loss in NEEDS_LABELS and self.rollouts.share:
            raise UserError(
                f"objective.loss {self.objective.loss} would teach the draft model its own words; "
                "use kl with rollouts.share"
            )
