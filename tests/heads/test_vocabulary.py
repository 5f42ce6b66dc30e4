"""Draft vocabularies: which tokens, how they are stored, and how long it takes."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.heads.vocabulary import ids_of_offsets, most_frequent, to_target


def offsets(ids: torch.Tensor) -> torch.Tensor:
    """Return the offsets that are stored for ascending ids."""
    return ids - torch.arange(len(ids))


def test_the_most_frequent_tokens_and_the_special_ones_in_order() -> None:
    counts = torch.tensor([0, 7, 3, 0, 9, 3, 0, 1])
    ids = most_frequent(counts, 5, always=[6])
    assert ids.tolist() == [1, 2, 4, 5, 6], "9, 7, 3, 3 and the special one, ascending"
    assert offsets(ids).tolist() == [1, 1, 2, 2, 2]
    assert ids_of_offsets(offsets(ids), 8).tolist() == ids.tolist()


def test_fewer_distinct_tokens_than_places_are_filled_up_with_the_lowest_ids() -> None:
    counts = torch.zeros(10)
    counts[8] = 4
    assert most_frequent(counts, 4, always=[9]).tolist() == [0, 1, 8, 9]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.data())
def test_maps_round_trip(vocab: int, data: st.DataObject) -> None:
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=vocab, max_size=vocab)))
    size = data.draw(st.integers(1, vocab))
    always = data.draw(st.sets(st.integers(0, vocab - 1), max_size=size))
    ids = most_frequent(counts, size, always)
    assert len(ids) == size == len(set(ids.tolist())) and always <= set(ids.tolist())
    assert torch.equal(ids_of_offsets(offsets(ids), vocab), ids)
    left_out = set(range(vocab)) - set(ids.tolist())
    least_kept = min((int(counts[i]) for i in ids.tolist() if i not in always), default=10)
    assert all(int(counts[i]) <= least_kept for i in left_out)
    full = to_target(torch.arange(size).float(), ids, vocab)
    assert full[ids].tolist() == list(range(size)) and int(full.isinf().sum()) == vocab - size


@pytest.mark.parametrize("d2t", [[0, -1, 0], [5, 5, 5], [-1, 0, 0]])
def test_a_map_with_tokens_twice_or_outside_is_refused(d2t: list[int]) -> None:
    with pytest.raises(UserError, match="vocabulary map"):
        ids_of_offsets(torch.tensor(d2t), 6)


def test_a_vocabulary_too_small_for_the_special_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="must hold the 3 special tokens"):
        most_frequent(torch.ones(10), 2, always=[1, 2, 3])
    with pytest.raises(UserError, match="target's 10 at most"):
        most_frequent(torch.ones(10), 11, always=[])


def test_building_from_150_thousand_tokens_takes_under_a_second() -> None:
    counts = torch.randint(0, 1000, (152_000,))
    started = time.perf_counter()
    ids = most_frequent(counts, 32_000, always=range(151_000, 152_000))
    ids_of_offsets(offsets(ids), 152_000)
    assert time.perf_counter() - started < 1.0
