"""Rows of text files: what cannot be read is named with its file and line, and the others are read
all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.inference.conversations.rows import read_json_rows

KEYS = [
    "token_ids", "response_spans", "regenerated", "messages", "conversations", "request", "body",
    "response", "turns", "prompt",
    "completion", "text", "tools", "chat_template_kwargs", "role", "content", "from", "value",
    "choices", "message",
]  # fmt: skip
SOUND = '{"prompt": "x"}'
BROKEN = {
    "nested": ("[" * 100_000, "not valid JSON: maximum recursion depth"),
    "many digits": ('{"n": ' + "9" * 6000 + "}", "not valid JSON: Exceeds the limit"),
    "NaN": ('{"n": NaN}', "NaN, which is not a number in JSON"),
    "infinity": ('{"n": -Infinity}', "-Infinity, which is not a number in JSON"),
    "half a surrogate pair": ('{"prompt": "\\ud83d"}', "one half of a surrogate pair"),
    "cut off": ('{"prompt": "x', "not valid JSON: Unterminated string"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_is_named_and_the_others_are_read(kind: str, tmp_path: Path) -> None:
    line, says = BROKEN[kind]
    (tmp_path / "rows.jsonl").write_text(f"{SOUND}\n\n{line}\n{SOUND}\n")
    rows = list(read_json_rows(tmp_path / "rows.jsonl"))
    assert [name for name, _ in rows] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:4"]
    assert isinstance(rows[1][1], RowError) and says in str(rows[1][1])
    assert rows[0][1] == rows[2][1] == json.loads(SOUND)
    # A .json file may have one object a line too, but no list that is broken.
    (tmp_path / "rows.json").write_text(f"{SOUND}\n{line}\n")
    assert isinstance([row for _, row in read_json_rows(tmp_path / "rows.json")][1], RowError)
    (tmp_path / "rows.json").write_text(f"[{line}]")
    with pytest.raises(UserError, match="rows.json is .*; correct it"):
        list(read_json_rows(tmp_path / "rows.json"))


def test_a_byte_order_mark_and_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\ufeff{"prompt": "\\ud83d\\ude00"}\n', encoding="utf-8")
    assert list(read_json_rows(tmp_path / "rows.jsonl")) == [
        ("rows.jsonl:1", {"prompt": "\U0001f600"})
    ]


@pytest.mark.parametrize(
    ("ids", "spans", "says"),
    [
        ([1, 2, True], [[0, 1]], r"token_ids\[2\]: Expected int, got bool"),
        ([1, -2], [[0, 1]], r"token_ids\[1\]: Expected int >= 0"),
        ([1, 2, 3, 4], [[0, 2], [1, 3]], "overlap"),
        ([1, 2, 3, 4], [[2, 4], [0, 3]], "overlap"),
        ([1, 2], [[1, 3]], "lies outside"),
        (
            [1, 2],
            [[0, True]],
            r"response_spans\[0\]\[1\]: Expected int, got bool",
        ),
    ],
)
def test_token_exact_rows_are_checked(ids: list[int], spans: list[list[int]], says: str) -> None:
    with pytest.raises(RowError, match=says):
        conversation_of({"token_ids": ids, "response_spans": spans})


SAID = [{"role": "user", "content": "a"}]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(["", "x", "user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [{"role": "user"}]},
            r"messages\[0\]: a message of role user has no content or tool calls",
        ),
        (
            {"messages": [{"role": 3, "content": "x"}]},
            r"messages\[0\].role must be a text, not a number",
        ),
        ({"messages": SAID, "tools": "x"}, "tools is a text that is not JSON"),
        (
            {"messages": SAID, "chat_template_kwargs": [1]},
            "chat_template_kwargs must be an object, not a list",
        ),
        (
            {"request": {"messages": SAID, "chat_template_kwargs": [1]}},
            "request.chat_template_kwargs must be an object, not a list",
        ),
        (
            {"request": {"messages": SAID}, "response": {"choices": 3}},
            "response.choices must be a list, not a number",
        ),
        (
            {"request": {"messages": SAID}, "response": {"body": {}}},
            r"response.body: choices\[0\].message is missing",
        ),
        (
            {"conversations": [{"from": "x", "value": "y"}]},
            r"conversations\[0\].from is 'x', not one of human, .* rename it",
        ),
        ({"prompt": ["a", *SAID]}, r"prompt\[0\] must be an object, not a text"),
        ({"prompt": "a", "completion": SAID}, "the reply to a text is a text"),
        ({"turns": ["a", 3]}, r"turns\[1\] must be a text, not a number"),
        ({"text": 3}, "text must be a text, not a number"),
        (
            {"token_ids": [1], "response_spans": [[0, 1]], "regenerated": [1]},
            "regenerated: Expected object .*got array",
        ),
    ],
)
def test_the_value_that_is_wrong_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError, match=f"^{says}"):
        conversation_of(row)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5))
def test_arbitrary_rows_parse_or_raise_a_row_error(row: dict[str, Any]) -> None:
    try:
        found = conversation_of(row)
    except RowError as error:
        assert str(error)
    else:
        assert [found.messages, found.text, found.token_ids] != [None, None, None]
        assert all(isinstance(message["role"], str) for message in found.messages or [])


def test_a_log_may_hold_the_answer_as_text() -> None:
    found = conversation_of({"request": {"messages": SAID}, "response": "b"})
    assert found.messages == [*SAID, {"role": "assistant", "content": "b"}]


def test_spans_may_touch() -> None:
    found = conversation_of({"token_ids": [1, 2, 3, 4], "response_spans": [[2, 4], [0, 2]]})
    assert found.response_spans == [(2, 4), (0, 2)]
