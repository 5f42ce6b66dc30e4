"""The choice of a few rows among many: by numbers that can be checked by eye, and at random."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from draftsmith.inference.conversations.choice import described, in_turns, prompt_of, unit_of
from draftsmith.inference.conversations.formats import conversation_of
from hypothesis import given
from hypothesis import strategies as st


def test_sources_take_turns_then_categories_then_units() -> None:
    groups = [("a", "x")] * 4 + [("a", "y")] + [("b", "")] * 2
    units = [40, 10, 30, 10, 20, 8, 7]
    # a/x in the order of its units, the second row of unit 10 last: 1, 2, 0, 3; with a/y: 1, 4, 2,
    # 0, 3; b: 6, 5
    assert in_turns(groups, units) == [1, 6, 4, 5, 2, 0, 3]
    assert described([groups[i] for i in in_turns(groups, units)[:4]]) == "1 a/x, 1 a/y, 2 b"


def test_three_sources_of_a_thousand_rows() -> None:
    groups = [("chat", "")] * 1000 + [("code", "")] * 1000 + [("math", "")] * 1000
    drawn = in_turns(groups, list(range(3000)))[:32]
    assert Counter(groups[i][0] for i in drawn) == {"chat": 11, "code": 11, "math": 10}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9))))
def test_all_rows_are_drawn_once_and_evenly(rows: list[tuple[str, str, int]]) -> None:
    groups = [(source, category) for source, category, _ in rows]
    order = in_turns(groups, [unit for *_, unit in rows])
    assert sorted(order) == list(range(len(rows)))
    left = Counter(source for source, _ in groups)
    taken: Counter[str] = Counter()
    for i in order:
        source = groups[i][0]
        # no source is ahead of one that still has rows
        assert all(taken[source] <= taken[other] for other in left if left[other] > taken[other])
        taken[source] += 1


def chat(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": s} for i, s in enumerate(said)]}


def unit(row: dict[str, Any], source: str = "s") -> str:
    return unit_of(row, conversation_of(row), source)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (chat("q", "a"), chat("q", "b", "q2", "c"), True),
        (chat("q", "a"), chat("r", "a"), False),
        (chat("q", "a") | {"id": 1}, chat("r", "a") | {"id": 1}, True),
        (chat("q", "a") | {"id": 1}, chat("q", "a") | {"id": 2}, False),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b"}, True),
        (
            {"token_ids": [1, 2, 3], "response_spans": [[2, 3]]},
            {"token_ids": [1, 2, 4, 5], "response_spans": [[2, 4]]},
            True,
        ),
        # the ids that regeneration gives are places in a file
        (
            chat("q", "a") | {"id": "p.jsonl:1", "regenerated": {}},
            chat("q", "b") | {"id": "p.jsonl:2", "regenerated": {}},
            True,
        ),
    ],
)
def test_rows_of_one_unit(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (unit(one) == unit(other)) is same
    assert unit(one | {"id": 7}) != unit(one | {"id": 7}, "another source") or "regenerated" in one


def test_system_prompts_and_greetings_are_no_part_of_the_prompt() -> None:
    rows = [
        {"messages": [{"role": "system", "content": "be kind"}, *chat("q", "a")["messages"]]},
        {"messages": [{"role": "assistant", "content": "hello"}, *chat("q", "b")["messages"]]},
        chat("q", "c"),
    ]
    assert len({prompt_of(conversation_of(row)) for row in rows}) == 1
