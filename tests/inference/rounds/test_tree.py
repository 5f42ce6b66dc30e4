"""Shapes, filled trees and the tables derived from them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.rounds.cache import StaticTreeCache, TreeCache, Window
from draftsmith.inference.rounds.tree import NO_NODE, DraftTree, Pass, TreeShape, tables_of
from draftsmith.inference.targets.masks import tree_masks
from tests.helpers.trees import wide_tree

CPU = torch.device("cpu")


def test_tables_of_a_small_tree_match_hand_computed_values() -> None:
    #   0 -> 1 -> 3
    #     -> 2 -> 4
    shape = TreeShape((-1, 0, 0, 1, 2))
    tables = shape.tables(CPU)
    assert tables.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tables.ancestors.int().tolist() == [
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 0, 1, 0, 1],
        ]
    ]
    assert tables.paths.tolist() == [[[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 2, 4]]]
    assert shape.children == ((1, 2), (3,), (4,), (), ())
    assert shape.tables(CPU) is tables, "derived once a shape"


def test_chain_and_wide_shapes_have_expected_parents() -> None:
    assert TreeShape.chain(3).parents == (-1, 0, 1, 2)
    assert TreeShape.chain(0).parents == (-1,) and TreeShape.chain(0).is_chain
    assert wide_tree((2, 1)).parents == (-1, 0, 0, 1, 2)
    assert not wide_tree((2, 1)).is_chain


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=6, max_size=6), min_size=1, max_size=3))
def test_tables_of_any_batch_of_trees_are_those_of_each_shape(rows: list[list[int]]) -> None:
    shapes = [TreeShape((-1, *(value % (i + 1) for i, value in enumerate(row)))) for row in rows]
    levels = max(shape.levels for shape in shapes)
    found = tables_of(
        torch.tensor([[max(p, 0) for p in shape.parents] for shape in shapes]), levels
    )
    for row, shape in enumerate(shapes):
        assert found.depths[row].tolist() == list(shape.depths)
        for node in range(shape.nodes):
            path = shape.path_to(node)
            assert found.paths[row, node].tolist() == path + [NO_NODE] * (levels + 1 - len(path))
            assert found.ancestors[row, node].nonzero()[:, 0].tolist() == sorted(path)


def test_path_tokens_list_each_nodes_path() -> None:
    tree = DraftTree(torch.tensor([[9, 5, 6, 7, NO_NODE]]), TreeShape((-1, 0, 0, 1, 2)))
    assert tree.path_tokens.tolist() == [
        [[9, -1, -1], [9, 5, -1], [9, 6, -1], [9, 5, 7], [9, 6, -1]]
    ]


def full_mask(nodes: Pass, window: Window) -> torch.Tensor:
    masks = tree_masks(nodes, window, torch.float32, None)
    assert masks is not None and masks.sliding is None
    return masks.full


def test_the_mask_shows_committed_positions_ancestors_and_self_only() -> None:
    tables = TreeShape((-1, 0, 0, 1)).tables(CPU)
    cache = TreeCache(1, 16)
    cache.commit([2])
    nodes = Pass(depths=tables.depths, visible=tables.ancestors)
    mask = full_mask(nodes, cache.open(4))
    seen = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert (mask[0, 0] == 0).int().tolist() == seen
    static = StaticTreeCache(1, 8)
    static.commit([2])
    mask = full_mask(nodes, static.open(4))
    assert (mask[0, 0] == 0).int().tolist() == [[*row, 0, 0] for row in seen]


def test_tree_mask_handles_row_lengths_and_sliding_windows() -> None:
    tables = TreeShape((-1, 0, 0)).tables(CPU)
    cache = TreeCache(2, 16)
    cache.commit([1, 3])
    nodes = Pass(depths=tables.depths, visible=tables.ancestors)
    mask = full_mask(nodes, cache.open(3))
    assert (mask[:, 0] == 0).int().tolist() == [
        [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]],
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]],
    ]
    both = tree_masks(nodes, cache.open(3), torch.float32, 3)
    assert both is not None and both.sliding is not None
    assert torch.equal(both.full, mask)
    assert (both.sliding[1, 0] == 0).int().tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 1],
    ]
