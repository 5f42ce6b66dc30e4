"""`draftsmith data split`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands.split import SplitOptions, run
from draftsmith.heads.errors import UserError
from draftsmith.train.data.split import chance


def turns(number: int, count: int) -> list[dict[str, Any]]:
    """A log of one conversation: a row for each request, with all turns before it."""
    said = [{"role": "user", "content": f"question {number}"}]
    rows = []
    for turn in range(count):
        rows.append({"request": {"messages": [*said]}, "response": f"reply {turn}"})
        said += [
            {"role": "assistant", "content": f"reply {turn}"},
            {"role": "user", "content": "and then?"},
        ]
    return rows


def split(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[list[dict[str, Any]]]:
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(SplitOptions(str(folder / "all.jsonl"), str(folder / "out"), **options))
    sides = (folder / "out" / name for name in ("train.jsonl", "held_out.jsonl"))
    return [[json.loads(line) for line in out.open()] for out in sides]


def question(row: dict[str, Any]) -> str:
    return row["request"]["messages"][0]["content"]


def test_no_conversation_lies_on_both_sides(tmp_path: Path) -> None:
    """Of few rows, or of many; and what is added to a log moves nothing."""
    rows = [row for number in range(150) for row in turns(number, 1 + number % 3)]
    train, test = split(tmp_path, rows)
    asked = [{question(row) for row in side} for side in (train, test)]
    assert not asked[0] & asked[1] and len(asked[0] | asked[1]) == 150
    assert len(train) + len(test) == len(rows) and 5 <= len(asked[1]) <= 30
    more = [row for number in range(150, 200) for row in turns(number, 1)]
    grown = split(tmp_path, [*more, *rows])
    assert asked[1] <= {question(row) for row in grown[1]}
    assert not asked[1] & {question(row) for row in grown[0]}


def test_training_holds_out_rows_of_what_is_left() -> None:
    """Both choose conversations by chance, and not the same ones."""
    left = [unit for unit in range(2000) if chance("set aside", 0, unit) >= 0.05]
    assert 60 < sum(chance("held out", 0, unit) < 0.05 for unit in left) < 130


def test_the_last_turn_of_each_conversation_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any order, and of chat rows too; two equal requests are one."""
    logged = [turns(number, 1 + number % 3) for number in range(60)]
    chat = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a"}]
    }
    rows = [row for of_one in logged for row in of_one[::-1]]
    train, test = split(tmp_path, [*rows, chat, {"prompt": "def f():"}, chat], last_turn=True)
    kept = sorted(json.dumps(row) for row in [*train, *test])
    expected = [*(of_one[-1] for of_one in logged), chat, {"prompt": "def f():"}]
    assert kept == sorted(json.dumps(row) for row in expected)
    assert "123 rows, 62 without those that a later turn repeats" in capsys.readouterr().out


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    rows = turns(0, 5)
    with pytest.raises(UserError, match="5 rows, share 0.1, each conversation by chance"):
        split(tmp_path, rows)
    assert not (tmp_path / "out").exists()
    (tmp_path / "all.jsonl").rename(tmp_path / "train.jsonl")
    for data in (tmp_path / "train.jsonl", tmp_path):
        with pytest.raises(UserError, match="--out would be written over --data"):
            run(SplitOptions(str(data), str(tmp_path)))
    with pytest.raises(UserError, match="share must lie between 0 and 1"):
        SplitOptions("a", "b", share=1)
    with pytest.raises(UserError, match="fix or remove it"):
        split(tmp_path, [*rows, {"a": 1}])
