"""Training of DSpark drafters (arXiv 2607.05147), which differs from DFlash's in two things.

Each draft also reads the token before it, in training the text's own, and each draft has a
confidence, which learns how much of its distribution the target would accept. Anchors, labels,
teachers and weights are those of DFlash.

Shapes: R blocks with weight, D drafts of a block, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....heads.dflash import BlockShape
from ....heads.dspark import DSparkDrafter
from ....inference.targets.target import TargetSource
from ...outline import TRAINED, MetaTarget, Outline, matrix_numbers
from ..dflash.config import DFlashConfig, DFlashRun
from ..dflash.loss import BlockObjective
from ..dflash.method import DFlashMethod, shape_for
from .config import DSparkConfig, DSparkLoss, DSparkRun

INIT_STD = 0.02  # of the matrices that DFlash does not have


class DSparkObjective(BlockObjective):
    """Objective of blocks whose drafts have a confidence."""

    config: DSparkLoss
    reads_overlaps = True
    further_metrics = ("confidence_loss",)

    def further_loss(
        self, drafter: DSparkDrafter, state: Tensor, alpha: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weighted loss of the confidences `[R, D]`, and the loss itself as a table.

        It is a binary cross-entropy with the overlap `alpha` `[R, D]` as a soft label, which has
        less variance than whether one draft was accepted (docs/objectives.md#confidence).
        """
        assert alpha is not None
        confidences = drafter.confidence(state).float()
        # An overlap is a sum of many numbers, and rounding may lift it above 1.
        losses = functional.binary_cross_entropy_with_logits(
            confidences, alpha.clamp(0, 1), reduction="none"
        )
        return self.config.confidence_weight * losses, (losses.detach(),)


class DSparkMethod(DFlashMethod):
    """Training of DSpark drafters."""

    run_class = DSparkRun
    drafter_class = DSparkDrafter
    objective_class = DSparkObjective

    def shape_for(
        self, config: DFlashConfig, target: TargetSource | MetaTarget, mask_token: int
    ) -> BlockShape:
        assert isinstance(config, DSparkConfig)
        return shape_for(config, target.config, mask_token, config.markov_rank)

    def outline(self, run: DFlashRun, target: MetaTarget) -> Outline:
        """Return DFlash's outline, with the transition's output matrix at every draft."""
        outline = super().outline(run, target)
        drafter = outline.drafter
        assert isinstance(drafter, DSparkDrafter)
        transition = TRAINED * matrix_numbers(drafter.transition_out) * drafter.drafts
        return replace(outline, head_operations=outline.head_operations + transition)

    @torch.no_grad()
    def first_weights(self, drafter: DSparkDrafter, norm_weight: Tensor | None) -> None:
        super().first_weights(drafter, norm_weight)
        for module in (drafter.transition_in, drafter.transition_out, drafter.confidence_head):
            nn.init.normal_(module.weight, std=INIT_STD)
        # A logit near 0: every draft begins with a confidence of about one half.
        nn.init.zeros_(drafter.confidence_head.bias)


METHOD = DSparkMethod()
