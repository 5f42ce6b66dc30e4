"""Plain decoding: no drafts, so that every round of the decode loop emits one token."""

from __future__ import annotations

from torch import Tensor

from ..proposer import Accepted, Prompts
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape


class PlainDecoding:
    """Proposer without drafts."""

    name = "plain"
    taps: tuple[int, ...] = ()
    static = False
    max_drafted = 0
    weight_bytes = 0
    _shape = TreeShape.chain(0)

    def prefill(self, prompts: Prompts) -> None: ...

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return DraftTree(root[:, None], self._shape)

    def commit(self, accepted: Accepted) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def finish(self) -> None: ...
