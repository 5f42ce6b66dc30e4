"""Medusa heads at work (arXiv 2401.10774): the best tokens of every head fill one tree.

The module also computes, from teacher-forced ranks, what such a tree accepts at each root of a
known text.

Shapes: B rows of a batch, D heads, S positions of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.medusa import MedusaHeads
from ..proposer import Accepted, Prompts
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape
from ..targets.causal_model import bytes_of
from ..targets.packed import packed_bytes
from ..tree_settings import Ranks, TreeSettings, positive
from .growth import best_first, grow, independent, shape_of_ranks

MAX_RANK = 10  # best tokens of a head that are candidates
DEFAULT_NODES = 16
DEFAULT_TREE = TreeSettings()


class MedusaProposer:
    """Proposer of a tree whose node `(r_1 .. r_d)` holds the rank-`r_d` token of head d - 1.

    A node's token does not depend on its parent. `nodes` are the tree's rank tuples, or a number:
    then the tree has that many of the likeliest paths in each context, by the heads' own
    probabilities.
    """

    taps: tuple[int, ...] = ()
    static = True

    def __init__(
        self,
        heads: MedusaHeads,
        nodes: Sequence[Ranks] | int,
        name: str = "medusa",
        score_temperature: float = 1.0,
    ) -> None:
        """Take trained heads and a tree. Raises `UserError` for more levels than there are heads.

        `score_temperature` is that of the scores of a tree that differs between contexts
        (`Draws.rank`).
        """
        self.name, self.score_temperature = name, score_temperature
        self._heads = heads
        # Packed matrices are no parameters, and lie on a CPU.
        self._device = next((p.device for p in heads.parameters()), torch.device("cpu"))
        self.shape: TreeShape | None = None
        self.ranks: list[Ranks] | None = None
        if isinstance(nodes, int):
            self.max_drafted, self._levels, self._width = nodes, heads.config.num_heads, MAX_RANK
        else:
            self.ranks = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
            self.shape = shape_of_ranks(nodes)
            self.max_drafted, self._levels = self.shape.drafted, self.shape.levels
            # Ranks count from 0, hence the 1. The default is for a tree of the root alone.
            self._width = max((ranks[-1] for ranks in self.ranks), default=0) + 1
            # The best `_width` tokens of all heads stand in one row; these are the nodes' indices.
            # Example: with 3 tokens of each head, node (1, 0) is the best one of head 1: index 3.
            slots = []
            for ranks in self.ranks:
                head = len(ranks) - 1
                slots.append(head * self._width + ranks[-1])
            self._slots = torch.tensor(slots, dtype=torch.long, device=self._device)
        if self._levels > heads.config.num_heads:
            raise UserError(
                f"a tree of {self._levels} levels needs as many heads; there are "
                f"{heads.config.num_heads}"
            )
        # `Draws.rank` returns no more tokens than there are.
        self._width = min(self._width, heads.vocab_size)
        # [B, H]: last hidden state one position before the root, the newest that there is
        self._state: Tensor

    def with_tree(
        self, nodes: Sequence[Ranks] | int, score_temperature: float = 1.0
    ) -> MedusaProposer:
        """Return the same heads with another tree."""
        return MedusaProposer(self._heads, nodes, self.name, score_temperature)

    @property
    def drafter(self) -> MedusaHeads:
        """The heads themselves, which say what they are."""
        return self._heads

    @property
    def weight_bytes(self) -> int:
        """See `Proposer.weight_bytes`."""
        return bytes_of(self._heads) + packed_bytes(self._heads)

    @property
    def heads(self) -> int:
        """Number of heads, which is the largest depth of a draft."""
        return self._heads.config.num_heads

    def prefill(self, prompts: Prompts) -> None:
        rows = torch.arange(len(prompts.lengths), device=prompts.lengths.device)
        # The last position of each prompt, behind which padding may stand. The root comes after it,
        # and the target has not run it.
        self._state = prompts.hidden.last[rows, prompts.lengths - 1]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the tree below `root` `[B]`, filled with the heads' best tokens."""
        if not self.max_drafted:
            return DraftTree(root[:, None], TreeShape.chain(0))

        def logits(head: int) -> Tensor:
            return self._heads.logits(self._state, head)

        tokens, scores = independent(
            logits, self._levels, root, draws, self._width, self.score_temperature
        )
        if self.shape is None:
            return best_first(tokens, scores, root, self.max_drafted)
        drafted = tokens.flatten(1)[:, self._slots]
        return DraftTree(torch.cat([root[:, None], drafted], dim=-1), self.shape)

    def commit(self, accepted: Accepted) -> None:
        rows = torch.arange(len(accepted.counts), device=accepted.counts.device)
        # `hidden` begins with the old root and ends with the last accepted draft: the position
        # before the new root.
        self._state = accepted.hidden.last[rows, accepted.counts - 1]

    def keep(self, rows: list[int]) -> None:
        self._state = self._state[send(rows, self._state.device)]

    def finish(self) -> None: ...


def make_proposer(
    artifact: Artifact,
    settings: TreeSettings = DEFAULT_TREE,
    tree: str | None = None,
    name: str | None = None,
) -> MedusaProposer:
    """Return heads from disk at work, with a tree of `settings.nodes` nodes.

    `tree` is one of: calibrated (grown from the heads' held-out rank accuracies), best-first (in
    each context from the heads' own probabilities, at the score temperature), or chain (each head's
    best token in a row). None is calibrated, or best-first for imported heads, of which no
    accuracies are known. `settings.shape` gives the tree itself. Raises `UserError`.
    """
    name = name or artifact.method
    heads = artifact.drafter
    if settings.shape is not None:
        return MedusaProposer(heads, [tuple(map(int, ranks)) for ranks in settings.shape], name)
    table = artifact.calibration.get("rank_accuracy")
    tree = tree or ("calibrated" if table else "best-first")
    if tree == "calibrated" and not table:
        raise UserError(
            f"drafter {name} has no held-out accuracies to grow a tree from; give "
            "tree=best-first, or train it on"
        )
    nodes = settings.nodes
    if nodes is None:
        nodes = artifact.calibration.get("tree_nodes", DEFAULT_NODES)
        if tree == "chain":
            nodes = heads.config.num_heads
    positive("nodes", nodes)
    if tree == "chain":
        return MedusaProposer(heads, [(0,) * depth for depth in range(1, nodes + 1)], name)
    if tree not in ("calibrated", "best-first"):
        raise UserError(
            f"drafter {name}: tree must be calibrated, best-first or chain, not {tree!r}"
        )
    chosen = grow(table or [], nodes) if tree == "calibrated" else nodes
    return MedusaProposer(heads, chosen, name, settings.score_temperature)
