"""Medusa at work: every head's best tokens fill one static tree (arXiv 2401.10774), and the same
tree on paper.

Shapes: B batch, N tree nodes with the root, M heads, K ranks kept, S text positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.medusa import MedusaHeads
from ..device import send
from ..proposer import Accepted, Prompts
from ..replay import rank_accuracy, rank_of
from ..sampling import Draws
from ..tree import DraftTree, TreeShape
from ..tree_settings import Ranks, TreeSettings, positive
from .growth import best_first, grow, independent, shape_of_ranks

MAX_RANK = 10
DEFAULT_NODES = 16
DEFAULT_TREE = TreeSettings()


class MedusaProposer:
    """Medusa heads at work: node `(r_1 .. r_d)` of the tree holds the rank-`r_d` token of head
    d - 1, whatever its parent.

    With `nodes` a number instead of rank tuples, the tree follows each context: that many of the
    likeliest paths by the heads' own probabilities.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        heads: MedusaHeads,
        nodes: Sequence[Ranks] | int,
        name: str = "medusa",
        score_temperature: float = 1.0,
    ) -> None:
        """`score_temperature`: of a tree that follows each context (`Draws.rank`)."""
        self.name, self.score_temperature = name, score_temperature
        self._heads = heads
        self._device = next(heads.parameters()).device
        self.shape: TreeShape | None = None
        self.ranks: list[Ranks] | None = None
        if isinstance(nodes, int):
            self.max_drafted, self._levels, self._width = nodes, heads.config.num_heads, MAX_RANK
        else:
            self.ranks = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
            self.shape = shape_of_ranks(nodes)
            self.max_drafted, self._levels = self.shape.drafted, self.shape.levels
            self._width = max((ranks[-1] for ranks in self.ranks), default=0) + 1
            # Place of each node's token among the best `_width` tokens of all heads in a row.
            slots = [(len(ranks) - 1) * self._width + ranks[-1] for ranks in self.ranks]
            self._slots = torch.tensor(slots, dtype=torch.long, device=self._device)
        if self._levels > heads.config.num_heads:
            raise UserError(
                f"a tree of {self._levels} levels needs as many heads; there are "
                f"{heads.config.num_heads}"
            )
        self._width = min(self._width, heads.vocab_size)
        self._state: Tensor  # [B, H]: the target's last hidden state, one position before the root

    def with_tree(
        self, nodes: Sequence[Ranks] | int, score_temperature: float = 1.0
    ) -> MedusaProposer:
        """Return the same heads with another tree."""
        return MedusaProposer(self._heads, nodes, self.name, score_temperature)

    @property
    def heads(self) -> int:
        """Number of heads: how many tokens ahead there are drafts for."""
        return self._heads.config.num_heads

    def prefill(self, prompts: Prompts) -> None:
        rows = torch.arange(len(prompts.lengths), device=prompts.lengths.device)
        self._state = prompts.hidden.last[rows, prompts.lengths - 1]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
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

    `tree` says where it comes from: calibrated (grown from the heads' held-out rank accuracies),
    best-first (in each context from the heads' own probabilities, at the score temperature), or
    chain (each head's best token in a row). None: calibrated, or best-first for imported heads, of
    which no accuracies are known. `settings.shape` gives the tree outright. Raises `UserError`.
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


@torch.no_grad()
def teacher_forced(heads: MedusaHeads, last: Tensor, ids: Tensor) -> Tensor:
    """Teacher-forced ranks `[S, M]`: place of the text's own token among the best of head d when
    the root is at `n`.

    `ids` `[S]`, `last` `[S, H]`. Row n is about the tokens n + 1 .. n + M and reads the feature of
    n - 1, the last one that exists when n is the root. -1 where the token is not among the best
    MAX_RANK, or lies outside the text.
    """
    length, count = ids.shape[0], heads.config.num_heads
    ranks = torch.full((length, count), -1, dtype=torch.long, device=ids.device)
    for d in range(count):
        rows = length - 2 - d  # roots 1 .. length - 2 - d have a token d + 1 places ahead
        if rows <= 0:
            break
        best = heads.logits(last[:rows], d).topk(min(MAX_RANK, heads.vocab_size)).indices
        ranks[1 : 1 + rows, d] = rank_of(ids[2 + d :], best)
    return ranks


def accepted_by_root(ranks: Tensor, calibration: dict[str, Any]) -> list[int]:
    """How many drafts the calibrated tree would get right at each root of a text, from
    `teacher_forced` `[S, M]`.

    Along a path at most one rank a depth is right, so the answer is the longest prefix of the row
    that is a node.
    """
    paths = set(grow(calibration["rank_accuracy"], calibration["tree_nodes"]))
    accepted = []
    for row in ranks.tolist():
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        accepted.append(depth)
    return accepted


def calibrate(texts: Sequence[tuple[Tensor, int]], tree_nodes: int) -> dict[str, Any]:
    """How often the rank-r token of each head is right, over the roots of all texts
    (`teacher_forced`, start of the reply)."""
    accuracy, roots = rank_accuracy(texts, MAX_RANK)
    return {"rank_accuracy": accuracy, "roots": roots, "tree_nodes": tree_nodes}
