"""Configs of runs, one for each method: options of the drafter and of its loss.

Nothing here imports torch, so that a help text or a mistyped option is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from ...distill.settings import NEEDS_LABELS, Divergence, DraftModelConfig
from ...heads.drafter_configs import (
    DFlashConfig,
    DSparkConfig,
    EagleConfig,
    MedusaConfig,
    MtpConfig,
)
from ...heads.errors import UserError
from ..config import Memory, Optim, Rollouts, RunConfig, examples_of

MUON = partial(Optim, "muon", schedule="wsd", decay_share=0.3)
"""Default optimiser and schedule of the methods that were measured to be better with them."""


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


EAGLE_DEFAULTS = {
    1: {"steps": 1, "feature_weight": 1.0, "token_weight": 0.1},
    3: {"steps": 7, "feature_weight": 0.0, "token_weight": 1.0},
}
"""Values of those settings of `EagleLoss` that are None, by the version of EAGLE."""


@dataclass
class UnrolledLoss(Memory):
    """Settings of the loss of a drafter that is trained over its own states."""

    loss: Divergence = "kl"
    """Divergence of the drafter's distribution from the target's, or from the text's tokens (ce;
    ce-l1: both)."""
    steps: int | None = None
    """Unrolled steps; if not given, 7 for EAGLE-3, 1 for EAGLE-1, 3 for an MTP layer."""
    decay: float = 0.8
    """Base of the steps' weights: that of step k is this to the power k, over the sum of all."""
    rows_per_chunk: int = 128
    """Teacher positions whose logits exist at one time, each for all steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise UserError("objective.steps must be at least 1")
        if not 0 < self.decay <= 1:
            raise UserError("objective.decay must lie in (0, 1]")


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


MTP_STEPS = 3
"""Value of `MtpLoss.steps` where it is None."""


@dataclass
class MtpLoss(UnrolledLoss):
    """Settings of the loss of an MTP layer."""

    trained: Literal["all", "norms"] = "all"
    """Parameters that are trained: all of the layer, or its norms alone."""
    # What EAGLE drafters have as options.
    feature_weight: ClassVar[float] = 0.0
    token_weight: ClassVar[float] = 1.0

    def resolved(self) -> MtpLoss:
        """Return these settings with the defaults filled in."""
        return replace(self, steps=MTP_STEPS if self.steps is None else self.steps)


@dataclass
class MtpRun(RunConfig):
    """Train the MTP layer of a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("mtp")

    heads: MtpConfig = field(default_factory=MtpConfig)
    objective: MtpLoss = field(default_factory=MtpLoss)


@dataclass
class BlockLoss(Memory):
    """Settings of a block drafter's loss."""

    loss: Divergence = "ce"
    """Divergence of the drafter's distribution from the text's tokens (ce) or the target's
    distribution (the others; ce-l1: both)."""
    weighting: Literal["decay", "survival", "d-pace"] = "d-pace"
    """Weights of a block's drafts. decay: exp(-(d - 1) / gamma) for draft d. survival: the accepted
    drafts that a better draft d would earn, by the overlaps (with lk-alpha this is end-to-end TV).
    d-pace: the same by the smoothed probabilities of the labels (D-PACE, for ce)."""
    gamma: float | None = None
    """Length of weighting decay; half the block if not given (the paper: 7, 5, 4 for blocks of 16,
    10, 8)."""
    anchors: int = 512
    """Blocks in a packed row, at roots drawn again each time that the row is seen. Rows with fewer
    roots leave some over."""
    rows_per_chunk: int = 16
    """Blocks whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise UserError("objective.anchors must be at least 1")
        if self.gamma is not None and self.gamma <= 0:
            raise UserError("objective.gamma must be above 0")
        if self.gamma is not None and self.weighting != "decay":
            raise UserError(
                f"objective.gamma is of weighting decay, not {self.weighting}; set it to null"
            )
        if self.weighting == "d-pace" and self.loss != "ce":
            raise UserError(
                f"d-pace weighs ce, not {self.loss}; give objective.weighting decay or survival "
                "with it"
            )
        super().__post_init__()


@dataclass
class DFlashRun(RunConfig):
    """Train a DFlash drafter for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("dflash")

    heads: DFlashConfig = field(default_factory=DFlashConfig)
    objective: BlockLoss = field(default_factory=BlockLoss)
    # docs/results.md#parts-of-a-dspark-recipe: with AdamW a DSpark's tau is lower by 21% to 28%.
    optim: Optim = field(default_factory=MUON)


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
