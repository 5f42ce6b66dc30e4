"""Plain decoding: no drafts, so that every round of the decode loop emits one token."""

from __future__ import annotations

from torch import Tensor

from ..proposer import Proposer
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape
from ..targets.causal_model import CausalModel


class PlainDecoding(Proposer):
    """Proposer without drafts."""

    name = "plain"
    max_drafted = 0
    traceable = True
    _shape = TreeShape.chain(0)

    def owner_of_rounds(self, target: CausalModel) -> CausalModel:
        return target  # there is nothing of its own in a round

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return DraftTree(root[:, None], self._shape)
