"""`draftsmith generate`: decode one prompt, stream it, and colour what the drafter guessed right."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from ..heads.errors import UserError
from .decode import Generation, Round, decode
from .metrics import kept_per_round, tau
from .proposer import PlainDecoding, Proposer, load_proposer
from .rows import Conversation, prompt_ids
from .target import Target, TargetConfig, load_target

EXAMPLE = "draftsmith generate --target TARGET --drafter runs/medusa/best --prompt 'def add(a, b):'"
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass
class Options:
    """Decode one prompt and show what was accepted: accepted drafts in green, the target's own tokens plain."""

    target: TargetConfig
    prompt: str
    """The user's words; `-` reads them from standard input."""
    drafter: str | None = None
    """Drafter folder; plain decoding if not given."""
    max_new_tokens: int = 256
    """Longest reply."""
    tree_nodes: int | None = None
    """Drafted nodes of the tree; the drafter's own setting if not given."""
    color: bool | None = None
    """Colour accepted drafts; only on a terminal if not given."""
    raw: bool = False
    """Give the prompt to the target as it is, without the chat template."""


def run(options: Options) -> None:
    target = load_target(options.target)
    proposer: Proposer = PlainDecoding()
    if options.drafter is not None:
        extra = {} if options.tree_nodes is None else {"tree_nodes": options.tree_nodes}
        proposer = load_proposer(options.drafter, target, lambda m: print(f"warning: {m}", file=sys.stderr), **extra)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt some words")
    chat = bool(target.tokenizer.chat_template) and not options.raw
    conversation = Conversation(messages=[{"role": "user", "content": text}]) if chat else Conversation(text=text)
    color = options.color if options.color is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ
    generation = stream(target, proposer, prompt_ids(conversation, target.tokenizer, target.name), options.max_new_tokens, color)
    rounds = len(generation.rounds)
    print(
        f"{len(generation.token_ids)} tokens in {rounds} rounds: tau {tau([kept_per_round(generation)]):.2f}" if rounds else "",
        file=sys.stderr,
    )


def stream(
    target: Target, proposer: Proposer, ids: list[int], max_new_tokens: int, color: bool, out: TextIO | None = None
) -> Generation:
    """Write the reply as it is decoded and return it."""
    generation = Generation(ids)
    writer = _Writer(target.tokenizer, target.eos_ids, color, out or sys.stdout)
    for step in decode(target, proposer, ids, max_new_tokens, target.eos_ids):
        if step.drafted is not None:
            generation.rounds.append(step)
        generation.token_ids.extend(step.tokens)
        writer.write(step)
    writer.finish()
    return generation


class _Writer:
    """Text of tokens as soon as it is final: bytes of one character may be spread over several tokens."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], color: bool, out: TextIO) -> None:
        self._tokenizer, self._eos, self._color, self._out = tokenizer, eos_ids, color, out
        self._tokens: list[int] = []
        self._shown = ""

    def write(self, step: Round) -> None:
        for place, token in enumerate(step.tokens):
            if token not in self._eos:
                self._tokens.append(token)
                self._show(accepted=place < step.accepted)
        self._out.flush()

    def _show(self, accepted: bool, everything: bool = False) -> None:
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd") and not everything:
            return
        new, self._shown = text[len(self._shown) :], text
        if new:
            self._out.write(f"{GREEN}{new}{RESET}" if accepted and self._color else new)

    def finish(self) -> None:
        self._show(accepted=False, everything=True)
        self._out.write("\n")
        self._out.flush()
