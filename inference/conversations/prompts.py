"""Prompts from sources and from lines of text, and the prompts of later turns."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.settings import BadRows, RowSource
from .formats import Conversation, conversation_of
from .messages import RowError
from .rendering import prompt_ids
from .rows import InMemoryRows, MalformedRows, SourceNotes, parsed
from .selection import Units, balanced_order, describe_groups
from .sources import (
    KINDS,
    benchmark_of,
    refuse_settings,
    rows_of,
    source_files,
    source_of,
)
from .templates import warn_of_plain_text

log = logging.getLogger(__name__)

STANDARD_INPUT = "-"


@dataclass
class Prompt:
    """Text that a request starts from."""

    id: str
    token_ids: list[int]
    category: str = ""
    place: int = 0
    """Number of the prompt among those that were read, from 0. All turns of a conversation have the
    same."""
    conversation: Conversation | None = None
    """Conversation that `token_ids` were rendered from; None if no turns follow."""
    later: list[str] = field(default_factory=list)
    """Further turns of the user (Spec-Bench, MT-Bench)."""
    unit: int = 0
    """Place of the first prompt of the same unit (`selection.Units`): together they are one
    observation of an interval."""


def read_prompts(
    path: str | Path | RowSource | InMemoryRows,
    tokenizer: Any,
    target_name: str,
    limit: int | None = None,
    bad_rows: BadRows = "stop",
    template_kwargs: JsonObject | None = None,
) -> list[Prompt]:
    """Read the prompts of any source of `words_or_rows`, at most `limit`.

    With a limit they are drawn evenly over the categories (`selection.balanced_order`), and stay in
    the order of the file. `target_name` is the target's name in messages; `template_kwargs` are
    arguments of its chat template, over which a row's own take precedence. Raises `UserError` for
    a source without prompts, and for a malformed row, drawn or not, unless `bad_rows` is skip.
    """
    chat = bool(getattr(tokenizer, "chat_template", None))
    plain, left_out, units = 0, MalformedRows(str(path), bad_rows), Units()
    notes = SourceNotes()
    rows: list[tuple[str, JsonObject, Conversation]] = []
    for name, raw in words_or_rows(str(path) if isinstance(path, Path) else path):
        if isinstance(raw, str):
            raw = {"messages": [{"role": "user", "content": raw}]} if chat else {"text": raw}
        try:
            conversation = conversation_of(raw).with_arguments(template_kwargs or {})
            rows.append((name, raw, conversation))
            units.add(raw, conversation)
        except RowError as error:
            left_out.add(name, error)
    of_units = [units.of(raw, conversation) for _, raw, conversation in rows]
    categories = [str(raw.get("category") or "") for _, raw, _ in rows]
    order: Sequence[int] = range(len(rows))
    if limit is not None:
        order = balanced_order([(category,) for category in categories], of_units)
    found: dict[int, Prompt] = {}
    for index in order:
        if limit is not None and len(found) == limit:
            break
        name, raw, conversation = rows[index]
        try:
            ids = prompt_ids(conversation, tokenizer, target_name, notes)
            if not ids:
                raise RowError("the prompt is empty")
        except RowError as error:
            left_out.add(name, error)
            continue
        plain += conversation.messages is None and conversation.token_ids is None
        given_id = str(raw.get("id", raw.get("question_id", name)))
        found[index] = Prompt(given_id, ids, categories[index], unit=of_units[index])
        if conversation.later:
            found[index].conversation, found[index].later = conversation, conversation.later
    prompts = [found[index] for index in sorted(found)]
    first: dict[int, int] = {}
    for place, prompt in enumerate(prompts):
        prompt.place, prompt.unit = place, first.setdefault(prompt.unit, place)
    if not prompts:
        why = ""
        if left_out.count:
            why = f"; the first of {left_out.count} malformed rows is {left_out.first}"
        raise UserError(f"{path} holds no prompts{why}; give at least one row")
    if limit is not None and len(prompts) == limit < len(rows):
        groups = [(prompt.category,) for prompt in prompts]
        log.info("%d of the %d rows of %s: %s", limit, len(rows), path, describe_groups(groups))
    warn_of_plain_text(plain, tokenizer, str(path))
    notes.report(str(path))
    return prompts


def check_batches(sizes: Sequence[int], prompts: Sequence[Prompt]) -> None:
    """Raise `UserError` unless there are as many prompts as rows in the largest batch.

    Figures of a batch of 64 with 8 prompts would be those of a batch of 8.
    """
    if max(sizes) > len(prompts):
        raise UserError(
            f"a batch of {max(sizes)} needs as many prompts, and there are {len(prompts)}; make "
            "it smaller"
        )


def check_room(prompts: Sequence[Prompt], positions: int) -> None:
    """Raise `UserError` unless every prompt leaves at least one of `positions` to a reply.

    The message names a prompt that does not.
    """
    for prompt in prompts:
        if len(prompt.token_ids) >= positions:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and leaves no room in "
                f"{positions} positions; shorten it or leave it out"
            )


def next_turn(
    prompt: Prompt,
    reply: list[int],
    tokenizer: Any,
    name: str,
    eos_ids: frozenset[int],
    room: int,
) -> Prompt | None:
    """Return the prompt of the next turn: the conversation, `reply`, and the user's next turn.

    None if the conversation has ended, or if the next prompt has more than `room` tokens. `name` is
    the target's name in messages.
    """
    if prompt.conversation is None or not prompt.later:
        return None
    # the chat template writes the end of the turn itself
    text = tokenizer.decode(reply[:-1] if reply and reply[-1] in eos_ids else reply)
    messages = [*(prompt.conversation.messages or []), {"role": "assistant", "content": text}]
    messages.append({"role": "user", "content": prompt.later[0]})
    conversation = replace(prompt.conversation, messages=messages, paths=[])
    try:
        ids = prompt_ids(conversation, tokenizer, name)
    except RowError as error:
        # The template cannot render the reply.
        log.warning("%s: the next turn is left out: %s", prompt.id, error)
        return None
    if len(ids) > room:
        return None
    return replace(prompt, token_ids=ids, conversation=conversation, later=prompt.later[1:])


def check_source(source: RowSource, lines: bool = False) -> None:
    """Raise `UserError` for a source of prompts that cannot be read here.

    Standard input and files of lines are read with `lines` only: elsewhere a table under another
    ending would be taken for prompts. Whether the hub has a data set is not asked.
    """
    if lines and (source.path == STANDARD_INPUT or _is_text(source)):
        refuse_settings(source, "lines of text")
    elif benchmark_of(source) is None:
        source_files(source)


def _is_text(source: RowSource) -> bool:
    """Return whether a source is a file of lines, not one that `sources.rows_of` reads."""
    path = Path(source.path)
    return path.is_file() and not path.name.endswith(KINDS)


def words_or_rows(source: str | RowSource | InMemoryRows) -> Iterator[tuple[str, Any]]:
    """Yield the name of every prompt of a source, with the user's words or a row.

    `-` is standard input, line by line as it comes. A line of it, or of a text file, is a JSON row
    if it begins with a brace, else the words of a prompt; empty lines are left out. Other sources
    are benchmarks, and those of `sources.rows_of`. A line that is not JSON is a `RowError`. Raises
    `UserError`.
    """
    if isinstance(source, InMemoryRows):
        yield from source
        return
    source = source_of(source)
    if source.path == STANDARD_INPUT:
        yield from _of_lines("standard input", sys.stdin.buffer)
    elif _is_text(source):
        try:
            with Path(source.path).open("rb") as file:
                yield from _of_lines(source.path, file)
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}; check the path") from error
    elif (benchmark := benchmark_of(source)) is not None:
        for number, row in enumerate(benchmark.rows()):
            yield f"{benchmark.name}[{number}]", row
    else:
        yield from rows_of(source)


def _of_lines(name: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        try:
            words = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 text; convert it") from error
        if words.startswith("{"):
            try:
                yield where, parsed(words)
            except RowError as error:
                yield where, error
        elif words:
            yield where, words
