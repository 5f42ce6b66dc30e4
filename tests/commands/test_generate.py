"""`draftsmith generate`: prompts of a file or of standard input, colours, characters."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.commands.cli import main
from draftsmith.commands.generate import (
    GREEN,
    RESET,
    GenerateOptions,
    compare,
    in_color,
    stream,
    write,
)
from draftsmith.inference.api import Decoder, Reply, Transcript
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.decode import Request, Round
from draftsmith.inference.evaluation import figure_text
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART
from tests.helpers.bad_input import expect, quick

BASE = ("--target", str(QUICKSTART), "--target.device", "cpu", "--max-new-tokens", "16")


def typed(monkeypatch: pytest.MonkeyPatch, words: str | bytes) -> None:
    given = words.encode() if isinstance(words, str) else words
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))


def test_prompts_are_decoded_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Words, a JSON row of two turns, and an empty line; the same from a file as from a pipe."""
    turns = json.dumps({"turns": ["def sub(a, b):", "def mul(a, b):"]})
    lines = f"def add(a, b):\n\n{turns}\n"
    typed(monkeypatch, lines)
    main(["generate", *BASE, "--prompts", "-"])
    piped = capsys.readouterr()
    headings = [line for line in piped.err.splitlines() if line.startswith("---")]
    assert headings == [
        "--- standard input:1: def add(a, b):",
        "--- standard input:3: def sub(a, b):",
        "--- standard input:3: def mul(a, b):",
    ]
    assert piped.err.count("tokens/s") == 3
    (tmp_path / "p.txt").write_text(lines)
    main(["generate", *BASE, "--prompts", str(tmp_path / "p.txt")])
    assert capsys.readouterr().out == piped.out
    main(["generate", *BASE, "--prompt", "def add(a, b):"])
    assert piped.out.startswith(capsys.readouterr().out)


def test_rows_are_those_that_evaluate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"}\n')
    expect(quick(capsys, "generate", *BASE, "--prompts", str(path)), "p.jsonl:2: not valid JSON")
    for lines, says in (
        (b'{"a": 1}\n', "standard input:1: none of the keys messages, "),
        (b"\xff\n", "standard input:1 is not UTF-8"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
        expect(quick(capsys, "generate", *BASE, "--prompts", "-"), says)


def test_generate_mistakes_are_reported_before_loading_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*options: str) -> subprocess.CompletedProcess[str]:
        return quick(capsys, "generate", *BASE, *options)

    expect(refused(), "give either --prompt WORDS or --prompts FILE")
    expect(refused("--prompt", "x", "--prompts", "-"), "either --prompt WORDS or --prompts")
    expect(refused("--raw"), "no option --raw any more: give a JSON row")
    expect(refused("--prompts", str(tmp_path / "no.jsonl")), "does not exist")
    (tmp_path / "empty.txt").write_text("\n")
    expect(refused("--prompts", str(tmp_path / "empty.txt")), "holds no prompts")
    typed(monkeypatch, "")
    expect(refused("--prompts", "-"), "standard input holds no prompts")


@pytest.mark.parametrize(
    ("variable", "terminal", "color"),
    [(None, True, True), (None, False, False), ("1", True, False), ("", True, True)],
)
def test_colour_depends_on_terminal_and_no_color(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, terminal: bool, color: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable is not None:
        monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert in_color() == color


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("text", ["日本語の文", "שלום עולם", "مرحبا", "👩‍👩‍👧 ok"])
def test_characters_are_written_whole(tiny: Target, text: str, accepted: int) -> None:
    """A byte-level tokenizer splits each of them over several tokens, and rounds split them too."""
    ids = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)
    transcript = Transcript(Reply([]), tiny.tokenizer, (), frozenset())
    for start in range(0, len(ids), 3):
        tokens, out = ids[start : start + 3], io.StringIO()
        step = Round(tokens=tokens, drafted=2, accepted=accepted)
        reason = "length" if start + 3 >= len(ids) else None
        before = len(transcript.reply.text)
        write(transcript.pieces(step, reason), True, out)
        plain, shown = transcript.reply.text[before:], out.getvalue()
        assert shown.replace(GREEN, "").replace(RESET, "") == plain and "\ufffd" not in plain
        assert shown.count(GREEN) == shown.count(RESET) <= 1
        shown.encode()  # no half of a surrogate pair
    assert transcript.reply.text == text


def test_comparison_reports_first_difference_and_slower_drafter(
    quickstart: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = Decoder(quickstart, NgramLookup())
    options = GenerateOptions(target=TargetConfig(path="-"), prompt="-", max_new_tokens=12)
    request = Request(decoder.encode("def add(a, b):", False, {}))
    replies = [stream(decoder, request, options, io.StringIO()) for _ in range(2)]
    plain, drafted = replies
    plain.decode_s, drafted.decode_s = 1.0, 1.1
    monkeypatch.setattr(figure_text, "load", lambda: 500.0)
    compare(decoder, request, options, plain, drafted)
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("; the same text")
    assert said[1] == "slower than plain decoding: ngram (0.91x)"
    assert said[2].startswith("the machine was busy (load 500.0 on ")
    drafted.token_ids = [*drafted.token_ids]
    drafted.token_ids[4] += 1
    compare(decoder, request, options, plain, drafted)
    (first, *_) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"another text from token 5 on, where the target's two best logits are \S+ apart", first
    )
