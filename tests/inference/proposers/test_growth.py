"""How trees grow: static, best first, and EAGLE-2's expansion, each against a slow definition."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.proposers.growth import (
    Level,
    Slots,
    best_first,
    grow_dynamic,
    grow_fixed,
)
from draftsmith.inference.proposers.tree_plan import grow, grow_chain, shape_of_ranks
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import NO_NODE, DraftTree, TreeShape
from tests.helpers.trees import wide_tree


def test_ranks_become_a_shape_in_order_of_length_then_rank() -> None:
    shape = shape_of_ranks([(1,), (0, 2), (0,), (1, 0)])
    assert shape.parents == (-1, 0, 0, 1, 2)  # (0,) (1,) (0, 2) (1, 0)


def test_a_node_without_its_parent_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[1, 0\] has no parent"):
        shape_of_ranks([(0,), (1, 0)])


def path_product(table: list[list[float]], path: tuple[int, ...]) -> float:
    result = 1.0
    for depth, rank in enumerate(path):
        result *= table[depth][rank]
    return result


def brute_force_best_value(table: list[list[float]], nodes: int) -> float:
    """Best sum of path products over every ancestor-closed set of `nodes` nodes, by trying all."""
    everything = [
        p
        for d in range(1, len(table) + 1)
        for p in itertools.product(range(len(table[0])), repeat=d)
    ]
    best = 0.0
    for chosen in itertools.combinations(everything, nodes):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            best = max(best, sum(path_product(table, path) for path in chosen))
    return best


TABLES = st.lists(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2), min_size=2, max_size=3)


@settings(max_examples=25, deadline=None)
@given(TABLES, st.integers(1, 4))
def test_greedy_growth_is_the_best_closed_set(table: list[list[float]], nodes: int) -> None:
    chosen = grow(table, nodes)
    shape_of_ranks(chosen)  # raises if a parent is missing
    assert sum(path_product(table, path) for path in chosen) == pytest.approx(
        brute_force_best_value(table, nodes)
    )


def sequoia_value(table: list[list[float]], nodes: int) -> float:
    """Most drafts accepted in expectation, by Sequoia's dynamic programme (arXiv 2402.12374) with a
    table for each depth."""

    @cache
    def below(depth: int, count: int, rank: int) -> float:
        """`count` nodes below one of this depth, whose children are offered from `rank` on."""
        if count == 0 or depth == len(table) or rank == len(table[depth]):
            return 0.0
        own = (
            table[depth][rank] * (1 + below(depth + 1, n - 1, 0))
            + below(depth, count - n, rank + 1)
            for n in range(1, count + 1)
        )
        return max(own)

    return below(0, nodes, 0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_greedy_growth_reaches_what_sequoias_dynamic_programme_does(
    table: list[list[float]], nodes: int
) -> None:
    table = [sorted(row, reverse=True) for row in table]
    value = sum(path_product(table, path) for path in grow(table, nodes))
    assert value == pytest.approx(sequoia_value(table, nodes))


def test_ranks_that_were_never_right_are_left_out() -> None:
    assert grow([[0.5, 0.0], [0.0, 0.2]], 10) == [(0,), (0, 1)]


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """Token paths of a row's nodes, missing ones left out; every node must hang on one that is
    there."""
    tokens, parents = (
        tree.tokens[row].tolist(),
        tree.tables.parents.expand_as(tree.tokens)[row].tolist(),
    )
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        if tokens[node] != NO_NODE:
            assert parents[node] < node and parents[node] in paths, "closed under taking parents"
            paths[node] = (*paths[parents[node]], tokens[node])
    found = [paths[node] for node in paths if node]
    assert len(set(found)) == len(found)
    return set(found)


@settings(max_examples=25, deadline=None)
@given(TABLES, st.integers(1, 4))
def test_best_first_over_marginals_is_the_best_closed_set(
    table: list[list[float]], nodes: int
) -> None:
    ordered = [sorted(row, reverse=True) for row in table]
    scores = torch.tensor([ordered], dtype=torch.float64).log()
    tokens = torch.arange(scores.numel()).view(scores.shape)
    found = paths_of(best_first(tokens, scores, torch.tensor([99]), nodes), 0)
    width = len(ordered[0])
    value = sum(path_product(ordered, tuple(token % width for token in path)) for path in found)
    assert value == pytest.approx(brute_force_best_value(table, nodes))


class TableDrafter:
    """A drafter whose logits are a table of the path, coarse enough that scores tie."""

    def __init__(self, seed: int, vocab: int, steps: int = 3) -> None:
        self.seed, self.vocab, self.steps = seed, vocab, steps
        self.asked: list[tuple[int, ...]] = []
        self._levels: list[list[tuple[int, ...]]] = []

    def logits(self, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % (1 << 31))
        return torch.randint(0, self.steps, (self.vocab,), generator=generator).double()

    def __call__(self, level: Level) -> Tensor:
        assert len(level.tokens) == 1
        before = self._levels[-1] if self._levels else [()]
        here = [
            (*before[a], t)
            for a, t in zip(level.above[0].tolist(), level.tokens[0].tolist(), strict=True)
        ]
        self._levels.append(here)
        self.asked += here
        if level.visible is not None:
            for path, sees in zip(here, level.visible[0].tolist(), strict=True):
                seen = [self.asked[i] for i, visible in enumerate(sees) if visible]
                assert seen == [path[:n] for n in range(1, len(path) + 1)], (
                    "a node sees its ancestors and itself"
                )
        return torch.stack([self.logits(path) for path in here])[None]


def draws(sampling: Sampling = Sampling()) -> Draws:  # noqa: B008
    return Draws(
        sampling, torch.tensor([3]), torch.zeros(1, 32, dtype=torch.long), torch.tensor([5])
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_nodes_of_a_fixed_shape_have_the_tokens_of_their_ranks(at_once: bool) -> None:
    """Of the node (1, 2), the third-best token after the second-best; siblings may be left out."""
    shape, ranks = shape_of_ranks([(1,), (1, 0), (1, 2)]), (0, 1, 0, 2)
    root = torch.tensor([9])
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 4.0, 2.0]]])  # of depths 1 and 2
    slots = Slots(logits)
    if at_once:
        tree = slots.fill(root, draws(), shape, ranks)
    else:
        tree, _ = grow_fixed(logits[:, 0], root, draws(), slots, shape, ranks)
    assert tree.tokens.tolist() == [[9, 3, 0, 3]]


def expansion_by_hand(
    drafter: TableDrafter, levels: int, width: int, nodes: int
) -> dict[tuple[int, ...], float]:
    """The values of EAGLE-2's pool."""
    pool: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(levels):
        added = {}
        for path in frontier:
            probs = drafter.logits(path).log_softmax(-1)
            for token in probs.topk(width).indices.tolist():
                added[(*path, token)] = pool.get(path, 0.0) + float(probs[token])
        pool |= added
        frontier = sorted(added, key=lambda p: -added[p])[:width]
    return pool


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([2, 1000]),
)
def test_dynamic_trees_are_the_best_closed_set_of_the_pool(
    seed: int, levels: int, width: int, nodes: int, steps: int
) -> None:
    """With ties (2 steps) the values agree; without (1000) the nodes do."""
    drafter = TableDrafter(seed, vocab=5, steps=steps)
    tree, slots = grow_dynamic(
        drafter.logits(())[None], torch.tensor([0]), draws(), drafter, levels, width, nodes
    )
    found = paths_of(tree, 0)
    pool = expansion_by_hand(drafter, levels, width, nodes)
    if steps == 1000:
        assert found == set(sorted(pool, key=lambda p: -pool[p])[:nodes])
    assert len(found) == min(nodes, width + (levels - 1) * width**2 if levels > 1 else width)
    tokens = tree.path_tokens[0].tolist()
    for node, slot in enumerate(slots[0].tolist()):
        path = tuple(t for t in tokens[node][1:] if t != NO_NODE)
        assert slot == (drafter.asked.index(path) if node and path in drafter.asked else -1)
        assert not node or len(path) == 1 or path[:-1] in drafter.asked, (
            "what has children has been asked about"
        )


REJECTION = Sampling(temperature=1.0, rule="rejection")


def test_a_chain_is_the_sampled_tree_of_its_shape() -> None:
    for seed in range(5):
        one, other = (
            TableDrafter(seed, vocab=7, steps=1000),
            TableDrafter(seed, vocab=7, steps=1000),
        )
        first, root = one.logits(())[None], torch.tensor([0])
        chain = grow_chain(first, root, draws(REJECTION), one, TreeShape.chain(3))
        tree, _ = grow_fixed(first, root, draws(REJECTION), other, TreeShape.chain(3))
        assert torch.equal(chain.tokens, tree.tokens)
        assert chain.probs is not None and tree.probs is not None
        torch.testing.assert_close(chain.probs[:, :3], tree.probs[:, :3])


def test_chains_follow_the_likeliest_token() -> None:
    drafter = TableDrafter(2, vocab=7, steps=1000)
    tokens = (
        grow_chain(
            drafter.logits(())[None], torch.tensor([0]), draws(), drafter, TreeShape.chain(3)
        )
        .tokens[0]
        .tolist()
    )
    for depth in range(1, 4):
        assert tokens[depth] == int(drafter.logits(tuple(tokens[1:depth])).argmax())


def test_sampled_trees_hold_draws_from_the_distribution_of_each_parent() -> None:
    shape = TreeShape((-1, 0, 0, 1, 1, 2, 3))
    drafter = TableDrafter(3, vocab=7, steps=1000)
    tree, places = grow_fixed(
        drafter.logits(())[None], torch.tensor([0]), draws(REJECTION), drafter, shape
    )
    tokens = tree.tokens[0].tolist()
    assert tree.probs is not None
    for node, children in enumerate(shape.children):
        path = tuple(tokens[n] for n in shape.path_to(node)[1:])
        if children:
            torch.testing.assert_close(tree.probs[0, node], drafter.logits(path).softmax(-1))
            assert len({tokens[child] for child in children}) == len(children)
    assert places[0].tolist() == [-1, 0, 1, 2, -1, -1, -1]
    assert [
        tuple(tokens[n] for n in shape.path_to(node)[1:]) for node in (1, 2, 3)
    ] == drafter.asked


def test_a_fixed_shape_holds_the_likeliest_children_of_each_node() -> None:
    shape = TreeShape((-1, 0, 0, 1, 1, 2, 3))
    drafter = TableDrafter(3, vocab=7, steps=1000)
    tree, places = grow_fixed(drafter.logits(())[None], torch.tensor([0]), draws(), drafter, shape)
    tokens = tree.tokens[0].tolist()
    for node, children in enumerate(shape.children):
        best = (
            drafter.logits(tuple(tokens[n] for n in shape.path_to(node)[1:]))
            .topk(3)
            .indices.tolist()
        )
        assert [tokens[child] for child in children] == best[: len(children)]
    assert tree.probs is None and places[0].tolist() == [-1, 0, 1, 2, -1, -1, -1]


def test_where_a_distribution_runs_out_of_tokens_nodes_are_missing_with_all_below_them() -> None:
    sampling = Sampling(temperature=1.0, top_k=2, rule="rejection")
    drafter = TableDrafter(3, vocab=7, steps=1000)
    tree, _ = grow_fixed(
        drafter.logits(())[None],
        torch.tensor([0]),
        draws(sampling),
        drafter,
        wide_tree((3, 1)),
    )
    assert (tree.tokens[0] == NO_NODE).int().tolist() == [0, 0, 0, 1, 0, 0, 1]
