"""Rows of text files: what cannot be read is named with its file and line, and the others are read all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.heads.errors import UserError
from draftsmith.inference.rows import RowError, conversation_of, read_json_rows

SOUND = '{"prompt": "x"}'
BROKEN = {
    "nested": ("[" * 100_000, "nested too deeply"),
    "many digits": ('{"n": ' + "9" * 6000 + "}", "not to be read: Exceeds the limit"),
    "NaN": ('{"n": NaN}', "NaN, which is no number in JSON"),
    "infinity": ('{"n": -Infinity}', "-Infinity, which is no number in JSON"),
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
    (tmp_path / "rows.json").write_text(line)
    with pytest.raises(UserError, match="name it .jsonl"):
        list(read_json_rows(tmp_path / "rows.json"))


def test_a_byte_order_mark_and_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\ufeff{"prompt": "\\ud83d\\ude00"}\n', encoding="utf-8")
    assert list(read_json_rows(tmp_path / "rows.jsonl")) == [("rows.jsonl:1", {"prompt": "\U0001f600"})]


@pytest.mark.parametrize(
    ("ids", "spans", "says"),
    [
        ([1, 2, True], [[0, 1]], "list of integers"),
        ([1, -2], [[0, 1]], "none below 0"),
        ([1, 2, 3, 4], [[0, 2], [1, 3]], "overlap"),
        ([1, 2, 3, 4], [[2, 4], [0, 3]], "overlap"),
        ([1, 2], [[1, 3]], "lies outside"),
        ([1, 2], [[0, True]], "pairs"),
    ],
)
def test_token_exact_rows_are_checked(ids: list[int], spans: list[list[int]], says: str) -> None:
    with pytest.raises(RowError, match=says):
        conversation_of({"token_ids": ids, "response_spans": spans})


def test_spans_may_touch() -> None:
    found = conversation_of({"token_ids": [1, 2, 3, 4], "response_spans": [[2, 4], [0, 2]]})
    assert found.response_spans == [(2, 4), (0, 2)]
