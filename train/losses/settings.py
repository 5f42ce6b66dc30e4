"""Settings of losses that several methods share; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...distill.settings import Divergence
from ...heads.errors import UserError
from ..config import Memory, Optim

MUON = partial(Optim, "muon", schedule="wsd", decay_share=0.3)
"""Default optimiser and schedule of the methods that were measured to be better with them."""


def check_positive(config: object, *names: str) -> None:
    """Raise `UserError` for the first of the options `names` that is given and below 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise UserError(f"heads.{name} must be at least 1, not {value}")


@dataclass
class UnrolledLoss(Memory):
    """Settings of the loss of a drafter that is trained over its own states."""

    loss: Divergence = "kl"
    """Divergence of the drafter's distribution from the target's, or from the text's tokens (ce;
    ce-l1: both)."""
    steps: int | None = None
    """Unrolled steps; if not given, 7 for EAGLE-3, 1 for EAGLE-1, 3 for an MTP layer."""
    decay: float = 0.8
    """Decay of the loss over the unrolled steps: step k has weight decay^k, normalised so that the
    weights sum to 1."""
    rows_per_chunk: int = 128
    """Teacher positions whose logits exist at one time, each for all steps."""

    @property
    def term_weights(self) -> tuple[float, float]:
        """Weights of the feature loss and of `loss`, of resolved settings."""
        return 0.0, 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise UserError("objective.steps must be at least 1")
        if not 0 < self.decay <= 1:
            raise UserError("objective.decay must lie in (0, 1]")
