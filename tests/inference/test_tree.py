"""Shapes, tables and the greedy growth of static trees."""

from __future__ import annotations

import itertools

import pytest
import torch
from draftsmith.heads.errors import UserError
from draftsmith.inference.tree import TreeShape, grow, shape_of_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_target

CPU = torch.device("cpu")


def test_tables_of_a_small_tree_are_what_the_eye_sees() -> None:
    #   0 -> 1 -> 3
    #     -> 2 -> 4
    tables = TreeShape((-1, 0, 0, 1, 2)).tables(CPU)
    assert tables.depths.tolist() == [0, 1, 1, 2, 2]
    assert tables.ancestors.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert tables.paths.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 2, 4]]


def test_a_chain_is_a_tree_and_the_empty_chain_is_plain_decoding() -> None:
    assert TreeShape.chain(3).parents == (-1, 0, 1, 2)
    assert TreeShape.chain(0).parents == (-1,)


def test_the_mask_shows_committed_positions_ancestors_and_self_only() -> None:
    tables = TreeShape((-1, 0, 0, 1)).tables(CPU)
    mask = tiny_target().tree_mask(tables.ancestors, 2 + tables.depths, committed=2)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]


def test_ranks_become_a_shape_in_order_of_length_then_rank() -> None:
    shape = shape_of_ranks([(1,), (0, 2), (0,), (1, 0)])
    assert shape.parents == (-1, 0, 0, 1, 2)  # (0,) (1,) (0, 2) (1, 0)


def test_a_node_without_its_parent_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[1, 0\] has no parent"):
        shape_of_ranks([(0,), (1, 0)])


def brute_force_best_value(table: list[list[float]], nodes: int) -> float:
    """Best sum of path products over every ancestor-closed set of `nodes` nodes, by trying all."""
    everything = [p for d in range(1, len(table) + 1) for p in itertools.product(range(len(table[0])), repeat=d)]

    def value(path: tuple[int, ...]) -> float:
        result = 1.0
        for depth, rank in enumerate(path):
            result *= table[depth][rank]
        return result

    best = 0.0
    for chosen in itertools.combinations(everything, nodes):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            best = max(best, sum(map(value, chosen)))
    return best


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2), min_size=2, max_size=3),
    st.integers(1, 4),
)
def test_greedy_growth_is_the_best_closed_set(table: list[list[float]], nodes: int) -> None:
    chosen = grow(table, nodes)
    shape_of_ranks(chosen)  # raises if a parent is missing
    value = 0.0
    for path in chosen:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= table[depth][rank]
        value += product
    assert value == pytest.approx(brute_force_best_value(table, nodes))


def test_ranks_that_were_never_right_are_left_out() -> None:
    assert grow([[0.5, 0.0], [0.0, 0.2]], 10) == [(0,), (0, 1)]
