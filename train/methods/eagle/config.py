"""Configuration of an EAGLE run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ....heads.drafter_configs import EagleConfig
from ....heads.errors import UserError
from ...config import Optim, RunConfig, examples_of
from ...losses.settings import MUON, UnrolledLoss

EAGLE_DEFAULTS = {
    1: {"steps": 1, "feature_weight": 1.0, "token_weight": 0.1},
    3: {"steps": 7, "feature_weight": 0.0, "token_weight": 1.0},
}
"""Values of those settings of `EagleLoss` that are None, by the version of EAGLE."""


@dataclass
class EagleLoss(UnrolledLoss):
    """Settings of an EAGLE drafter's loss."""

    feature_weight: float | None = None
    """Weight of SmoothL1 between the drafter's state, taken before a final norm of its own, and the
    target's next feature; if not given, 1 for version 1, 0 for version 3. With little data it helps
    version 3 too, together with token_weight 0.1 and freeze_head."""
    token_weight: float | None = None
    """Weight of `loss`; if not given, 0.1 for version 1, 1 for version 3."""
    freeze_head: bool = False
    """Version 3: keep the head as it begins, the target's own; with feature_weight the final norm
    too, since features are compared in its scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.feature_weight or 0, self.token_weight or 0) < 0:
            raise UserError("objective.feature_weight and token_weight must not be negative")

    @property
    def term_weights(self) -> tuple[float, float]:
        return self.feature_weight or 0.0, self.token_weight or 0.0

    def resolved(self, version: int) -> EagleLoss:
        """Return these settings with the defaults of an EAGLE version filled in."""
        defaults = EAGLE_DEFAULTS[version]
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass
class EagleRun(RunConfig):
    """Train an EAGLE drafter for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("eagle")

    heads: EagleConfig = field(default_factory=EagleConfig)
    objective: EagleLoss = field(default_factory=EagleLoss)
    # docs/results.md#parts-of-an-eagle-3-recipe: with the norms of `heads`, twice AdamW's tau.
    optim: Optim = field(default_factory=MUON)
