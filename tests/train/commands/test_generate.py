"""`draftsmith generate`: prompts of a file or of standard input, chat, colours, characters."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.api import Decoder, Reply, Transcript
from draftsmith.inference.conversations.prompts import words_or_conversations
from draftsmith.inference.decode import Request, Round
from draftsmith.inference.evaluation import remarks
from draftsmith.inference.proposers.ngram import NgramLookup, PlainDecoding
from draftsmith.inference.settings import TargetConfig
from draftsmith.inference.targets.target import Target
from draftsmith.train.commands.cli import main
from draftsmith.train.commands.options import GenerateOptions
from draftsmith.train.commands.streaming import (
    GREEN,
    RESET,
    chat,
    compare,
    in_color,
    one_interrupt,
    stream,
    write,
)
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


def test_rows_are_those_that_evaluate_reads(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    found = [given for _, given in words_or_conversations(str(path), [])]
    assert [type(given).__name__ for given in found] == ["Conversation"] * 2
    path.write_text('{"prompt": "a"}\n{"prompt"}\n')
    with pytest.raises(UserError, match=r"p.jsonl:2: not valid JSON.*fix or remove it"):
        list(words_or_conversations(str(path), []))
    with pytest.raises(UserError, match="standard input:2: no known format|standard input:2: "):
        list(words_or_conversations("-", [b"words\n", b'{"a": 1}\n']))
    with pytest.raises(UserError, match="standard input:1 is not UTF-8"):
        list(words_or_conversations("-", [b"\xff\n"]))


def test_generate_mistakes_are_reported_before_loading_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*options: str) -> subprocess.CompletedProcess[str]:
        return quick(capsys, "generate", *BASE, *options)

    expect(refused(), "--prompt WORDS, --prompts FILE, or --chat")
    expect(refused("--prompt", "x", "--prompts", "-"), "either --prompts or --prompt")
    expect(refused("--chat", "--prompts", "-"), "either --prompts or --chat")
    expect(refused("--raw"), "no option --raw any more: give a JSON row")
    expect(refused("--prompts", str(tmp_path / "no.jsonl")), "does not exist")
    (tmp_path / "empty.txt").write_text("\n")
    expect(refused("--prompts", str(tmp_path / "empty.txt")), "holds no prompts")
    typed(monkeypatch, "")
    expect(refused("--prompts", "-"), "standard input holds no prompts")


def test_a_target_without_a_template_cannot_chat(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, saved_tiny: Path
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(saved_tiny, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").write_bytes(b"not looked at")
    done = quick(capsys, "generate", "--target", folder, "--chat")
    expect(done, "has no chat template, so it cannot chat")


def test_a_chat_keeps_its_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quickstart: Target
) -> None:
    """The second reply is that to the conversation so far, whatever drafts."""
    typed(monkeypatch, "\ndef sub(a, b):\n")
    main(["generate", *BASE, "--chat", "--prompt", "def add(a, b):", "--drafter", "ngram"])
    said = capsys.readouterr()
    assert said.err.count("tokens/s") == 2
    decoder = Decoder(quickstart, PlainDecoding())
    messages = [{"role": "user", "content": "def add(a, b):"}]
    first = decoder.generate(messages, 16)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": "def sub(a, b):"})
    second = decoder.generate(messages, 16)
    assert said.out == f"{first.text}\n{second.text}\n"


def options(**more: Any) -> GenerateOptions:
    return GenerateOptions(None, prompt="x", max_new_tokens=64, **more)  # type: ignore


class Interrupting(io.StringIO):
    """Standard output whose third piece makes the user press Ctrl-C."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_a_reply_and_the_next_one_is_whole(quickstart: Target) -> None:
    decoder, out = Decoder(quickstart, NgramLookup()), Interrupting()
    request = Request(decoder.encode("def read_lines(path):"))
    with one_interrupt() as ended:
        cut = stream(decoder, request, options(), out, ended)
    assert cut.finish_reason == "interrupted" and len(cut.token_ids) < 32
    whole = stream(decoder, request, options(), io.StringIO())
    assert whole.text.startswith(cut.text) and len(whole.token_ids) > len(cut.token_ids)
    with pytest.raises(KeyboardInterrupt), one_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_conversation_that_outgrows_the_target_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "def a():\n" + "word " * 3000 + "\n")
    expect(quick(capsys, "generate", *BASE, "--chat"), "leaves no room")


@pytest.mark.full
def test_terminal_chat_ends_cleanly_on_ctrl_d_or_ctrl_c(quickstart: Target) -> None:
    """Ctrl-D ends it with status 0, and so does Ctrl-C between two replies."""
    code = "from draftsmith.train.commands.cli import main; main()"
    for key, line in ((b"\x04", b""), (b"\x03", b"the chat has ended")):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code, "generate", *BASE, "--chat"],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        said = until(ours, b"> ")
        os.write(ours, b"def add(a, b):\n")
        said += until(ours, b"tokens/s.*> ")
        for _ in range(10):  # a key that comes between the prompt and the read is lost
            if process.poll() is None:
                os.write(ours, key)
                said += until(ours, None, 5.0)
        assert process.wait(60) == 0, said
        assert line in said and b"Traceback" not in said and GREEN.encode() not in said


def until(terminal: int, pattern: bytes | None, seconds: float = 120.0) -> bytes:
    """Return what the terminal shows up to `pattern`; without one all that comes in `seconds`."""
    said, deadline = b"", time.monotonic() + seconds
    while pattern is None or not re.search(pattern, said, re.DOTALL):
        if time.monotonic() > deadline:
            assert pattern is None, said
            break
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(terminal, 1024)
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            assert pattern is None, said
            break
        said += piece
    return said


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


def test_a_reply_that_is_ended_has_its_first_round(quickstart: Target) -> None:
    decoder, out = Decoder(quickstart, PlainDecoding()), io.StringIO()
    request = Request(decoder.encode("def add(a, b):"))
    reply: Reply = stream(decoder, request, options(), out, lambda: True)
    assert len(reply.token_ids) == 1 and out.getvalue() == reply.text + "\n"


def test_the_chat_command_reads_lines_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, quickstart: Target
) -> None:
    asked: list[Any] = []
    decoder = Decoder(quickstart, PlainDecoding())
    encode = decoder.encode
    monkeypatch.setattr(
        decoder, "encode", lambda given, **more: asked.append([*given]) or encode(given, **more)
    )
    typed(monkeypatch, "a\nb\n")
    chat(decoder, GenerateOptions(None, chat=True, max_new_tokens=4))  # type: ignore[arg-type]
    assert [len(messages) for messages in asked] == [1, 3]
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


def test_comparison_reports_first_difference_and_slower_drafter(
    quickstart: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = Decoder(quickstart, NgramLookup())
    options = GenerateOptions(target=TargetConfig(path="-"), prompt="-", max_new_tokens=12)
    request = Request(decoder.encode("def add(a, b):", False, {}))
    replies = [stream(decoder, request, options, io.StringIO()) for _ in range(2)]
    plain, drafted = replies
    plain.decode_s, drafted.decode_s = 1.0, 1.1
    monkeypatch.setattr(remarks, "load", lambda: 500.0)
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
