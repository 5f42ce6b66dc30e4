"""Medusa at work: every head's best tokens fill one static tree (arXiv 2401.10774), and the same tree on paper.

Shapes: B batch, N tree nodes with the root, M heads, K ranks kept, S text positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..heads.medusa import MedusaHeads
from .target import Hidden
from .tree import DraftTree, Ranks, grow, shape_of_ranks

MAX_RANK = 10
DEFAULT_NODES = 16


class MedusaProposer:
    """Node `(r_1 .. r_d)` of the tree holds the rank-`r_d` token of head d - 1, whatever its parent."""

    taps: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, nodes: Sequence[Ranks], name: str = "medusa") -> None:
        self.name = name
        self._heads = heads
        self.shape = shape_of_ranks(nodes)
        self.max_drafted = self.shape.drafted
        if self.shape.levels > heads.config.num_heads:
            raise UserError(f"a tree of {self.shape.levels} levels needs as many heads; there are {heads.config.num_heads}")
        ordered = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
        self._width = max((ranks[-1] for ranks in ordered), default=0) + 1
        device = next(heads.parameters()).device
        self._slots = torch.tensor([(len(r) - 1) * self._width + r[-1] for r in ordered], dtype=torch.long, device=device)
        self._state: Tensor | None = None

    def prefill(self, ids: Tensor, hidden: Hidden) -> None:
        self._state = hidden.last[:, -1]

    def propose(self, root: Tensor) -> DraftTree:
        assert self._state is not None, "prefill first"
        if not self.shape.drafted:
            return DraftTree(self.shape, root[:, None])
        levels = range(self.shape.levels)
        best = [self._heads.logits(self._state, head).topk(self._width).indices for head in levels]
        candidates = torch.cat(best, dim=-1)  # [B, levels * width]
        return DraftTree(self.shape, torch.cat([root[:, None], candidates[:, self._slots]], dim=-1))

    def commit(self, ids: Tensor, hidden: Hidden) -> None:
        self._state = hidden.last[:, -1]


def make_proposer(artifact: Artifact, name: str, tree_nodes: int | None = None) -> MedusaProposer:
    """Heads from disk with the tree that fits them: grown from their held-out rank accuracies to `tree_nodes` nodes."""
    table = artifact.calibration.get("rank_accuracy")
    if not table:
        raise UserError(f"drafter {name} has no calibration; train or save it again with held-out data")
    count = tree_nodes if tree_nodes is not None else artifact.calibration.get("tree_nodes", DEFAULT_NODES)
    return MedusaProposer(artifact.drafter, grow(table, count), name)


@torch.no_grad()
def teacher_forced(heads: MedusaHeads, last: Tensor, ids: Tensor) -> Tensor:
    """Teacher-forced ranks `[S, M]`: place of the text's own token among the best of head d when the root is at `n`.

    `ids` `[S]`, `last` `[S, H]`. Row n is about the tokens n + 1 .. n + M and reads the feature of n - 1, the last one that
    exists when n is the root. -1 where the token is not among the best MAX_RANK, or lies outside the text.
    """
    length, count = ids.shape[0], heads.config.num_heads
    ranks = torch.full((length, count), -1, dtype=torch.long, device=ids.device)
    for d in range(count):
        rows = length - 2 - d  # roots 1 .. length - 2 - d have a token d + 1 places ahead
        if rows <= 0:
            break
        best = heads.logits(last[:rows], d).topk(min(MAX_RANK, heads.vocab_size)).indices
        hit = best == ids[2 + d :, None]
        ranks[1 : 1 + rows, d] = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    return ranks


def accepted_by_root(ranks: Tensor, calibration: dict[str, Any]) -> list[int]:
    """How many drafts the calibrated tree would get right at each root of a text, from `teacher_forced` `[S, M]`.

    Along a path at most one rank a depth is right, so the answer is the longest prefix of the row that is a node.
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
    """How often the rank-r token of each head is right, over the roots of all texts (`teacher_forced`, start of the reply).

    Only roots with a token under every head count, so that the depths are comparable.
    """
    heads = texts[0][0].shape[1]
    rows = torch.cat([ranks[start : max(len(ranks) - heads, start)] for ranks, start in texts])
    accuracy = [[int((rows[:, d] == r).sum()) / max(len(rows), 1) for r in range(MAX_RANK)] for d in range(heads)]
    return {"rank_accuracy": accuracy, "roots": len(rows), "tree_nodes": tree_nodes}
