"""The numbers, on cases small enough to check by hand."""

from __future__ import annotations

import math

import pytest

from draftsmith.inference.decode import Generation, Round
from draftsmith.inference.evaluation.figures import figures_of_replies
from draftsmith.inference.metrics import (
    conditional,
    offered_conditional,
    repeats_itself,
    survival,
    tau,
    tau_by_position,
)
from draftsmith.inference.replay import replay


def test_metrics_match_the_worked_example() -> None:
    """A chain of 3 that accepted 0, 2 and 3 drafts in three rounds, nothing cut."""
    rounds = [Round(tokens=[1] * (a + 1), drafted=3, accepted=a) for a in (0, 2, 3)]
    summary = figures_of_replies([Generation([7], [1] * 9, rounds, decode_s=1.0)])
    assert summary.tau_incl_bonus == pytest.approx(8 / 3)
    assert summary.accept_rate == pytest.approx(5 / 9)
    assert summary.survival == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert summary.cond_accept == pytest.approx([2 / 3, 1, 0.5])
    assert summary.tau_untruncated == pytest.approx(1 + 2 / 3 + 2 / 3 + 1 / 3)


def test_tau_pools_rounds_over_requests() -> None:
    assert tau([[1, 1, 1, 1], [4]]) == pytest.approx(8 / 5)
    assert math.isnan(tau([[]]))


def test_survival_and_conditional_handle_zero_acceptance() -> None:
    assert survival([0, 0], 0) == [] and conditional([]) == []
    assert conditional([0.5, 0.0, 0.0])[:2] == [0.5, 0.0]


def test_turns_of_a_prompt_are_drawn_together() -> None:
    """A prompt of two turns that differ has one tau, 2."""
    emitted = [[1, 1], [3, 3]]
    five = emitted * 5  # fewer prompts get no interval
    summary = figures_of_replies(
        [
            Generation([7], [], [Round(tokens=[1] * n, drafted=3, accepted=n - 1) for n in k])
            for k in five
        ],
        units=[number // 2 for number in range(10)],
    )
    assert summary.tau_ci95 == (2.0, 2.0)


def test_offered_conditional_counts_only_rounds_that_offered_drafts() -> None:
    """Of four rounds the second draft was offered in three and right in two; counted over all it
    would be 2 of 3 acceptances."""
    accepted, offered = [2, 2, 1, 0], [3, 2, 2, 1]
    assert offered_conditional(accepted, offered, 3) == [3 / 4, 2 / 3, 0.0]
    assert conditional(survival(accepted, 2)) == [3 / 4, 2 / 3]
    assert offered_conditional([1, 1], [1, 2], 2) == [1.0, 0.0], (
        "one of the two had nothing at depth 2"
    )


def test_tau_by_position_puts_a_round_where_its_root_stands() -> None:
    """Roots at 250, 253 (below 256), 257 and 258; another request begins at 5000."""
    found = tau_by_position([(250, [3, 4, 1, 2]), (5000, [2, 4])])
    assert found == {"<256": 3.5, "<1024": 1.5, "<16384": 3.0}


def test_a_repeated_8_gram_is_a_loop() -> None:
    assert repeats_itself([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    assert not repeats_itself(list(range(40)))
    assert not repeats_itself([1] * 8)


def test_replay_visits_the_roots_that_decoding_visits() -> None:
    # Reply at 2..9. Root 2 accepts 1 -> keeps 3, 4; root 4 accepts 0 -> keeps 5; root 5 accepts 3
    # -> keeps 6..9.
    accepted = [9, 9, 1, 9, 0, 3, 9, 9, 9, 9]
    assert replay(accepted, start=2, end=10) == [2, 1, 4]
    # The same with the text ending inside the last round's acceptance.
    assert replay(accepted[:8], start=2, end=8) == [2, 1, 2]
    assert replay([5], start=0, end=1) == []
