"""Candidate nodes of draft trees, of which the best become the tree.

Shapes: B batch, M candidates of one level, N nodes of the tree with the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounds.tree import NO_NODE, DraftTree


def stable_top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best `count` values along the last axis, and their indices.

    Of equal values the first are taken, so that no child is taken before its parent. `topk` does
    not promise that.
    """
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


class Pool:
    """Candidate nodes of a batch in the order of their levels, from which a tree takes the best.

    A candidate's pool index counts from the root, which has index 0. Scores must not rise along a
    path: the best candidates then include their own parents. A candidate of score -inf becomes a
    missing node.
    """

    def __init__(self, root: Tensor, nodes: int) -> None:
        self._nodes = nodes
        # The root is its own parent, as `tables_of` wants it.
        zero = torch.zeros_like(root)[:, None]
        self._tokens, self._parents, self._scores = [root[:, None]], [zero], [zero.double()]
        self._levels = 0
        # For each level of which some were run, the index of its candidates among those.
        self._run_index: dict[int, Tensor] = {}
        self._run_count = 0

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> Tensor:
        """Add a level of candidates, and return their pool indices `[B, M]`.

        All arguments are `[B, M]`; `parents` are pool indices.
        """
        # Example: after the root, levels of 8 and 64 nodes have the indices 1 .. 8 and 9 .. 72.
        start = sum(level.shape[1] for level in self._tokens)
        self._tokens.append(tokens)
        self._parents.append(parents)
        # float64 holds the scores of every drafter exactly, so that all levels can be one tensor.
        self._scores.append(scores.double())
        self._levels += 1
        return torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)

    def run(self, indices: Tensor) -> None:
        """Note that the drafter runs candidates of the last level, of pool indices `[B, M]`."""
        # Example: after a root and a level of 8 nodes the last level starts at 9, so its pool
        # index 11 is column 2.
        start = sum(level.shape[1] for level in self._tokens[:-1])
        end = self._run_count + indices.shape[1]
        places = torch.arange(self._run_count, end, device=indices.device)
        none = torch.full_like(self._tokens[-1], NO_NODE)
        run_index = none.scatter_(1, indices - start, places.expand_as(indices))
        self._run_index[self._levels], self._run_count = run_index, end

    def ran(self, chosen: Tensor) -> Tensor:
        """Return the index of candidates among those that were run, -1 for one that was not.

        `chosen` `[B, N]` are pool indices.
        """
        levels = []
        for level, tokens in enumerate(self._tokens):
            run_index = self._run_index.get(level)
            levels.append(torch.full_like(tokens, NO_NODE) if run_index is None else run_index)
        return torch.cat(levels, dim=1).gather(1, chosen)

    def select(self) -> tuple[DraftTree, Tensor]:
        """Return the tree of the root and the best candidates, and the pool indices of its nodes.

        The pool indices are `[B, N]`.
        """
        tokens, parents, scores = (
            torch.cat(levels, dim=1) for levels in (self._tokens, self._parents, self._scores)
        )
        scores[:, 0] = torch.inf  # the root is always a node
        # One more for the root, which `_nodes` does not count.
        count = min(self._nodes + 1, tokens.shape[1])
        # back in the order of the pool, where parents come before their children
        chosen = stable_top(scores, count)[1].sort(dim=-1).values
        # Node id of each chosen candidate, by pool index. Example: if 0, 2 and 5 are chosen, they
        # become the nodes 0, 1 and 2, and a node whose parent has pool index 2 gets parent 1. Other
        # entries stay 0 and are not read, because a chosen node's parent is chosen too.
        node_id = torch.zeros_like(tokens).scatter_(
            1, chosen, torch.arange(count, device=tokens.device).expand_as(chosen)
        )
        missing = scores.gather(1, chosen) == -torch.inf
        new_tokens = torch.where(missing, NO_NODE, tokens.gather(1, chosen))
        # The parent of a missing node may not be chosen, so it hangs on the root.
        new_parents = torch.where(missing, 0, node_id.gather(1, parents.gather(1, chosen)))
        return DraftTree(
            new_tokens, parents=new_parents, levels=self._levels, scores=scores.gather(1, chosen)
        ), chosen
