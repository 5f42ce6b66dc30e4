"""The choice of a few rows among many: by numbers that can be checked by eye, and at random."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.selection import (
    Units,
    balanced_order,
    describe_groups,
    prompt_text,
)


def test_sources_take_turns_then_categories_then_units() -> None:
    groups = [("a", "x")] * 4 + [("a", "y")] + [("b", "")] * 2
    units = [40, 10, 30, 10, 20, 8, 7]
    # a/x in the order of its units, the second row of unit 10 last: 1, 2, 0, 3; alternating with
    # a/y: 1, 4, 2, 0, 3; b: 6, 5. By the hashes of their names b comes before a, and x before y.
    assert balanced_order(groups, units) == [6, 1, 5, 4, 2, 0, 3]
    assert (
        describe_groups([groups[i] for i in balanced_order(groups, units)[:4]])
        == "1 a/x, 1 a/y, 2 b"
    )


def test_any_group_may_be_drawn_if_groups_outnumber_rows() -> None:
    groups = [(f"cat{i:02d}",) for i in range(57)]
    drawn = sorted(balanced_order(groups, list(range(57)))[:32])
    assert drawn[:5] != list(range(5)) and any(i > 50 for i in drawn)


def test_rows_are_drawn_evenly_from_three_large_sources() -> None:
    groups = [("chat", "")] * 1000 + [("code", "")] * 1000 + [("math", "")] * 1000
    drawn = balanced_order(groups, list(range(3000)))[:32]
    assert Counter(groups[i][0] for i in drawn) == {"chat": 11, "code": 11, "math": 10}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9))))
def test_all_rows_are_drawn_once_and_evenly(rows: list[tuple[str, str, int]]) -> None:
    groups = [(source, category) for source, category, _ in rows]
    order = balanced_order(groups, [unit for *_, unit in rows])
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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (chat("q", "a"), chat("q", "b", "q2", "c"), True),
        (chat("q", "a"), chat("r", "a"), False),
        (chat("q", "a") | {"id": 1}, chat("r", "a") | {"id": 1}, True),
        (chat("q", "a") | {"id": 1}, chat("q", "b") | {"id": 2}, True),
        (chat("q", "a") | {"id": 1}, chat("r", "a") | {"id": 2}, False),
        (chat("q", "a") | {"id": ""}, chat("r", "a") | {"id": ""}, False),
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
def test_rows_sharing_a_unit_are_grouped_in_any_order(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    assert (units_of([one, other])[0] == units_of([one, other])[1]) is same
    assert units_of([one, other]) == units_of([other, one])[::-1], "whatever comes first"


def units_of(rows: list[dict[str, Any]]) -> list[int]:
    units = Units()
    for row in rows:
        units.add(row, conversation_of(row), "s")
    return [units.of(row, conversation_of(row), "s") for row in rows]


def test_ids_are_those_of_a_source_and_a_chain_of_rows_is_one_unit() -> None:
    rows = [chat(f"q{i // 2}", "a") | {"id": (i + 1) // 2} for i in range(9)]
    assert len(set(units_of(rows))) == 1
    units, (one, other) = Units(), (chat("q", "a") | {"id": 1}, chat("r", "a") | {"id": 1})
    units.add(one, conversation_of(one), "s")
    units.add(other, conversation_of(other), "t")
    assert units.of(one, conversation_of(one), "s") != units.of(other, conversation_of(other), "t")


def test_prompt_includes_system_message_but_not_greeting() -> None:
    """A document may stand in the system prompt, and the same question after each."""
    greeted = [{"role": "assistant", "content": "hello"}, *chat("q", "b")["messages"]]
    document = [{"role": "system", "content": "a document"}, *chat("q", "a")["messages"]]
    rows = [{"messages": greeted}, {"messages": document}, chat("q", "c")]
    first, second, third = (prompt_text(conversation_of(row)) for row in rows)
    assert first == third != second
