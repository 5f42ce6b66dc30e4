"""Which guesses become nodes: static trees from measured accuracies, and trees that follow what the
drafter is sure of.

Shapes: B batch, K children a node, M nodes, N nodes of the final tree with the root, D levels, V
vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..sampling import Draws
from ..tree import NO_NODE, DraftTree, TreeShape

Ranks = tuple[int, ...]


def shape_of_ranks(nodes: Sequence[Ranks]) -> TreeShape:
    """The shape of a set of rank tuples, one a node: `(2, 0)` is the best child of the third-best
    child of the root.

    Node ids follow the order (length, lexicographic). Raises `UserError` if a node's parent is
    missing.
    """
    order = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
    index: dict[Ranks, int] = {(): 0} | {ranks: i for i, ranks in enumerate(order, 1)}
    for ranks in order:
        if not ranks or ranks[:-1] not in index:
            raise UserError(
                f"tree node {list(ranks)} has no parent in the tree; add {list(ranks[:-1])}"
            )
    return TreeShape((NO_NODE, *(index[ranks[:-1]] for ranks in order)))


def grow(rank_accuracy: Sequence[Sequence[float]], nodes: int) -> list[Ranks]:
    """The `nodes` rank tuples of greatest expected acceptance, best first (Medusa, arXiv
    2401.10774, section 2.3.3).

    `rank_accuracy[d][r]` estimates how often the candidate of rank r at depth d + 1 is right; a
    node's value is the product along its path. Siblings are offered in order of accuracy, so the
    set is closed under taking parents. A node that was never right is left out, so fewer than
    `nodes` may come back.
    """
    order = [sorted(range(len(row)), key=lambda r: (-row[r], r)) for row in rank_accuracy]
    chosen: list[Ranks] = []
    # (-value, depth, places in `order`): ties go to the shallower
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(value: float, places: tuple[int, ...]) -> None:
        depth = len(places) - 1
        if depth < len(order) and places[-1] < len(order[depth]):
            accuracy = rank_accuracy[depth][order[depth][places[-1]]]
            if value * accuracy > 0:
                heapq.heappush(heap, (-value * accuracy, depth, places))

    def value_of(places: tuple[int, ...]) -> float:
        value = 1.0
        for depth, place in enumerate(places):
            value *= rank_accuracy[depth][order[depth][place]]
        return value

    offer(1.0, (0,))
    while heap and len(chosen) < nodes:
        *_, places = heapq.heappop(heap)
        chosen.append(tuple(order[depth][place] for depth, place in enumerate(places)))
        offer(value_of(places[:-1]), (*places[:-1], places[-1] + 1))
        offer(value_of(places), (*places, 0))
    return chosen


def best_first(
    tokens: Tensor, scores: Tensor, root: Tensor, nodes: int, whole: bool = False
) -> DraftTree:
    """The `nodes` likeliest paths through per-depth candidates that do not depend on their parent
    (DDTree, arXiv 2604.12989).

    `tokens`, `scores` `[B, D, K]`: candidates of each depth, best first, and their
    log-probabilities; a path's value is the sum. Level by level, without a heap and without leaving
    the device: each of the best `nodes` paths lies within the best `nodes` of its own level, so
    keeping that many a level is exact. `whole`: give the best `nodes` of every level, of which any
    smaller or shallower tree is a part.
    """
    batch, levels, width = scores.shape
    level = _Pool(root, nodes * levels if whole else nodes)
    kept = torch.zeros(batch, 1, device=scores.device, dtype=scores.dtype)
    index = torch.zeros(batch, 1, dtype=torch.long, device=scores.device)
    for depth in range(levels):
        sums = (kept[..., None] + scores[:, None, depth]).flatten(1)
        kept, places = stable_top(sums, min(nodes, sums.shape[1]))
        parents = index.gather(1, places // width)
        index = level.add(tokens[:, depth].gather(1, places % width), kept, parents)
    return level.tree()


def stable_top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Best `count` along the last axis; of equals the first, so that no child is taken before its
    parent."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


class _Pool:
    """Candidate nodes of a batch in level order, and the best closed set of them.

    Scores must not rise along a path. Candidates of score -inf are no nodes.
    """

    def __init__(self, root: Tensor, nodes: int) -> None:
        self._nodes = nodes
        zero = torch.zeros_like(root)[:, None]
        self._tokens, self._parents, self._scores = [root[:, None]], [zero], [zero.double()]
        self._levels = 0

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> Tensor:
        """One level more: `[B, M]` each, `parents` as pool indices. Returns the new pool indices
        `[B, M]`."""
        start = sum(part.shape[1] for part in self._tokens)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores.double())
        self._levels += 1
        return torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)

    def select(self) -> tuple[DraftTree, Tensor]:
        """The tree of the root and the best `nodes` candidates, and the pool index `[B, N]` of each
        of its nodes."""
        tokens, parents, scores = (
            torch.cat(part, dim=1) for part in (self._tokens, self._parents, self._scores)
        )
        scores[:, 0] = torch.inf
        count = min(self._nodes + 1, tokens.shape[1])
        chosen = stable_top(scores, count)[1].sort(dim=-1).values  # pool order: parents stand first
        place = torch.zeros_like(tokens).scatter_(
            1, chosen, torch.arange(count, device=tokens.device).expand_as(chosen)
        )
        missing = scores.gather(1, chosen) == -torch.inf
        new_tokens = torch.where(missing, NO_NODE, tokens.gather(1, chosen))
        new_parents = torch.where(missing, 0, place.gather(1, parents.gather(1, chosen)))
        return DraftTree(
            new_tokens, parents=new_parents, levels=self._levels, scores=scores.gather(1, chosen)
        ), chosen

    def tree(self) -> DraftTree:
        return self.select()[0]


@dataclass
class Level:
    """Nodes `[B, M]` of one depth that an autoregressive drafter is asked to continue."""

    tokens: Tensor
    above: Tensor
    """[B, M]: index of each node's parent among the nodes of the level before; 0 for children of
    the root."""
    visible: Tensor | None
    """[B, M, T]: which of the T nodes asked about so far, these included, each node sees (itself
    and its ancestors); None: all."""
    depth: int


Continue = Callable[[Level], Tensor]
"""Logits `[B, M, V]` of what follows each node of a level; the drafter's cache holds the levels
before in the same order."""


@dataclass
class Slots:
    """A `Continue` whose answers depend on the level only: drafts that do not know each other,
    `logits` `[B, D, V]`."""

    logits: Tensor

    def __call__(self, level: Level) -> Tensor:
        return self.logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

    def tree(
        self,
        root: Tensor,
        draws: Draws,
        width: int,
        nodes: int,
        score_temperature: float,
        whole: bool = False,
    ) -> DraftTree:
        """The `nodes` likeliest paths, with `width` candidates at each depth; `whole` as in
        `best_first`."""
        levels = self.logits.shape[1]
        tokens, scores = independent(
            lambda depth: self.logits[:, depth], levels, root, draws, width, score_temperature
        )
        return best_first(tokens, scores, root, nodes, whole)


def independent(
    logits: Callable[[int], Tensor],
    levels: int,
    root: Tensor,
    draws: Draws,
    width: int,
    score_temperature: float,
) -> tuple[Tensor, Tensor]:
    """Best tokens and their log-scores `[B, levels, width]` where drafts do not know each other:
    `logits(depth)` `[B, V]`."""
    paths, found = root[:, None, None], []
    for depth in range(levels):
        tokens, scores = draws.rank(logits(depth)[:, None], depth, width, paths, score_temperature)
        found.append((tokens, scores))
        # penalties: of all paths, as if the best one were taken
        paths = torch.cat([paths, tokens[:, :, :1]], dim=-1)
    return torch.cat([tokens for tokens, _ in found], dim=1), torch.cat(
        [scores for _, scores in found], dim=1
    )


def grow_dynamic(
    first: Tensor,
    root: Tensor,
    draws: Draws,
    go_on: Continue,
    levels: int,
    width: int,
    nodes: int,
    score_temperature: float = 1.0,
) -> tuple[DraftTree, Tensor]:
    """EAGLE-2's tree (arXiv 2406.16858): expand the `width` best nodes of each level, then keep the
    best `nodes` of all.

    `first` `[B, V]`: logits after the root. A node's value is the sum of log-scores along its path,
    at score temperature `score_temperature`. Returns the tree and, for each of its nodes `[B, N]`,
    its place among the nodes that `go_on` has seen (-1: not seen; the root is not among them).
    """
    pool = _Pool(root, nodes)
    paths = root[:, None, None]  # [B, M, d]
    tokens, scores = draws.rank(first[:, None], 0, width, paths, score_temperature)
    tokens, scores = tokens[:, 0], scores[:, 0]
    index = pool.add(tokens, scores, torch.zeros_like(tokens))
    seen = [torch.full_like(root, NO_NODE)[:, None], torch.full_like(tokens, NO_NODE)]
    above = torch.zeros_like(tokens)
    paths = torch.cat([paths.expand(-1, tokens.shape[1], -1), tokens[..., None]], dim=-1)
    visible = tokens.new_zeros(*tokens.shape, 0, dtype=torch.bool)
    asked = 0
    for depth in range(1, levels):
        count = tokens.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        visible = torch.cat([visible, own], dim=-1)
        _mark(seen, index, torch.arange(asked, asked + count, device=tokens.device))
        asked += count
        children, gains = draws.rank(
            go_on(Level(tokens, above, visible, depth)), depth, width, paths, score_temperature
        )
        sums = (scores[..., None] + gains).flatten(1)
        all_index = pool.add(
            children.flatten(1), sums, index.repeat_interleave(children.shape[-1], dim=1)
        )
        seen.append(torch.full_like(all_index, NO_NODE))
        scores, places = stable_top(sums, width)
        above = places // children.shape[-1]
        tokens, index = children.flatten(1).gather(1, places), all_index.gather(1, places)
        paths = torch.cat(
            [paths.gather(1, above[..., None].expand(-1, -1, paths.shape[-1])), tokens[..., None]],
            dim=-1,
        )
        visible = visible.gather(1, above[..., None].expand(-1, -1, visible.shape[-1]))
    tree, chosen = pool.select()
    return tree, torch.cat(seen, dim=1).gather(1, chosen)


def _mark(seen: list[Tensor], index: Tensor, places: Tensor) -> None:
    """Note that the nodes of the last level with pool indices `index` `[B, M]` are asked about at
    `places` `[M]`."""
    start = sum(part.shape[1] for part in seen[:-1])
    seen[-1].scatter_(1, index - start, places.expand_as(index))


def grow_chain(
    first: Tensor, root: Tensor, draws: Draws, go_on: Continue, length: int, threshold: float = 0.0
) -> DraftTree:
    """`length` tokens, each the choice after the ones before it (or a draw, with its distribution,
    if the rule compares distributions).

    Arguments as `grow_dynamic`. Above 0, `threshold` ends the chain once the product of the drafts'
    own probabilities is below it in every row; asking costs a synchronisation a draft. Whether a
    chain goes on depends on its own past drafts alone, which is all that the rules that compare
    distributions need (a test enumerates it).
    """
    logits, tokens, probs = first[:, None], [root[:, None]], []
    sure = torch.ones_like(root, dtype=torch.float32)
    above = torch.zeros_like(root)[:, None]
    for depth in range(length):
        paths = (
            torch.cat(tokens, dim=1)[:, None]
            if draws.sampling.history_processor is not None
            else None
        )
        if draws.sampling.compares_distributions:
            drawn, drawn_from = draws.sample(logits, depth, 1, paths)
            chosen = drawn[:, :, 0]
            probs.append(drawn_from)
        else:
            chosen = draws.guess(logits, depth, paths)
        tokens.append(chosen)
        if depth + 1 == length:
            break
        if threshold:
            sure = sure * logits[:, 0].float().softmax(-1).gather(-1, chosen)[:, 0]
            if bool((sure < threshold).all()):
                break
        logits = go_on(Level(chosen, above, None, depth + 1))
    # the last node has no children
    probs_of_nodes = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1) if probs else None
    return DraftTree(
        torch.cat(tokens, dim=1), TreeShape.chain(len(tokens) - 1), probs=probs_of_nodes
    )


@dataclass(frozen=True)
class _FixedLevel:
    """The nodes of one depth of a fixed shape that have children, and what filling those takes; on
    one device."""

    at: Tensor
    """[M]: node ids."""
    depth: int
    width: int
    """Most children of any of them."""
    paths: Tensor
    """[M, depth + 1]: node ids from the root to each."""
    children: Tensor
    """[C]: their children,"""
    source: Tensor
    """[C]: where a child's token stands among `width` draws of each node,"""
    parents: Tensor
    """[C]: and its parent."""
    above: Tensor
    """[1, M]: place of each node's parent in the level before."""
    visible: Tensor
    """[1, M, T]: which of the nodes asked about so far each node sees."""


@lru_cache(maxsize=64)
def _fixed_levels(shape: TreeShape, device: torch.device) -> tuple[tuple[_FixedLevel, ...], Tensor]:
    """The levels of `shape` below which something hangs, and each node's place `[1, N]` among those
    asked about (-1: none)."""
    levels: list[_FixedLevel] = []
    asked: list[int] = []
    before = (NO_NODE,)
    inner: tuple[int, ...] = (0,)
    ancestors = shape.tables(device).ancestors
    while any(shape.children[node] for node in inner):
        width = max(len(shape.children[node]) for node in inner)
        asked += [node for node in inner if node]
        below = [
            (m, rank, child)
            for m, node in enumerate(inner)
            for rank, child in enumerate(shape.children[node])
        ]

        def tensor(values):
            return torch.tensor(values, dtype=torch.long, device=device)

        levels.append(
            _FixedLevel(
                at=tensor(inner),
                depth=shape.depths[inner[0]],
                width=width,
                paths=tensor([shape.path_to(node) for node in inner]),
                children=tensor([child for _, _, child in below]),
                source=tensor([m * width + rank for m, rank, _ in below]),
                parents=tensor([inner[m] for m, _, _ in below]),
                above=tensor([[before.index(shape.parents[node]) for node in inner]]),
                visible=ancestors[:, tensor(inner)][:, :, tensor(asked)],
            )
        )
        before, inner = inner, tuple(child for _, _, child in below if shape.children[child])
    places = [asked.index(node) if node in asked else NO_NODE for node in range(shape.nodes)]
    return tuple(levels), torch.tensor([places], device=device)


def grow_fixed(
    first: Tensor, root: Tensor, draws: Draws, go_on: Continue, shape: TreeShape
) -> tuple[DraftTree, Tensor]:
    """Fill a fixed shape level by level with each node's likeliest tokens; for rules that compare
    distributions, with draws without replacement, whose distributions are kept.

    Arguments and result as `grow_dynamic`. That the shape is fixed before anything is drawn is what
    keeps those rules lossless.
    """
    compares = draws.sampling.compares_distributions
    batch = len(root)
    levels, places = _fixed_levels(shape, root.device)
    tokens = torch.full((batch, shape.nodes), NO_NODE, device=root.device)
    tokens[:, 0] = root
    probs = first.new_zeros(batch, shape.nodes, first.shape[-1]) if compares else None
    for level in levels:
        logits = (
            go_on(
                Level(
                    tokens[:, level.at],
                    level.above.expand(batch, -1),
                    level.visible.expand(batch, -1, -1),
                    level.depth,
                )
            )
            if level.depth
            else first[:, None]
        )
        paths = tokens[:, level.paths]
        if probs is not None:
            drawn, drawn_from = draws.sample(logits, level.at, level.width, paths)
            probs = probs.to(drawn_from.dtype)
            probs[:, level.at] = drawn_from
        else:
            drawn, _ = draws.rank(logits, level.depth, level.width, paths)
        padded = torch.nn.functional.pad(
            drawn, (0, level.width - drawn.shape[-1]), value=NO_NODE
        ).flatten(1)
        # nothing hangs on a node that the distribution had no token for
        there = tokens[:, level.parents] >= 0
        tokens[:, level.children] = torch.where(there, padded[:, level.source], NO_NODE)
    return DraftTree(tokens, shape, probs=probs), places.expand(batch, -1)
