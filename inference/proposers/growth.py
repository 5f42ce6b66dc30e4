"""Growth of draft trees: by score, or into a fixed shape.

Shapes: B batch, K children of a node, M nodes of one level, N nodes of the final tree with the
root, D levels, U nodes that the drafter has run (undecided slots of its cache), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape


def stable_top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best `count` values along the last axis, and their indices.

    Of equal values the first are taken, so that no child is taken before its parent. `topk` does
    not promise that.
    """
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


class CandidatePool:
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
        return DraftTree(new_tokens, parents=new_parents, levels=self._levels), chosen


@dataclass
class Level:
    """Nodes of one depth that an autoregressive drafter is to run."""

    tokens: Tensor
    """[B, M]: their tokens."""
    above: Tensor
    """[B, M]: index of each node's parent among the nodes of the level before; 0 for children of
    the root."""
    visible: Tensor | None
    """[B, M, U] bool: which of the nodes that were run so far, these included, each node sees
    (itself and its ancestors); None: all."""
    depth: int
    """Depth of the nodes, from 1."""


Continue = Callable[[Level], Tensor]
"""Function of a drafter that runs a level and returns the logits `[B, M, V]` after its nodes. The
drafter's cache holds the levels before, in the order in which they were run."""


@dataclass
class Slots:
    """`Continue` whose logits depend on the depth only: drafts that do not depend on each other."""

    logits: Tensor
    """[B, D, V]: logits of the draft at each depth, from 1; those after the root come first."""

    def __call__(self, level: Level) -> Tensor:
        # The first axis counts drafts from depth 1, and what follows a node of depth d is a draft
        # of depth d + 1: entry d.
        return self.logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

    def tree(self, root: Tensor, draws: Draws, width: int, nodes: int) -> DraftTree:
        """Return the tree of the `nodes` likeliest paths, with `width` candidates at each depth.

        `root` `[B]` are the roots' tokens.
        """
        tokens, scores = self._best(root, draws, self.logits.shape[1], width)
        return best_first(tokens, scores, root, nodes)

    def fill(
        self, root: Tensor, draws: Draws, shape: TreeShape, ranks: tuple[int, ...]
    ) -> DraftTree:
        """Return a tree of a fixed `shape`, whose nodes have the tokens of their `ranks`."""
        width = max(ranks) + 1
        tokens, _ = self._best(root, draws, shape.levels, width)
        drafts = tokens.flatten(1)[:, _places(shape, ranks, width, root.device)]
        return DraftTree(torch.cat([root[:, None], drafts], dim=1), shape)

    def _best(self, root: Tensor, draws: Draws, levels: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the `width` best tokens of each of `levels` depths, and their log-scores.

        Both are `[B, D, K]` with D = `levels` and K = `width`.
        """
        # One place stands for all nodes of a depth (M = 1), since their logits are the same.
        paths = root[:, None, None]
        tokens_by_depth, scores_by_depth = [], []
        for depth in range(levels):
            logits = self.logits[:, depth, None]
            tokens, scores = draws.rank(logits, depth, width, paths)
            tokens_by_depth.append(tokens)
            scores_by_depth.append(scores)
            # A repetition penalty differs from path to path, but these scores are for all of them:
            # they are penalised as if the best path were taken.
            paths = torch.cat([paths, tokens[:, :, :1]], dim=-1)
        return torch.cat(tokens_by_depth, dim=1), torch.cat(scores_by_depth, dim=1)


@lru_cache(maxsize=64)
def _places(shape: TreeShape, ranks: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """Return the index of each drafted node's token among the best `width` of all depths."""
    # Example: with 3 tokens of each depth, a node of depth 2 and rank 0 has the index 3.
    places = [(shape.depths[node] - 1) * width + ranks[node] for node in range(1, shape.nodes)]
    return torch.tensor(places, device=device)


def best_first(tokens: Tensor, scores: Tensor, root: Tensor, nodes: int) -> DraftTree:
    """Return the tree of the `nodes` likeliest paths through candidates that ignore their parent.

    The method is DDTree's (arXiv 2604.12989). `tokens` and `scores` `[B, D, K]` are the candidates
    of each depth, best first, and their log-probabilities; a path's value is the sum. `root` `[B]`
    are the roots' tokens.

    The tree is made level by level, without a heap and without leaving the device. That is exact:
    each of the best `nodes` paths is among the best `nodes` of its own level, so no level needs
    more.
    """
    batch, levels, width = scores.shape
    pool = CandidatePool(root, nodes)
    # of the paths that end in the level before: their values and pool indices, at first the root's
    values = torch.zeros(batch, 1, device=scores.device, dtype=scores.dtype)
    index = torch.zeros(batch, 1, dtype=torch.long, device=scores.device)
    for depth in range(levels):
        # Entry m * width + k is candidate k below path m: with 3 candidates entry 4 is number 1
        # below path 1, since 4 // 3 = 1 and 4 % 3 = 1.
        sums = (values[..., None] + scores[:, None, depth]).flatten(1)
        values, picked = stable_top(sums, min(nodes, sums.shape[1]))
        parents = index.gather(1, picked // width)
        index = pool.add(tokens[:, depth].gather(1, picked % width), values, parents)
    return pool.select()[0]


def grow_dynamic(
    first: Tensor,
    root: Tensor,
    draws: Draws,
    go_on: Continue,
    levels: int,
    width: int,
    nodes: int,
) -> tuple[DraftTree, Tensor]:
    """Draft EAGLE-2's tree (arXiv 2406.16858): expand the best nodes of each level, keep the best.

    `first` `[B, V]` are the logits after the root, `root` `[B]` the roots' tokens. Of each of
    `levels` levels the `width` best nodes get `width` children; of all candidates the best `nodes`
    become the tree. A node's value is the sum of log-scores along its path.

    Returns the tree and, for each of its nodes `[B, N]`, its index among the nodes that `go_on` has
    run (-1: it was not run; the root is not among them).
    """
    pool = CandidatePool(root, nodes)
    paths = root[:, None, None]  # [B, M, depth + 1]
    tokens, scores = draws.rank(first[:, None], 0, width, paths)
    tokens, scores = tokens[:, 0], scores[:, 0]
    pool_ids = pool.add(tokens, scores, torch.zeros_like(tokens))
    # Nodes of depth 1 have no parent that was run. A drafter that continues its parents' outputs
    # finds at index 0 the output of the root.
    above = torch.zeros_like(tokens)
    paths = torch.cat([paths.expand(-1, tokens.shape[1], -1), tokens[..., None]], dim=-1)
    # No columns yet (U = 0), as no node was run.
    visible = tokens.new_zeros(*tokens.shape, 0, dtype=torch.bool)
    # The last level is not run: nothing is drafted below it.
    for depth in range(1, levels):
        # Run the nodes of this level, which see their ancestors and themselves. Example of width 2:
        # nodes of level 1 see [1 0] and [0 1]; if both nodes of level 2 are children of the second
        # of them, they see [0 1 1 0] and [0 1 0 1].
        count = tokens.shape[1]
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
        visible = torch.cat([visible, itself.expand(len(tokens), -1, -1)], dim=-1)
        pool.run(pool_ids)
        logits = go_on(Level(tokens, above, visible, depth))
        children, gains = draws.rank(logits, depth, width, paths)
        # All children become candidates. The best of them are the next level to run.
        child_count = children.shape[-1]
        # Entry m * child_count + k is child k of node m, so each parent is repeated in one run.
        sums = (scores[..., None] + gains).flatten(1)
        parents = pool_ids.repeat_interleave(child_count, dim=1)
        child_ids = pool.add(children.flatten(1), sums, parents)
        # `child_ids` has the pool indices of all children; those of the next level are gathered of
        # it, because most children are candidates only.
        scores, picked = stable_top(sums, width)
        above = picked // child_count
        tokens, pool_ids = children.flatten(1).gather(1, picked), child_ids.gather(1, picked)
        # Paths and visible nodes of the children are those of their parents; the cache keeps the
        # columns of nodes that were run and not continued.
        parent_paths = paths.gather(1, above[..., None].expand(-1, -1, paths.shape[-1]))
        paths = torch.cat([parent_paths, tokens[..., None]], dim=-1)
        visible = visible.gather(1, above[..., None].expand(-1, -1, visible.shape[-1]))
    tree, chosen = pool.select()
    return tree, pool.ran(chosen)


@dataclass(frozen=True)
class _FixedLevel:
    """Nodes of one depth of a fixed shape that have children, and the indices that fill those.

    M nodes have n children together. All tensors lie on one device.
    """

    at: Tensor
    """[M]: node ids."""
    width: int
    """Tokens that are drawn after each node: one more than the largest rank of a child."""
    paths: Tensor
    """[M, depth + 1]: node ids from the root to each node."""
    children: Tensor
    """[n]: node ids of the children."""
    source: Tensor
    """[n]: index of each child's token among `M * width` draws, `width` for each node."""
    parents: Tensor
    """[n]: node id of each child's parent."""
    above: Tensor
    """[1, M]: index of each node's parent in the level before."""
    visible: Tensor
    """[1, M, U] bool: which of the nodes that were run so far each node sees."""


@lru_cache(maxsize=64)
def _fixed_levels(
    shape: TreeShape, ranks: tuple[int, ...] | None, device: torch.device
) -> tuple[tuple[_FixedLevel, ...], Tensor]:
    """Return the levels of `shape` that have children, the nodes of which have `ranks`.

    Without `ranks` the children of each node have the first ones. Also returns the index of each
    node `[1, N]` among the nodes that a drafter runs to fill them (-1: it is not run; the root is
    not among them).
    """
    if ranks is None:
        below = [shape.children[parent] for parent in shape.parents[1:]]
        ranks = (0, *(siblings.index(node) for node, siblings in enumerate(below, 1)))
    levels: list[_FixedLevel] = []
    run: list[int] = []
    # The nodes with children of the level before: the root's parent in `shape` is NO_NODE.
    before = [NO_NODE]
    ancestors = shape.tables(device).ancestors

    def tensor(values):
        return torch.tensor(values, dtype=torch.long, device=device)

    # Example: the root has the children 1 and 2, node 1 has 3 and 4, node 2 has 5. The second level
    # is filled from the nodes 1 and 2, with width 2: its children 3, 4, 5 have the sources 0, 1, 2,
    # and source 3, a second child of node 2, is not used.
    for depth in range(shape.levels):
        inner = [n for n in range(shape.nodes) if shape.depths[n] == depth and shape.children[n]]
        of_node = [(m, child) for m, node in enumerate(inner) for child in shape.children[node]]
        children = [child for _, child in of_node]
        width = 1 + max(ranks[child] for child in children)
        if depth:  # the drafter has run the root before the tree grows
            run += inner
        levels.append(
            _FixedLevel(
                at=tensor(inner),
                width=width,
                paths=tensor([shape.path_to(node) for node in inner]),
                children=tensor(children),
                source=tensor([m * width + ranks[child] for m, child in of_node]),
                parents=tensor([shape.parents[child] for child in children]),
                above=tensor([[before.index(shape.parents[node]) for node in inner]]),
                visible=ancestors[:, tensor(inner)][:, :, tensor(run)],
            )
        )
        before = inner
    run_index = [NO_NODE] * shape.nodes
    for i, node in enumerate(run):
        run_index[node] = i
    return tuple(levels), torch.tensor([run_index], device=device)


def grow_fixed(
    first: Tensor,
    root: Tensor,
    draws: Draws,
    go_on: Continue,
    shape: TreeShape,
    ranks: tuple[int, ...] | None = None,
) -> tuple[DraftTree, Tensor]:
    """Fill a fixed shape, level by level, with the likeliest tokens after each node.

    `ranks` are those of the nodes among their parents' likeliest tokens; None: siblings have the
    first ranks.

    Under a rule that compares distributions they are draws without replacement instead, and the
    tree has the distributions. Those rules stay lossless because the shape is fixed before anything
    is drawn (docs/verification.md#non-anticipation). Arguments and result as in `grow_dynamic`.
    """
    compares = draws.sampling.compares_distributions
    batch = len(root)
    levels, run_index = _fixed_levels(shape, None if compares else ranks, root.device)
    tokens = torch.full((batch, shape.nodes), NO_NODE, device=root.device)
    tokens[:, 0] = root
    probs = first.new_zeros(batch, shape.nodes, first.shape[-1]) if compares else None
    for depth, level in enumerate(levels):
        if depth == 0:
            logits = first[:, None]
        else:
            above = level.above.expand(batch, -1)
            visible = level.visible.expand(batch, -1, -1)
            logits = go_on(Level(tokens[:, level.at], above, visible, depth))
        paths = tokens[:, level.paths]
        if probs is not None:
            drawn, drawn_from = draws.sample(logits, level.at, level.width, paths)
            # Processed scores are float32, while the logits may be bfloat16; only the first draws
            # show which type they have.
            probs = probs.to(drawn_from.dtype)
            probs[:, level.at] = drawn_from
        else:
            drawn, _ = draws.rank(logits, depth, level.width, paths)
        # `level.source` counts `width` tokens for each node; a vocabulary may be smaller
        padding = (0, level.width - drawn.shape[-1])
        padded = pad(drawn, padding, value=NO_NODE).flatten(1)
        # a missing node has no children
        parent_exists = tokens[:, level.parents] >= 0
        tokens[:, level.children] = torch.where(parent_exists, padded[:, level.source], NO_NODE)
    return DraftTree(tokens, shape, probs=probs), run_index.expand(batch, -1)
