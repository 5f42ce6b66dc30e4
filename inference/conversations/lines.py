"""Prompts that are decoded one after the other: lines of words or JSON rows, or a data source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ..settings import RowSource
from .benchmarks import benchmark_of, check_prompts
from .formats import Conversation, conversation_of
from .messages import RowError
from .rows import parsed
from .sources import KINDS, refuse_settings, rows_of, source_of

STANDARD_INPUT = "-"


def check_source(source: RowSource) -> None:
    """Raise `UserError` for a path that does not exist, or a folder without rows."""
    if source.path == STANDARD_INPUT or is_text(source):
        refuse_settings(source, "lines of text")
    else:
        check_prompts(source)


def is_text(source: RowSource) -> bool:
    """Return whether a source is a file of lines, not one that `sources.rows_of` reads."""
    path = Path(source.path)
    return path.is_file() and not path.name.endswith(KINDS)


def words_or_conversations(
    source: str | RowSource, standard_input: Iterable[bytes]
) -> Iterator[tuple[str, str | Conversation]]:
    """Yield the name of every prompt of a source, with the user's words or a conversation.

    `-` reads `standard_input`, line by line as it comes. A line of it, or of a text file, is a JSON
    row if it begins with a brace, else the words of a prompt; empty lines are left out. Other
    sources are benchmarks, and those of `sources.rows_of`. Raises `UserError`, for a malformed row
    among others.
    """
    source = source_of(source)
    if source.path == STANDARD_INPUT:
        yield from _of_lines("standard input", standard_input)
    elif is_text(source):
        try:
            with Path(source.path).open("rb") as file:
                yield from _of_lines(source.path, file)
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}; check the path") from error
    elif (benchmark := benchmark_of(source)) is not None:
        for number, row in enumerate(benchmark.rows()):
            name = f"{benchmark.name}[{number}]"
            yield name, row if isinstance(row, str) else _conversation(name, row)
    else:
        for name, row in rows_of(source):
            yield name, _conversation(name, row)


def _of_lines(name: str, lines: Iterable[bytes]) -> Iterator[tuple[str, str | Conversation]]:
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        try:
            words = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 text; convert it") from error
        if words.startswith("{"):
            yield where, _conversation(where, words)
        elif words:
            yield where, words


def _conversation(where: str, row: Any) -> Conversation:
    """Return the conversation of a row, or of its JSON text. Raises `UserError`."""
    try:
        return conversation_of(parsed(row) if isinstance(row, str) else row)
    except RowError as error:
        raise UserError(f"{where}: {error}; fix or remove it") from error
