"""Proposer of Medusa heads (arXiv 2401.10774): the best tokens of every head fill one tree.

Shapes: B rows of a batch, D heads, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.medusa import MedusaHeads
from ...heads.vocabulary import to_target
from ..base.tree_settings import TREE_SETTINGS, TreeSettings, positive
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree
from .growth import Slots
from .kind import Kind
from .tree_plan import DEFAULT_NODES, DEFAULT_TREE, NewestStateProposer, TreePlan, grow, tree_of

DEFAULT_WIDTH = 10  # best tokens of a head that are candidates of a best-first tree


class MedusaProposer(NewestStateProposer[MedusaHeads]):
    """Proposer of trees of the heads' tokens; a node's token does not depend on its parent."""

    def __init__(self, heads: MedusaHeads, settings: TreeSettings = DEFAULT_TREE) -> None:
        """Take trained heads. Raises `UserError` for more levels than there are heads."""
        self.name = self.kind = heads.kind
        self.drafter, self.longest = heads, heads.config.num_heads
        self.replan(TreePlan(settings.or_else(length=self.longest, width=DEFAULT_WIDTH)))
        if self.plan.length > self.longest:
            raise UserError(
                f"a tree of {self.plan.length} levels needs as many heads; there are {self.longest}"
            )
        self._draft_vocab_ids = heads.draft_vocab_ids
        if heads.borrows_head:
            # The target's rows are taken now: a compiled function finds no module that changes.
            _ = heads.borrowed_head

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the tree below `root` `[B]`, filled with the heads' best tokens."""
        heads = range(self.plan.length)
        # [B, D, Vd]
        logits = torch.stack([self.drafter.logits(self.newest, head) for head in heads], dim=1)
        # [B, D, V]
        logits = to_target(logits, self._draft_vocab_ids, self.drafter.vocab_size)
        return self.plan.draft(logits[:, 0], root, draws, Slots(logits))[0]


def make_proposer(artifact: Artifact, settings: TreeSettings = DEFAULT_TREE) -> MedusaProposer:
    """Return the proposer of heads from disk.

    Without a `width` the tree is fixed: that of `nodes` nodes and the greatest expected acceptance
    by the heads' held-out rank accuracies. With a `width`, and for imported heads, of which no
    accuracies are known, it is a best-first tree in each context; `width` 1 makes a chain. Raises
    `UserError`.
    """
    known, heads = artifact.calibration, artifact.drafter
    table = known.get("rank_accuracy")
    if table and settings.shape is None and settings.width is None:
        size = settings.or_else(nodes=known.get("tree_nodes", DEFAULT_NODES), length=len(table))
        best = grow(table[: positive("length", size.length)], positive("nodes", size.nodes))
        settings = replace(settings, shape=best or [(0,)])  # heads may never have been right
    settings = tree_of(settings.or_else(width=DEFAULT_WIDTH), known, heads.config.num_heads)
    return MedusaProposer(heads, settings)


KIND = Kind(make_proposer, tree=TREE_SETTINGS, lookups=True)
