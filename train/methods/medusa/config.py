"""Configuration of a Medusa run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....distill.settings import Divergence
from ....heads.drafter_configs import MedusaConfig
from ....heads.errors import UserError
from ...config import RunConfig, examples_of


@dataclass
class MedusaLoss:
    """Settings of the heads' loss."""

    loss: Divergence = "kl"
    """Divergence of a head's distribution from the target's: kl, reverse-kl, jsd, tv, lk-alpha,
    lk-hybrid, top-k-kl; from the text's tokens: ce; from both: ce-l1."""
    head_decay: float = 0.8
    """Base of the heads' weights: that of head i is this to the power i, over the sum of all."""
    rows_per_chunk: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if not 0 < self.head_decay <= 1 or self.rows_per_chunk < 1:
            raise UserError(
                "objective.head_decay must lie in (0, 1] and objective.rows_per_chunk be at least 1"
            )


@dataclass
class MedusaRun(RunConfig):
    """Train Medusa heads for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("medusa")

    heads: MedusaConfig = field(default_factory=MedusaConfig)
    objective: MedusaLoss = field(default_factory=MedusaLoss)
