"""`draftsmith generate`: decodes prompts, streams the replies, and colours the accepted drafts."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ...heads.errors import UserError
from ...inference.api import Decoder
from ...inference.console import warn
from ...inference.conversations.formats import Conversation
from ...inference.conversations.messages import RowError
from ...inference.conversations.notes import Notes
from ...inference.conversations.prompts import (
    STANDARD_INPUT,
    Prompt,
    check_source,
    next_turn,
    words_or_conversations,
)
from ...inference.conversations.rendering import prompt_ids
from ...inference.conversations.templates import check_template_kwargs
from ...inference.decode import Request
from ...inference.drafters import check_spec, load_proposer
from ...inference.evaluation.checks import tokenizer_of
from ...inference.profile import TuningProfile, read_profile
from ...inference.targets.target import load_for_decoding
from ...inference.targets.target_files import other_sampling
from .options import GenerateOptions as Options
from .streaming import answer, chat, check_template, print_legend

HEADING = 60  # characters of a prompt that are shown above its reply


def run(options: Options) -> None:
    """Decode the prompts, stream the replies, and print a line about each on stderr.

    Raises `UserError` for an empty prompt, and for one that is not UTF-8 text, before the target is
    loaded; standard input with several prompts is read as it comes.
    """
    check_spec(options.drafter)
    check_template_kwargs(options.chat_template_kwargs)
    if options.profile is not None:
        read_profile(options.profile)
    given: Iterable[tuple[str, str | Conversation]] = []
    if options.chat:
        check_template(options.target)
    elif options.prompts is not None:
        source = options.source(options.prompts)
        check_source(source)
        # Conversations get the template's arguments of the options.
        variables = options.chat_template_kwargs
        given = (
            (name, one if isinstance(one, str) else one.with_arguments(variables))
            for name, one in words_or_conversations(source, sys.stdin.buffer)
        )
        if options.prompts != STANDARD_INPUT:
            given = list(given)
            if not given:
                raise UserError(f"{options.prompts} holds no prompts; give at least one")
            check_conversations(given, options)
    else:
        given = [("prompt", one_prompt(options.prompt or ""))]
    decoder = load(options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its code in place of an error. Some streams
        # cannot be changed.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    if options.chat:
        chat(decoder, options)
        return
    count, accepted = 0, False
    for number, (name, prompt) in enumerate(given):
        accepted |= answer_turns(decoder, options, number, name, prompt)
        count += 1
    if not count:
        raise UserError("standard input holds no prompts; give at least one line")
    if accepted:
        print_legend()


def one_prompt(text: str) -> str:
    """Return the words of `--prompt`, or standard input for `-`. Raises `UserError` if empty."""
    try:
        words = sys.stdin.buffer.read().decode() if text == STANDARD_INPUT else text
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text") from error
    if not words.strip():
        raise UserError("the prompt is empty; give --prompt some words")
    return words


def check_conversations(given: Iterable[tuple[str, str | Conversation]], options: Options) -> None:
    """Raise `UserError` for a conversation without a prompt, or one that the template refuses."""
    tokenizer = tokenizer_of(options.target)
    for name, prompt in given:
        if isinstance(prompt, Conversation):
            ids_of(name, prompt, tokenizer, options.target.path)


def ids_of(name: str, conversation: Conversation, tokenizer: Any, target_name: str) -> list[int]:
    """Return the token ids of a conversation. Raises `UserError`, which says its `name`."""
    try:
        notes = Notes()
        ids = prompt_ids(conversation, tokenizer, target_name, notes)
        if not ids:
            raise RowError("the prompt is empty")
    except RowError as error:
        raise UserError(f"{name}: {error}; fix or remove it") from error
    notes.report(name)
    return ids


def load(options: Options) -> Decoder:
    """Return the target and the drafter, with its tuned tree if there is a profile."""
    target = load_for_decoding(options.target)
    other = other_sampling(target.model.generation_config, options.sampling)
    if other and not options.sampling.greedy:
        warn(f"target {target.name}: its {other}")
    tuned = None
    if options.profile is not None:
        tuned = TuningProfile(options.profile, target).setting(
            options.drafter, options.sampling.temperature, batch=1
        )
    return Decoder(target, load_proposer(options.drafter, target, warn, tuned, choose=True))


def answer_turns(
    decoder: Decoder, options: Options, number: int, name: str, given: str | Conversation
) -> bool:
    """Stream the reply to a prompt, and those to the later turns of its conversation.

    `number` is the prompt's among all, which its noise belongs to, as in `draftsmith evaluate`.
    Returns whether a draft was accepted.
    """
    target = decoder.target
    if isinstance(given, str):
        conversation = Conversation(text=given)
        ids = decoder.encode(given, template_kwargs=options.chat_template_kwargs)
    else:
        conversation, ids = given, ids_of(name, given, target.tokenizer, target.name)
    following: Prompt | None = Prompt(name, ids, "", number, conversation, conversation.later)
    room = target.max_positions - options.max_new_tokens
    turn, accepted = 0, False
    while (prompt := following) is not None:
        if options.prompts is not None:
            print(f"--- {name}: {heading(prompt.conversation)}", file=sys.stderr)
        reply = answer(decoder, Request(prompt.token_ids, number, turn), options)
        accepted |= any(step.accepted for step in reply.rounds)
        following = next_turn(
            prompt, reply.token_ids, target.tokenizer, target.name, target.eos_ids, room
        )
        turn += 1
    return accepted


def heading(conversation: Conversation | None) -> str:
    """Return the beginning of the last words of a conversation, as one line."""
    assert conversation is not None, "`answer_turns` gives every prompt one"
    last = conversation.messages[-1].get("content") if conversation.messages else conversation.text
    line = " ".join(str(last or "").split())
    return line if len(line) <= HEADING else line[: HEADING - 3] + "..."
