"""Configuration of a DSpark run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ....distill.settings import Divergence
from ....heads.errors import UserError
from ...config import examples_of
from ..dflash.config import BlockLoss, DFlashConfig, DFlashRun


@dataclass
class DSparkConfig(DFlashConfig):
    """Options of a DSpark drafter."""

    block_size: int = 7
    """Number of slots of a block, and of drafts per round: the anchor's slot drafts too."""
    markov_rank: int = 256
    """Rank of the transition bias, which has two matrices of vocabulary times rank numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise UserError(
                f"heads.markov_rank must be at least 1, not {self.markov_rank}; train dflash to "
                "have none"
            )


@dataclass
class DSparkLoss(BlockLoss):
    """Settings of a DSpark drafter's loss."""

    loss: Divergence = "kl"
    """Divergence of the drafter's distribution from the text's tokens (ce), the target's
    distribution, or both: ce-l1 is the paper's, for billions of tokens. From little data it learns
    less, since L1 has hardly any gradient where the distributions hardly overlap."""
    weighting: Literal["decay", "survival", "d-pace"] = "decay"
    confidence_weight: float = 1.0
    """Weight of the cross-entropy between each draft's confidence and the overlap of its
    distribution with the target's."""

    def __post_init__(self) -> None:
        if self.confidence_weight < 0:
            raise UserError("objective.confidence_weight must not be negative")
        super().__post_init__()


@dataclass
class DSparkRun(DFlashRun):
    """Train a DSpark drafter for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("dspark")

    heads: DSparkConfig = field(default_factory=DSparkConfig)
    objective: DSparkLoss = field(default_factory=DSparkLoss)
