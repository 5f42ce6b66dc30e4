"""Replies in the terminal, with accepted drafts in green and a line about each; and
`draftsmith generate --chat`, a conversation there or with lines of standard input."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from typing import TextIO

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...inference.api import Decoder, Reply
from ...inference.decode import Generation, Request, decode
from ...inference.evaluation.checks import tokenizer_of
from ...inference.evaluation.measure import difference, distinct_names
from ...inference.evaluation.remarks import busy_now, slower
from ...inference.metrics import emitted_per_round, tau, time_per_token
from ...inference.proposers.ngram import PlainDecoding
from ...inference.settings import TargetConfig
from ..endings import Ended, forget_interrupts
from .options import GenerateOptions as Options

# Green of the terminal's own palette, which themes choose to be readable on their background.
GREEN, RESET = "\x1b[32m", "\x1b[0m"
INTERRUPTED = "interrupted"  # finish reason of a reply that the user ended


def in_color() -> bool:
    """Return whether accepted drafts are green: on a terminal.

    NO_COLOR (https://no-color.org), if it is set and not empty, turns the colour off there.
    """
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def print_legend() -> None:
    """Print what the colour means, if there is one, on stderr."""
    if in_color():
        print(f"{GREEN}green{RESET}: accepted drafts; the rest the target wrote", file=sys.stderr)


def answer(
    decoder: Decoder, request: Request, options: Options, interruptible: bool = False
) -> Reply:
    """Stream the reply to a request, print a line about it on stderr, and return it.

    With `--compare` the same prompt is then decoded plainly, and a line says how fast that was and
    whether the text is the same. Ctrl-C ends the reply alone where it is `interruptible`.
    """
    with one_interrupt() if interruptible else nullcontext(lambda: False) as ended:
        reply = stream(decoder, request, options, ended=ended)
    say(reply, options)
    if options.compare:
        plainly = Decoder(decoder.target, PlainDecoding())
        plain = stream(plainly, request, options, io.StringIO())
        compare(decoder, request, options, plain, reply)
    return reply


def say(reply: Generation, options: Options) -> None:
    """Print the tokens, rounds, tau and speed of a reply on stderr."""
    rounds = len(reply.rounds)
    summary = f": tau {tau([emitted_per_round(reply)]):.2f}" if rounds else ""
    seconds = time_per_token(reply)
    speed = f", {1 / seconds:,.0f} tokens/s" if seconds else ""
    endings = {
        "length": f" (cut at {options.max_new_tokens})",
        "context": " (the target's positions are full)",
        INTERRUPTED: " (ended by Ctrl-C)",
    }
    ended = endings.get(reply.finish_reason, "")
    print(
        f"{len(reply.token_ids)} tokens{ended} in {rounds} rounds{summary}{speed}",
        file=sys.stderr,
    )


def compare(
    decoder: Decoder, request: Request, options: Options, plain: Generation, drafted: Generation
) -> None:
    """Print the speed of plain decoding, whether its text is that of `drafted`, and remarks."""
    seconds, drafted_seconds = time_per_token(plain), time_per_token(drafted)
    speedup = seconds / drafted_seconds if seconds and drafted_seconds else None
    gain = f", {speedup:.2f}x with drafts" if speedup else ""
    speed = f"{1 / seconds:,.0f} tokens/s" if seconds else "no round"
    if INTERRUPTED in (plain.finish_reason, drafted.finish_reason):
        same = "not compared, since a reply was ended"
    else:
        sampling, number = options.sampling, (request.id, request.sample)
        same = difference(decoder.target, plain, drafted, sampling, number)
    print(f"plain decoding: {speed}{gain}; {same}", file=sys.stderr)
    (name,) = distinct_names([decoder.proposer])
    for line in filter(None, [slower({name: speedup}), busy_now()]):
        print(line, file=sys.stderr)


def stream(
    decoder: Decoder,
    request: Request,
    options: Options,
    stdout: TextIO | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Reply:
    """Write the reply to `stdout` (the standard output if None) as it is decoded, and return it.

    `ended` is called after every round; the reply ends there once it returns True.
    """
    transcript = decoder.transcript(request, ())
    out, color, limit = stdout or sys.stdout, in_color(), options.max_new_tokens
    rounds = decode(decoder.target, decoder.proposer, [request], limit, options.sampling)
    for steps in rounds:
        _, step, reason = steps[0]
        if reason is None and ended():
            reason = INTERRUPTED
        write(transcript.pieces(step, reason), color, out)
        if reason == INTERRUPTED:
            rounds.close()
            break
    out.write("\n")
    out.flush()
    return transcript.reply


def write(pieces: list[tuple[str, bool]], color: bool, out: TextIO) -> None:
    """Write pieces of text; with `color`, those that were drafted are green."""
    # A colour begins and ends once in a step, so that no code comes between joined letters.
    for accepted, run in groupby(pieces, key=lambda piece: piece[1]):
        joined = "".join(piece for piece, _ in run)
        out.write(f"{GREEN}{joined}{RESET}" if color and accepted else joined)
    out.flush()


@contextmanager
def one_interrupt() -> Iterator[Callable[[], bool]]:
    """Note a first Ctrl-C in place of raising; yield a function that returns whether there was one.

    A second one raises `KeyboardInterrupt`.
    """
    seen = []

    def note(number: int, _frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def check_template(config: TargetConfig) -> None:
    """Raise `UserError` unless the target has a chat template. Its weights are not loaded."""
    if not tokenizer_of(config).chat_template:
        raise UserError(
            f"target {config.path} has no chat template, so it cannot chat; give --prompt, or a "
            "target with a template"
        )


def chat(decoder: Decoder, options: Options) -> None:
    """Answer one message of the user after the other, until the input ends.

    Every reply follows on the whole conversation. On a terminal Ctrl-C ends a reply, and between
    two replies the chat. Raises `UserError` where the conversation has outgrown the target.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # `input` edits lines and recalls them once it is imported
            import readline  # noqa: F401
        print("Ctrl-C ends a reply, Ctrl-D the chat", file=sys.stderr)
    print_legend()
    messages: list[JsonObject] = []
    words: str | None = options.prompt or ""
    while (words := words or next_message()) is not None:
        messages.append({"role": "user", "content": words})
        ids = decoder.encode(messages, template_kwargs=options.chat_template_kwargs)
        request = Request(ids, 0, len(messages) // 2)
        reply = answer(decoder, request, options, interruptible=terminal)
        messages.append({"role": "assistant", "content": reply.text})
        words = ""


def next_message() -> str | None:
    """Return the user's next message, a line that is not empty; None at the end of the input.

    Ctrl-C on a terminal is such an end. Raises `UserError` for a line that is not UTF-8 text.
    """
    terminal, words = sys.stdin.isatty(), ""
    while not words:
        try:
            if terminal and sys.stdout.isatty():
                words = input("> ").strip()
            elif line := sys.stdin.buffer.readline():
                words = line.decode().strip()
            else:
                return None
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt as interrupt:
            if not terminal or isinstance(interrupt, Ended):
                raise
            forget_interrupts()
            print("\nthe chat has ended", file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            raise UserError("standard input is not UTF-8 text; convert it") from error
    return words
