"""Acceptance by match against its definition, on random trees, and what a verdict hands to the
loop."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.rounds.accept import Verdict, judge, match
from draftsmith.inference.rounds.outcome import Accepted, DeviceOutcome, Hidden, Outcome
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import NO_NODE, DraftTree, TreeShape


def reference(parents: tuple[int, ...], tokens: list[int], choices: list[int]) -> list[int]:
    """The definition: from the root, step to the child that holds the target's choice, until there
    is none."""
    path = [0]
    while True:
        below = [
            i
            for i in range(1, len(parents))
            if parents[i] == path[-1] and tokens[i] == choices[path[-1]]
        ]
        if not below:
            return path
        path.append(below[0])


@st.composite
def filled_trees(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A random tree whose siblings hold distinct tokens, token 0 and missing nodes among them, and
    the target's choices."""
    count = draw(st.integers(1, 12))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
    tokens = [0] * count
    for node in range(count):
        children = [i for i in range(1, count) if parents[i] == node]
        for child, token in zip(children, draw(st.permutations(range(-1, 12))), strict=False):
            tokens[child] = token
    choices = [draw(st.integers(0, 3)) for _ in range(count)]
    return parents, tokens, choices


def decided(tree: DraftTree, choices: list[list[int]]) -> tuple[Accepted, Outcome]:
    """What the loop gets from a batch in which the target's choices are known."""
    given_ = torch.tensor(choices)
    node = match(tree, given_)
    last = given_.gather(1, node[:, None])[:, 0]
    packed = DeviceOutcome.of(tree, Verdict(node=node, bonus=last, rule="greedy"))
    outcome = packed.read()
    assert packed.fetch()() == outcome
    # The state of a node is its token.
    return Accepted.of(tree, packed, Hidden(tree.tokens[..., None].float()), outcome), outcome


@settings(max_examples=200, deadline=None)
@given(filled_trees(), st.booleans())
def test_acceptance_goes_from_the_root_to_the_first_mistake(
    case: tuple[tuple[int, ...], list[int], list[int]], dynamic: bool
) -> None:
    parents, tokens, choices = case
    if dynamic:
        tree = DraftTree(
            torch.tensor([tokens]),
            parents=torch.tensor([[max(p, 0) for p in parents]]),
            levels=len(parents) - 1,
        )
    else:
        tree = DraftTree(torch.tensor([tokens]), TreeShape(parents))
    accepted, found = decided(tree, [choices])
    assert found.nodes == [reference(parents, tokens, choices)]
    assert found.tokens == accepted.tokens == [[choices[node] for node in found.nodes[0]]]
    assert accepted.bonus is not None and accepted.bonus.tolist() == [found.tokens[0][-1]]
    assert accepted.path.tolist() == found.nodes
    assert accepted.ids.tolist() == [[tokens[node] for node in found.nodes[0]]]
    assert accepted.hidden.last[..., 0].tolist() == accepted.ids.tolist()
    assert found.drafted == [sum(token != NO_NODE for token in tokens[1:])]
    assert accepted.counts.tolist() == [len(found.nodes[0])]


def test_the_accepted_leaf_need_not_be_the_last_row() -> None:
    tree = DraftTree(torch.tensor([[9, 5, 6, 7, 8]]), TreeShape((-1, 0, 0, 1, 2)))
    _, found = decided(tree, [[5, 7, 0, 3, 0]])
    assert (found.nodes, found.tokens) == ([[0, 1, 3]], [[5, 7, 3]])


def test_rows_of_a_batch_are_judged_apart() -> None:
    tree = DraftTree(torch.tensor([[9, 1, 2], [9, 1, 2]]), TreeShape.chain(2))
    assert match(tree, torch.tensor([[1, 2, 3], [1, 0, 3]])).tolist() == [2, 1]


def test_a_missing_node_never_matches_and_neither_does_padding() -> None:
    tree = DraftTree(torch.tensor([[3, 4, NO_NODE]]), TreeShape((-1, 0, 1)))
    _, found = decided(tree, [[4, 0, 0]])
    assert (found.nodes, found.tokens, found.drafted) == ([[0, 1]], [[4, 0]], [1])


def test_floats_travel_with_the_integers_unchanged() -> None:
    tree = DraftTree(torch.tensor([[3, 4], [3, 5]]), TreeShape.chain(1))
    overlap = torch.tensor([[0.1, 0.2], [0.3, -0.0]])
    verdict = Verdict(
        node=torch.tensor([1, 0]),
        bonus=torch.tensor([7, 8]),
        rule="block",
        overlap=overlap,
    )
    found = DeviceOutcome.of(tree, verdict).read()
    assert found.overlap == [[overlap[0, 0].item()], [overlap[1, 0].item()]], (
        "only nodes with children had drafts to accept"
    )


def test_a_penalised_choice_counts_the_text_and_the_nodes_own_path() -> None:
    """Logits are the same everywhere; the penalty decides. Token 0 leads, then 1, then 2."""
    sampling = Sampling(repetition_penalty=10.0)
    text = torch.tensor([[3, 3, 3, 3]])
    draws = Draws(sampling, torch.tensor([1]), text, torch.tensor([2]))
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(1, 4, 4)
    tree = DraftTree(torch.tensor([[3, 0, 1, 1]]), TreeShape((-1, 0, 0, 1)))
    verdict = judge(tree, logits, draws)
    scores = draws.scores(logits, tree.path_tokens)
    assert draws.choices(scores, tree.tables.depths, tree.levels).tolist() == [[0, 1, 0, 2]]
    assert verdict.node.tolist() == [3] and verdict.bonus.tolist() == [2]
