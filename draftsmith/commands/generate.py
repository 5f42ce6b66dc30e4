"""`draftsmith generate`: decodes prompts, and shows which drafts were accepted.

Replies are streamed with accepted drafts in green, and followed by a line about each.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from ..heads.errors import UserError
from ..inference.base.console import warn
from ..inference.base.settings import Sampling, SourceOptions, TargetConfig, TemplateOptions
from ..inference.conversations.formats import Conversation, conversation_of
from ..inference.conversations.messages import RowError, check_text
from ..inference.conversations.prompts import (
    STANDARD_INPUT,
    Prompt,
    check_source,
    next_turn,
    words_or_rows,
)
from ..inference.conversations.rendering import prompt_ids
from ..inference.conversations.rows import SourceNotes
from ..inference.conversations.templates import check_template_kwargs

if TYPE_CHECKING:
    from ..inference.api import Decoder, Reply
    from ..inference.decode import Generation, Request

HEADING = 60  # characters of a prompt that are shown above its reply
# Green of the terminal's own palette, which themes choose to be readable on their background.
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass
class GenerateOptions(SourceOptions, TemplateOptions):
    """Decode prompts, and show which drafts were accepted.

    Accepted drafts are green, the target's own tokens plain.

    `--sampling.temperature 0.7` may be written `--temperature 0.7`, and so on.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith generate --target TARGET --drafter runs/medusa/best --prompt 'def add(a, b):'",
        "draftsmith generate --target TARGET --drafter ngram:length=8 --prompt - --temperature "
        "0.7 < prompt.txt",
        "draftsmith generate --target TARGET --drafter runs/eagle/best --prompts gsm8k",
    )

    target: TargetConfig
    prompt: str | None = None
    """Text of the user prompt; `-` reads it from standard input."""
    prompts: str | None = None
    """Prompts that are decoded one after the other: a benchmark or a file as `draftsmith evaluate`
    takes it, or a text file; `-` reads standard input. Each line of a text file or of
    standard input is one prompt or one JSON row."""
    drafter: str = "none"
    """Folder of a drafter or of a draft model, or none, ngram;
    settings follow a colon: ngram:length=8."""
    profile: str | None = None
    """Profile that draftsmith tune wrote; the drafter uses its settings."""
    max_new_tokens: int = 256
    """Largest number of tokens of the reply."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling settings; greedy if not given."""
    compare: bool = False
    """Decode plainly as well, and say how fast that is and whether the text is the same."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if (self.prompt is None) == (self.prompts is None):
            raise UserError("give either --prompt WORDS or --prompts FILE")


def run(options: GenerateOptions) -> None:
    """Decode the prompts, stream the replies, and print a line about each on stderr.

    Raises `UserError` for an empty prompt, and for one that is not UTF-8 text, before the target is
    loaded.
    """
    from ..inference.profile import read_profile
    from ..inference.proposers.registry import check_spec

    check_spec(options.drafter)
    check_template_kwargs(options.chat_template_kwargs)
    if options.profile is not None:
        read_profile(options.profile)
    prompts = prompts_of(options)
    decoder = load(options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its code in place of an error. Some streams
        # cannot be changed.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    for prompt in prompts:
        answer_turns(decoder, options, prompt)
    if in_color():
        print(f"{GREEN}green{RESET}: accepted drafts; the rest the target wrote", file=sys.stderr)


def prompts_of(options: GenerateOptions) -> list[Prompt]:
    """Return the prompts of the options, encoded. Raises `UserError`."""
    from ..inference.targets.target_files import tokenizer_of

    if options.prompts is None:
        given: list[tuple[str, Any]] = [("prompt", one_prompt(options.prompt or ""))]
    else:
        source = options.source(options.prompts)
        check_source(source, lines=True)
        given = [*words_or_rows(source)]
        if not given:
            name = "standard input" if options.prompts == STANDARD_INPUT else options.prompts
            raise UserError(f"{name} holds no prompts; give at least one")
    tokenizer, prompts = tokenizer_of(options.target), list[Prompt]()
    for number, (name, row) in enumerate(given):
        notes = SourceNotes()
        try:
            check_text(row)
            if not isinstance(row, str):
                conversation = conversation_of(row)
            elif tokenizer.chat_template:
                conversation = Conversation(messages=[{"role": "user", "content": row}])
            else:
                conversation = Conversation(text=row)
            conversation = conversation.with_arguments(options.chat_template_kwargs)
            ids = prompt_ids(conversation, tokenizer, options.target.path, notes)
            if not ids:
                raise RowError("the prompt is empty")
        except RowError as error:
            raise UserError(f"{name}: {error}; fix or remove it") from error
        notes.report(name)
        prompts.append(Prompt(name, ids, "", number, conversation, conversation.later))
    return prompts


def one_prompt(text: str) -> str:
    """Return the words of `--prompt`, or standard input for `-`. Raises `UserError` if empty."""
    try:
        words = sys.stdin.buffer.read().decode() if text == STANDARD_INPUT else text
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text") from error
    if not words.strip():
        raise UserError("the prompt is empty; give --prompt some words")
    return words


def load(options: GenerateOptions) -> Decoder:
    """Return the target and the drafter, with its tuned tree if there is a profile."""
    from ..inference.api import Decoder
    from ..inference.profile import tuned_setting
    from ..inference.proposers.registry import load_proposer
    from ..inference.targets.target import load_for_decoding
    from ..inference.targets.target_files import other_sampling

    target = load_for_decoding(options.target)
    other = other_sampling(target.model.generation_config, options.sampling)
    if other and not options.sampling.greedy:
        warn(f"target {target.name}: its {other}")
    temperature = options.sampling.temperature
    tuned = tuned_setting(options.profile, options.drafter, target, temperature)
    return Decoder(target, load_proposer(options.drafter, target, warn, tuned, choose=True))


def answer_turns(decoder: Decoder, options: GenerateOptions, prompt: Prompt) -> None:
    """Stream the reply to a prompt, and those to the later turns of its conversation."""
    from ..inference.decode import Request

    target = decoder.target
    room = target.max_positions - options.max_new_tokens
    following: Prompt | None = prompt
    turn = 0
    while following is not None:
        if options.prompts is not None:
            print(f"--- {prompt.id}: {heading(following.conversation)}", file=sys.stderr)
        # The number of the prompt is what its noise belongs to, as in `draftsmith evaluate`.
        request = Request(following.token_ids, prompt.place, turn)
        reply = answer(decoder, request, options)
        following = next_turn(
            following, reply.token_ids, target.tokenizer, target.name, target.eos_ids, room
        )
        turn += 1


def heading(conversation: Conversation | None) -> str:
    """Return the beginning of the last words of a conversation, as one line."""
    assert conversation is not None, "`prompts_of` gives every prompt one"
    last = conversation.messages[-1].get("content") if conversation.messages else conversation.text
    line = " ".join(str(last or "").split())
    return line if len(line) <= HEADING else line[: HEADING - 3] + "..."


def in_color() -> bool:
    """Return whether accepted drafts are green: on a terminal.

    NO_COLOR (https://no-color.org), if it is set and not empty, turns the colour off there.
    """
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def answer(decoder: Decoder, request: Request, options: GenerateOptions) -> Reply:
    """Stream the reply to a request, print a line about it on stderr, and return it.

    With `--compare` the same prompt is then decoded plainly, and a line says how fast that was and
    whether the text is the same.
    """
    from ..inference.api import Decoder
    from ..inference.proposers.ngram import PlainDecoding

    reply = stream(decoder, request, options)
    say(reply, options)
    if options.compare:
        plainly = Decoder(decoder.target, PlainDecoding())
        plain = stream(plainly, request, options, io.StringIO())
        compare(decoder, request, options, plain, reply)
    return reply


def say(reply: Generation, options: GenerateOptions) -> None:
    """Print the tokens, rounds, tau and speed of a reply on stderr."""
    from ..inference.metrics import emitted_per_round, tau, time_per_token

    rounds = len(reply.rounds)
    summary = f": tau {tau([emitted_per_round(reply)]):.2f}" if rounds else ""
    seconds = time_per_token(reply)
    speed = f", {1 / seconds:,.0f} tokens/s" if seconds else ""
    endings = {
        "length": f" (cut at {options.max_new_tokens})",
        "context": " (the target's positions are full)",
    }
    ended = endings.get(reply.finish_reason, "")
    print(
        f"{len(reply.token_ids)} tokens{ended} in {rounds} rounds{summary}{speed}",
        file=sys.stderr,
    )


def compare(
    decoder: Decoder,
    request: Request,
    options: GenerateOptions,
    plain: Generation,
    drafted: Generation,
) -> None:
    """Print the speed of plain decoding, whether its text is that of `drafted`, and remarks."""
    from ..inference.evaluation.figure_text import busy_now, slower
    from ..inference.evaluation.measure import difference, distinct_names
    from ..inference.metrics import time_per_token

    seconds, drafted_seconds = time_per_token(plain), time_per_token(drafted)
    speedup = seconds / drafted_seconds if seconds and drafted_seconds else None
    gain = f", {speedup:.2f}x with drafts" if speedup else ""
    speed = f"{1 / seconds:,.0f} tokens/s" if seconds else "no round"
    number = (request.id, request.sample)
    same = difference(decoder.target, plain, drafted, options.sampling, number)
    print(f"plain decoding: {speed}{gain}; {same}", file=sys.stderr)
    (name,) = distinct_names([decoder.proposer])
    for line in filter(None, [slower({name: speedup}), busy_now()]):
        print(line, file=sys.stderr)


def stream(
    decoder: Decoder, request: Request, options: GenerateOptions, stdout: TextIO | None = None
) -> Reply:
    """Write the reply to `stdout` (the standard output if None) as it is decoded, and return it."""
    from ..inference.decode import decode

    transcript = decoder.transcript(request, ())
    out, color, limit = stdout or sys.stdout, in_color(), options.max_new_tokens
    rounds = decode(decoder.target, decoder.proposer, [request], limit, options.sampling)
    for steps in rounds:
        _, step, reason = steps[0]
        write(transcript.pieces(step, reason), color, out)
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
