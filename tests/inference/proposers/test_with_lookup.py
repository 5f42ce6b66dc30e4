"""The choice between a lookup's chain and a drafter's tree, with numbers that an eye can check."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.proposers.with_lookup import (
    LONGEST_MATCH,
    PRIOR_ROUNDS,
    WINDOW_ROUNDS,
    DraftSourceSelector,
    PendingLookup,
    RunningMean,
    prior_of_lookups,
)


def test_running_mean_matches_hand_computed_values() -> None:
    """A first value of 2 that counts for three rounds, then rounds of 6, 4 tokens."""
    mean = RunningMean(2.0, 3)
    mean.add(6)
    assert mean.value == (3 * 2 + 6) / 4
    mean.add(4)
    assert mean.value == (4 * 3 + 4) / 5
    for _ in range(100):
        mean.add(1)
    before = mean.value
    mean.add(9)
    assert mean.value == before + (9 - before) / WINDOW_ROUNDS, "late rounds keep their weight"


def test_nothing_is_known_of_a_drafter_before_its_first_round() -> None:
    """A lookup never replaces the first tree, and that tree's tokens are all that is known."""
    source = DraftSourceSelector(1)
    source.extend([1, 2, 1, 2, 1, 2, 1, 2])
    assert not source.guess(3)
    source.extend([1, 2])
    assert source.trees == RunningMean(2.0, 1)


def test_priors_come_from_held_out_tau_and_match_length() -> None:
    """A match of 1 to 16 tokens goes on for half as many; of four it promises three in all."""
    assert [mean.value for mean in prior_of_lookups()] == [1.5, 2, 3, 5, 9]
    text = [1, 2, 3, 4, 9, 1, 2, 3, 4]
    for prior, used in ((2.5, True), (2.7, False)):
        source = DraftSourceSelector(1, prior)
        source.extend(text)
        assert source.trees == RunningMean(prior, PRIOR_ROUNDS)
        assert bool(source.guess(3)) == used


def test_open_chain_counts_correct_tokens_until_a_mismatch() -> None:
    chain = PendingLookup(0, [5, 6, 7])
    assert chain.compare([5]) is None and chain.right == 1
    assert chain.compare([6, 8]) == 2
    assert PendingLookup(0, [5, 6, 7]).compare([5, 6, 7, 8]) == 3, "all of them"
    assert PendingLookup(0, [5, 6, 7]).compare([4]) == 0


def test_lookup_match_has_expected_chain_and_kind() -> None:
    """The text ends with 1 2 3, which is near its beginning too; the token before differs."""
    source = DraftSourceSelector(2)
    source.extend([9, 1, 2, 3, 4, 5, 8, 1, 2, 3])
    source.guess(4)
    (chain,) = source._pending
    assert chain.chain == [4, 5, 8, 1] and chain.kind == 1, "three tokens are of the kind 2 to 3"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=60), st.integers(1, 3))
def test_match_length_equals_backward_comparison(text: list[int], shortest: int) -> None:
    source = DraftSourceSelector(shortest)
    source.extend(text)
    place = source.place()
    if place is None:
        return
    same = 0
    while same < min(place, LONGEST_MATCH) and text[place - 1 - same] == text[-1 - same]:
        same += 1
    assert shortest <= source.match(place) == same


def test_lookups_that_fail_give_way_and_come_back() -> None:
    """After 1 2 a lookup drafts what followed the last time, which is wrong each time, until the
    text begins to repeat itself; trees emit three tokens a round."""
    source = DraftSourceSelector(2)
    source.extend([1, 2, 50])
    used = []
    for other in range(60, 80):
        source.extend([1, 2])
        used.append(bool(source.guess(3)))
        source.extend([other, other + 100, other + 200])
    assert not any(used[-10:]) and source.trees.value > 2
    assert source.lookups[1].value < prior_of_lookups()[1].value
    source.extend([1, 2, 50])
    for _ in range(40):
        used.append(bool(source.guess(3)))
        source.extend([1, 2, 50])
    assert all(used[-10:])


def test_a_tree_is_counted_only_where_it_was_used() -> None:
    source = DraftSourceSelector(1)
    source.extend(list(range(20)))
    assert not source.guess(4)
    source.extend([30, 31, 32, 33, 34, 35])
    trees = source.trees.value
    assert trees > 2
    source.extend([*range(20)])
    source.lookups = [RunningMean(99.0) for _ in source.lookups]
    trees = source.trees.value
    assert source.guess(4)
    source.extend([7])
    assert source.trees.value == trees
