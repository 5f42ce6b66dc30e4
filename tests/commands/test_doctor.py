"""`draftsmith doctor --chat`: rows as training learns them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands import doctor
from draftsmith.commands.cli import main
from draftsmith.commands.doctor import ShownSequence, TokenRun
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.rows import SourceNotes
from draftsmith.inference.targets.target import Target, load_target
from draftsmith.train.data.config import Data, Source
from draftsmith.train.data.tables import build
from tests.helpers.bad_input import expect, quick
from tests.helpers.published_templates import COLUMNS, Words, row_of
from tests.helpers.row_formats import REFUSED
from tests.helpers.row_formats import ROWS as ROWS_OF_OTHERS
from tests.helpers.rows import write

ASKED = {"role": "user", "content": "hello"}
ROWS: list[Any] = [
    {"messages": [ASKED, {"role": "assistant", "content": "I am [fine]"}]},
    {"messages": [ASKED]},
    {"token_ids": [2, 70, 71, 3, 72, 1], "response_spans": [[4, 6]]},
    {"text": "a fourth row, which is not shown"},
]


def test_rows_of_a_file_are_shown_with_what_is_learned_in_brackets(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    main(["doctor", "--target", str(saved_tiny), "--device", "cpu", "--chat", rows])
    out = capsys.readouterr().out
    assert "<u>hello<e><a>[[I am [fine]<e>]]\n" in out and "fourth" not in out
    assert "--- chat rows.jsonl:3: 6 tokens, 2 learned" in out


def test_without_a_file_a_probe_is_shown_and_json_has_it(
    saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--target", str(saved_tiny), "--device", "cpu", "--chat", "--json", "-"])
    row = json.loads(capsys.readouterr().out)[-1]
    (sequence,) = row["sequences"]
    runs = [(run["text"], run["learned"]) for run in sequence["runs"]]
    assert runs == [
        ("<u>one<e><a>", False), ("two<e>", True), ("<u>three<e><a>", False), ("four<e>", True),
    ]  # fmt: skip
    assert (row["check"], row["status"]) == ("chat probe", "ok")
    assert 0 < sequence["learned"] < sequence["tokens"]


def test_a_row_that_cannot_be_rendered_shows_its_error(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"messages": []}, *ROWS[1:2]])
    base = ("doctor", "--target", saved_tiny, "--device", "cpu", "--json", "-", "--chat")
    done = quick(capsys, *base, rows)
    bad, nothing = json.loads(done.stdout)[-2:]
    assert done.returncode == 2
    assert bad["status"] == "error" and "messages" in bad["found"] and bad["sequences"] == []
    assert nothing["status"] == "warning" and nothing["found"] == "learned: none"
    expect(quick(capsys, *base, tmp_path / "no.jsonl"), "does not exist")
    expect(quick(capsys, *base, write(tmp_path / "empty.jsonl", [])), "holds no rows")
    expect(quick(capsys, "doctor", "--chat"), "--chat needs a chat template")


def test_learned_line_breaks_are_drawn_in_colour_and_without() -> None:
    runs = [TokenRun("<a>\n", False), TokenRun("two<e>\n", True)]
    sequence = ShownSequence(5, 3, runs)
    assert sequence.drawn(False).plain == "<a>\n[[two<e>\u21b5\n]]"
    text = sequence.drawn(True)
    assert text.plain == "<a>\ntwo<e>\u21b5\n"
    (span,) = text.spans
    assert (text.plain[span.start : span.end], span.style) == ("two<e>\u21b5\n", "green")


def test_doctor_and_the_run_refuse_the_same(tmp_path: Path, quickstart: Target) -> None:
    """By the same words: the rows of other formats, and those that the template does not carry."""
    rows = [row for row, _ in [*REFUSED, *ROWS_OF_OTHERS.values()]]
    rows += [row_of(kind, Words()) for kind in COLUMNS]
    refused = 0
    for row in rows:
        path = write(tmp_path / "rows.jsonl", [row])
        found = doctor.check_row("rows.jsonl:1", row, quickstart, {}, SourceNotes())
        with pytest.raises(UserError) as error:
            # One row leaves nothing to hold out, which is another error.
            build(Data([Source(path)], max_lost_share=1), quickstart, 0)
        if found.status == "error":
            refused += 1
            assert f"row rows.jsonl:1: {found.found}; fix or remove it" in str(error.value)
        else:
            assert "row rows.jsonl:1" not in str(error.value), row
    assert refused > len(REFUSED)


def test_doctor_reports_ignored_keys_and_ineffective_end_tokens(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    target.model.generation_config.eos_token_id = [2]
    target.model.save_pretrained(tmp_path / "t")
    target.tokenizer.save_pretrained(tmp_path / "t")
    row = {"messages": [ASKED, {"role": "assistant", "content": "fine", "mood": 3}], "lang": "en"}
    rows = write(tmp_path / "rows.jsonl", [row])
    main(["doctor", "--target", str(tmp_path / "t"), "--json", "-", "--chat", rows])
    found = {(one["check"], one["status"]): one["found"] for one in json.loads(
        capsys.readouterr().out)}  # fmt: skip
    assert "<e>, which does not end generation" in found["end of a turn", "warning"]
    assert found["chat rows", "warning"] == "ignored keys: lang, mood of messages of the assistant"
