"""Training of DSpark drafters (arXiv 2607.05147), which differs from DFlash's in two things.

Each draft also reads the token before it, in training the text's own, and each draft has a
confidence, which learns how much of its distribution the target would accept. Anchors, labels,
teachers and weights are those of `dflash.py`.

Shapes: S positions, R blocks with weight, D drafts of a block, H hidden size, r rank of the
transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ...heads import dspark
from ...heads.dspark import DSparkDrafter
from ...heads.files import JsonObject
from ...inference.targets.causal_model import Hidden
from ..outline import TRAINED, ConfigOnly, Outline, matrix_numbers
from .dflash import BlockObjective, DFlashMethod, forced_blocks
from .ranks import comparable_roots, ranks_in
from .runs import DFlashRun, DSparkLoss, DSparkRun
from .vocabulary import VocabularyMap

BINS = 15  # of equal mass, in which calibration errors are measured
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-24, 25))  # an eighth to eight


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


def scale_sequentially(logits: Tensor, survived: Tensor) -> list[float]:
    """Return temperatures of the confidences' logits by DSpark's sequential temperature scaling.

    `logits` and `survived` are `[R, D]`, a row for each root; `survived` is 1 as long as the greedy
    chain is right. For one draft after another that temperature is chosen at which the product of
    the confidences so far matches best how often chains survive that far (arXiv 2607.05147).
    """
    product, temperatures = torch.ones_like(logits[:, 0]), []
    for depth in range(logits.shape[1]):
        tried = []
        for temperature in TEMPERATURES:
            chances = product * (logits[:, depth] / temperature).sigmoid()
            error = calibration_error(chances, survived[:, depth])
            tried.append((error, abs(temperature - 1), chances, temperature))
        # Of equal errors the temperature nearest to 1 is taken; products are not compared.
        _, _, product, best = min(tried, key=lambda entry: entry[:2])
        temperatures.append(best)
    return temperatures


def calibration_error(chances: Tensor, happened: Tensor) -> float:
    """Return the expected calibration error of `chances` `[R]`, in bins of equal mass.

    `happened` `[R]` is 1 where the event of a chance happened, else 0.
    """
    order = chances.sort(stable=True).indices
    bins = zip(chances[order].chunk(BINS), happened[order].chunk(BINS), strict=True)
    # The sum over a bin is its size times the difference of the two means.
    return sum(abs(float((chance - event).sum())) for chance, event in bins) / len(chances)


class DSparkMethod(DFlashMethod):
    """Training of DSpark drafters."""

    run_class = DSparkRun
    drafter_class = DSparkDrafter
    objective_class = DSparkObjective
    configs = dspark

    def outline(self, run: DFlashRun, target: ConfigOnly) -> Outline:
        """Return DFlash's outline, with the transition's output matrix at every draft."""
        outline = super().outline(run, target)
        drafter = outline.drafter
        assert isinstance(drafter, DSparkDrafter)
        transition = TRAINED * matrix_numbers(drafter.transition_out) * drafter.drafts
        return replace(outline, head_operations=outline.head_operations + transition)

    @torch.no_grad()
    def teacher_forced(self, drafter: DSparkDrafter, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return `[S, D, 2]`, float: ranks as DFlash's, then the confidences' logits."""
        vocabulary = VocabularyMap(drafter)
        outcomes = []
        for outputs, before, labels in forced_blocks(drafter, hidden, ids):
            state = drafter.state(outputs, before)
            ranks = ranks_in(drafter.logits(state), vocabulary.columns(labels))
            outcomes.append(torch.stack([ranks.float(), drafter.confidence(state).float()], -1))
        return torch.cat(outcomes)

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return DFlash's calibration, with temperatures for the confidences."""
        ranks = [(table[..., 0].long(), start) for table, start in outcomes]
        calibration = super().calibrate(ranks, tree_nodes)
        roots = comparable_roots(outcomes)
        if not len(roots):
            return calibration
        # A greedy chain survives to a depth if all drafts up to there have rank 0.
        survived = (roots[..., 0] == 0).int().cumprod(-1).float()
        temperatures = scale_sequentially(roots[..., 1], survived)
        return calibration | {"confidence": {"temperatures": temperatures}}


METHOD = DSparkMethod()
