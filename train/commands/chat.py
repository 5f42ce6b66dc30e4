"""`draftsmith generate --chat`: a conversation in the terminal, or with lines of standard input."""

from __future__ import annotations

import sys
from contextlib import suppress

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...inference.api import Decoder
from ...inference.decode import Request
from ...inference.evaluation.checks import tokenizer_of
from ...inference.settings import TargetConfig
from ..endings import Ended, forget_interrupts
from .options import GenerateOptions as Options
from .streaming import answer, one_interrupt, print_legend


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
        reply = answer(decoder, request, options, one_interrupt() if terminal else None)
        messages.append({"role": "assistant", "content": reply.text})
        words = ""


def next_message() -> str | None:
    """Return the user's next message, a line that is not empty; None at the end of the input.

    Ctrl-C on a terminal drops the line, and a second one is such an end: the first may have been
    meant for a reply that has just ended. Raises `UserError` for a line that is not UTF-8 text.
    """
    terminal, interrupted = sys.stdin.isatty(), False
    words = ""
    while not words:
        try:
            if terminal and sys.stdout.isatty():
                words = input("> ").strip()
            else:
                line = sys.stdin.buffer.readline()
                if not line:
                    return None
                words = line.decode().strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt as interrupt:
            if not terminal or isinstance(interrupt, Ended):
                raise
            if interrupted:
                print("\nthe chat has ended", file=sys.stderr)
                return None
            interrupted = True
            forget_interrupts()
            print("\nCtrl-D, or Ctrl-C once more, ends the chat", file=sys.stderr)
        except UnicodeDecodeError as error:
            raise UserError("standard input is not UTF-8 text; convert it") from error
    return words
