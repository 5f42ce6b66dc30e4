"""Proposer of DSpark: a block's drafts are chosen in turn, each with a bias from the one before.

Shapes: B rows of a batch, D drafts, M nodes of a level, R rows of a table, H hidden size, V
vocabulary, S positions of a text.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.dspark import DSparkDrafter
from ..base.tree_settings import TreeSettings
from . import dflash
from .dflash import DFlashProposer, settings_for
from .growth import Continue, Level
from .tree_plan import DEFAULT_TREE

DEFAULT_WIDTH = 8


class DSparkProposer(DFlashProposer):
    """Proposer of a DSpark drafter.

    Trees are EAGLE-2's, over the block's distributions with each node's own transition bias.
    """

    def _logits(self, outputs: Tensor, root: Tensor, ids: Tensor | None) -> tuple[Tensor, Continue]:
        drafter = self.drafter
        assert isinstance(drafter, DSparkDrafter)
        base = drafter.base_logits(outputs)

        # Depths count from 1, so `base[:, depth]` is the slot after that of the level's own drafts.
        # A missing node (-1) takes the bias of token 0, since nothing is drafted below it.
        def go_on(level: Level) -> Tensor:
            tokens = level.tokens.clamp(min=0)
            bias = drafter.transition(tokens if ids is None else ids[tokens])
            return self._named(base[:, level.depth, None] + bias, ids)

        return self._named(base[:, 0] + drafter.transition(root), ids), go_on


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, slots: int | None = None
) -> DSparkProposer:
    """Return the proposer of a drafter from disk, with a dynamic tree; `width` 1 makes a chain.

    Settings that are None are as the drafter was evaluated in training. `slots` are as in
    `DFlashProposer`. Raises `UserError`.
    """
    tree = settings_for(artifact, settings, slots)
    if settings.width is None and tree.width is not None:
        tree = replace(tree, width=min(tree.width, DEFAULT_WIDTH))
    return DSparkProposer(artifact.drafter, tree, slots)


KIND = replace(dflash.KIND, make=make_proposer)
