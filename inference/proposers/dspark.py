"""Proposer of DSpark: a block's drafts are chosen in turn, each with a bias from the one before.

The confidence in a draft is known before the draft is chosen. So a cut depends on earlier drafts
alone, and every acceptance rule stays lossless (docs/verification.md#non-anticipation).

Shapes: B rows of a batch, D drafts, M nodes of a level, R rows of a table, H hidden size, V
vocabulary, S positions of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.dspark import DSparkDrafter
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape, named
from ..tree_settings import TREE_SETTINGS, TreeSettings
from . import dflash
from .dflash import DFlashProposer, settings_for
from .growth import Continue, Level
from .tree_plan import DEFAULT_TREE, cut, grow_chain

DEFAULT_WIDTH = 8
KIND = replace(dflash.KIND, module="dspark", tree=TREE_SETTINGS)


class DSparkProposer(DFlashProposer):
    """Proposer of a DSpark drafter; `threshold` cuts chains by confidence, each row by itself.

    Trees are EAGLE-2's, over the block's distributions with each node's own transition bias.
    """

    drafter: DSparkDrafter

    def __init__(
        self,
        drafter: DSparkDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        slots: int | None = None,
        temperatures: Sequence[float] = (),
    ) -> None:
        """Put a drafter to work. Raises `UserError` for more drafts or slots than a block has.

        `temperatures` divide the logits of the confidences, draft by draft (`calibrate`); drafts
        past the last of them have 1. `slots` are as in `DFlashProposer`.
        """
        super().__init__(drafter, settings, slots)
        self._temperatures = torch.tensor(
            # A drafter that was calibrated with shorter chains has fewer temperatures than drafts.
            [*temperatures, *[1.0] * (drafter.drafts - len(temperatures))],
            device=self._device,
        )

    def _draft(self, outputs: Tensor, root: Tensor, draws: Draws) -> DraftTree:
        # A chain without a threshold, or a tree. Only chains have thresholds (`TreePlan`), so below
        # the whole chain is drafted and then cut, which costs no further pass over the layers.
        if not self.plan.threshold:
            return super()._draft(outputs, root, draws)
        ids = self._columns(draws)
        first, go_on = self._logits(outputs, root, ids)
        chain = TreeShape.chain(self.plan.length)
        tree = named(grow_chain(first, root, draws, go_on, chain), root, ids)
        sure = self._confidence(outputs, tree.tokens).cumprod(-1) >= self.plan.threshold
        return cut(tree, sure, draws.running)

    def _logits(self, outputs: Tensor, root: Tensor, ids: Tensor | None) -> tuple[Tensor, Continue]:
        drafter = self.drafter
        base = drafter.base_logits(outputs)

        # Depths count from 1, so `base[:, depth]` is the slot after that of the level's own drafts.
        # A missing node (-1) takes the bias of token 0, since nothing is drafted below it.
        def go_on(level: Level) -> Tensor:
            tokens = level.tokens.clamp(min=0)
            bias = drafter.transition(tokens if ids is None else ids[tokens])
            return self._named(base[:, level.depth, None] + bias, ids)

        return self._named(base[:, 0] + drafter.transition(root), ids), go_on

    def _confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor:
        """Return the calibrated confidence `[B, D]` in each draft, from the token before it."""
        # tokens[:, :-1] begins with the root: column d holds the token before draft d + 1.
        logits = self.drafter.confidence(self.drafter.state(outputs, tokens[:, :-1].clamp(min=0)))
        # A plan may use fewer drafts than the block has.
        return (logits.float() / self._temperatures[: logits.shape[1]]).sigmoid()


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, slots: int | None = None
) -> DSparkProposer:
    """Return the proposer of a drafter from disk, with a dynamic tree; `width` 1 makes a chain.

    With a `threshold` above 0 a chain ends before the draft at which the product of its calibrated
    confidences falls below it. Settings that are None are as the drafter was evaluated in training.
    `slots` are as in `DFlashProposer`. Raises `UserError`.
    """
    tree = settings_for(artifact, settings, slots)
    if settings.width is None and tree.width is not None:
        tree = replace(tree, width=min(tree.width, DEFAULT_WIDTH))
    temperatures = artifact.calibration.get("confidence", {}).get("temperatures", ())
    return DSparkProposer(artifact.drafter, tree, slots, temperatures)
