"""DSpark at work: a block's drafts are chosen in turn, each with the bias of the one before, for as
long as it is confident.

How sure the drafter is of a draft is known before the draft is chosen, so what is cut depends on
earlier drafts alone, and every acceptance rule stays lossless
(docs/verification.md#non-anticipation).

Shapes: B batch, D drafts, M nodes of a level, H hidden size, V vocabulary, S text positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.dspark import DSparkDrafter
from ..tree_settings import TreeSettings
from . import dflash
from .dflash import DEFAULT_TREE, DFlashProposer, tree_of
from .growth import Continue, Level

DEFAULT_WIDTH = 8
BINS = 15
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-24, 25))  # an eighth to eight


class DSparkProposer(DFlashProposer):
    """DSpark drafter at work; `threshold` cuts chains by confidence, each row by itself.

    Trees are EAGLE-2's, over the block's distributions with each node's own transition bias.
    """

    _drafter: DSparkDrafter

    def __init__(
        self,
        drafter: DSparkDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        slots: int | None = None,
        name: str = "dspark",
        temperatures: Sequence[float] = (),
    ) -> None:
        """`temperatures`: divisors of the confidences' logits, draft by draft (`calibrate`)."""
        super().__init__(drafter, settings, slots, name)
        self._temperatures = torch.tensor(
            [*temperatures, *[1.0] * (drafter.drafts - len(temperatures))], device=self._device
        )

    def _logits(self, outputs: Tensor, root: Tensor) -> tuple[Tensor, Continue]:
        drafter = self._drafter
        base = drafter.base_logits(outputs)

        def go_on(level: Level) -> Tensor:
            return base[:, level.depth, None] + drafter.transition(level.tokens.clamp(min=0))

        return base[:, 0] + drafter.transition(root), go_on

    def _confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor:
        """The confidence head's word on every draft, before it is chosen."""
        said = self._drafter.confidence(self._drafter.state(outputs, tokens[:, :-1].clamp(min=0)))
        return (said.float() / self._temperatures[: said.shape[1]]).sigmoid()


def make_proposer(
    artifact: Artifact,
    settings: TreeSettings = DEFAULT_TREE,
    slots: int | None = None,
    name: str | None = None,
) -> DSparkProposer:
    """Return the drafter from disk at work, with a dynamic tree, or with a chain if `width` is 1.
    Above `threshold` 0 a chain ends once the calibrated chance that all its drafts are right is
    below it.

    Settings that are None are as the drafter was evaluated in training. `slots`: see
    `DFlashProposer`.
    """
    tree = tree_of(artifact, settings, slots)
    if settings.width is None and tree.width is not None:
        tree = replace(tree, width=min(tree.width, DEFAULT_WIDTH))
    temperatures = artifact.calibration.get("confidence", {}).get("temperatures", ())
    return DSparkProposer(artifact.drafter, tree, slots, name or "dspark", temperatures)


def calibrate(texts: Sequence[tuple[Tensor, int]], tree_nodes: int) -> dict[str, Any]:
    """As `dflash.calibrate`, with temperatures for the confidences.

    `texts`: ranks and confidence logits of each draft `[S, D, 2]`, and the start of the reply.
    """
    known = dflash.calibrate([(found[..., 0].long(), start) for found, start in texts], tree_nodes)
    depths = texts[0][0].shape[1]
    rows = torch.cat([found[start : max(len(found) - depths, start)] for found, start in texts])
    if not len(rows):
        return known
    survived = (rows[..., 0] == 0).int().cumprod(-1).float()
    return known | {"confidence": scale_sequentially(rows[..., 1], survived)}


def scale_sequentially(logits: Tensor, survived: Tensor) -> dict[str, list[float]]:
    """Sequential temperature scaling (DSpark, arXiv 2607.05147): for one draft after another, the
    temperature of its logit at which the product of the confidences so far tells best how often
    chains survive that far. Both `[R, D]`.

    Greedy survival, so it is for T = 0. Also returns the calibration errors before and after.
    """
    raw, sure = logits.sigmoid().cumprod(-1), torch.ones_like(logits[:, 0])
    temperatures, before, after = [], [], []
    for depth in range(logits.shape[1]):
        tried = [(sure * (logits[:, depth] / t).sigmoid(), t) for t in TEMPERATURES]
        errors = [
            (calibration_error(found, survived[:, depth]), abs(t - 1), found, t)
            for found, t in tried
        ]
        error, _, sure, best = min(errors, key=lambda entry: entry[:2])
        temperatures.append(best)
        before.append(calibration_error(raw[:, depth], survived[:, depth]))
        after.append(error)
    return {"temperatures": temperatures, "error_before": before, "error": after}


def calibration_error(chances: Tensor, happened: Tensor) -> float:
    """Expected calibration error of `chances` `[R]` against what `happened` `[R]` (0 or 1), in bins
    of equal mass."""
    order = chances.sort(stable=True).indices
    bins = zip(chances[order].chunk(BINS), happened[order].chunk(BINS), strict=True)
    return sum(abs(float((said - did).sum())) for said, did in bins) / len(chances)
