"""Greedy acceptance against the definition, on random trees."""

from __future__ import annotations

import torch
from draftsmith.inference.accept import accept_greedy
from draftsmith.inference.decode import accept, cut
from draftsmith.inference.tree import DraftTree, TreeShape
from hypothesis import given, settings
from hypothesis import strategies as st


def walk(parents: tuple[int, ...], tokens: list[int], choices: list[int]) -> list[int]:
    """The definition: from the root, step to the child that holds the target's choice, until there is none."""
    path = [0]
    while True:
        below = [i for i in range(1, len(parents)) if parents[i] == path[-1] and tokens[i] == choices[path[-1]]]
        if not below:
            return path
        path.append(below[0])


@st.composite
def filled_trees(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A random tree whose siblings hold distinct tokens, token 0 among them, and the target's choices."""
    count = draw(st.integers(1, 12))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
    tokens = [0] * count
    for node in range(count):
        children = [i for i in range(1, count) if parents[i] == node]
        for child, token in zip(children, draw(st.permutations(range(12))), strict=False):
            tokens[child] = token
    choices = [draw(st.integers(0, 3)) for _ in range(count)]
    return parents, tokens, choices


@settings(max_examples=200, deadline=None)
@given(filled_trees())
def test_acceptance_is_the_walk_from_the_root(case: tuple[tuple[int, ...], list[int], list[int]]) -> None:
    parents, tokens, choices = case
    tree = DraftTree(TreeShape(parents), torch.tensor([tokens]))
    path, emitted, root = accept(tree, torch.tensor([choices]))
    assert path == walk(parents, tokens, choices)
    assert emitted == [choices[node] for node in path]
    assert root.tolist() == [emitted[-1]]


def test_the_accepted_leaf_need_not_be_the_last_row() -> None:
    tree = DraftTree(TreeShape((-1, 0, 0, 1, 2)), torch.tensor([[9, 5, 6, 7, 8]]))
    assert accept(tree, torch.tensor([[5, 7, 0, 3, 0]]))[:2] == ([0, 1, 3], [5, 7, 3])


def test_rows_of_a_batch_are_judged_apart() -> None:
    tree = DraftTree(TreeShape.chain(2), torch.tensor([[9, 1, 2], [9, 1, 2]]))
    assert accept_greedy(tree, torch.tensor([[1, 2, 3], [1, 0, 3]])).tolist() == [2, 1]


def test_a_choice_of_token_zero_never_matches_padding() -> None:
    tree = DraftTree(TreeShape((-1, 0, 1)), torch.tensor([[3, 4, 5]]))
    assert accept(tree, torch.tensor([[4, 0, 0]]))[:2] == ([0, 1], [4, 0])


def test_cut_keeps_the_end_token_and_nothing_behind_it_or_the_limit() -> None:
    assert cut([5, 2, 7], 10, frozenset({2})) == [5, 2]
    assert cut([5, 6, 7], 2, frozenset({2})) == [5, 6]
    assert cut([2], 1, frozenset({2})) == [2]
