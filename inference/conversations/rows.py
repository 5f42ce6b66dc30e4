"""Rows of JSON and JSONL files, and the treatment of malformed ones."""

from __future__ import annotations

import gzip
import io
import logging
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ..settings import BadRows
from .messages import RowError, parsed

log = logging.getLogger(__name__)

SHARES = "share-*.jsonl"
"""Files that several workers of `data regenerate` write into one folder. A lost worker leaves its
last line unfinished, and the others never change its file."""


class LeftOut:
    """Malformed rows of a source: the first ends the command, or each is left out with a warning.

    `count` is the number of rows left out, `first` the name and the error of the first one.
    `option` is the option by which the user leaves rows out, for the message.
    """

    NAMED = 20  # rows that a warning names

    def __init__(self, source: str, bad_rows: BadRows, option: str = "--bad-rows") -> None:
        self._source, self._bad_rows, self._option = source, bad_rows, option
        self.count = 0
        self.first = ""

    def add(self, name: str, error: RowError) -> None:
        """Raise `UserError` for the row, or count it, as `bad_rows` says."""
        if self._bad_rows == "stop":
            remedy = f"fix or remove it, or leave out such rows with {self._option} skip"
            raise UserError(f"{self._source}: row {name}: {error}; {remedy}")
        self.count += 1
        self.first = self.first or f"{name} ({error})"
        if self.count <= self.NAMED:
            log.warning("%s: row %s is left out: %s", self._source, name, error)
        elif self.count == self.NAMED + 1:
            log.warning("%s: more rows are left out, which are not named", self._source)


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a JSON or JSONL file, compressed (.gz) or not.

    The value of a line that is not JSON is a `RowError`, so that the caller may leave it out. The
    last line of a file of `SHARES` is left out, with a warning, if it was not finished.
    Raises `UserError` for a file that cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            if path.name.removesuffix(".gz").endswith(".json"):
                rows = _rows_of_text(file.read(), path)
            else:
                rows = _rows_of_lines(file, path)
            yield from ((f"{path.name}:{number}", row) for number, row in rows)
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8 text; convert it to UTF-8") from error
    except EOFError as error:
        raise UserError(f"cannot read {path}: its end is missing; copy it again") from error
    except zlib.error as error:
        raise UserError(f"cannot read {path}: it is damaged; copy it again") from error
    except OSError as error:
        reason = error.strerror or "it is not compressed by gzip"
        raise UserError(f"cannot read {path}: {reason}; check the path") from error


def _rows_of_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of every line of a file, as `read_json_rows` says."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, parsed(line.rstrip("\n"))
            except RowError as error:
                if not line.endswith("\n") and path.match(SHARES):
                    log.warning("%s: the last line was not finished, and is left out", path)
                    return
                yield number, error


def _rows_of_text(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Return the number and the value of every row of a .json file. Raises `UserError`.

    It holds a list of rows or, as many on the hub do, one object a line.
    """
    try:
        rows = parsed(text)
    except RowError as error:
        first, _, more = text.strip().partition("\n")
        try:
            by_line = bool(more) and isinstance(parsed(first), dict)
        except RowError:
            by_line = False
        if by_line:
            return _rows_of_lines(io.StringIO(text), path)
        raise UserError(f"{path} is {error}; for one object a line, name it .jsonl") from error
    if isinstance(rows, list):
        return enumerate(rows, 1)
    remedy = "put [ ] around its rows"
    for key, value in rows.items() if isinstance(rows, dict) else ():
        if isinstance(value, list) and key != "messages":
            remedy = f"write the list under {key!r} to a file of its own"
    raise UserError(f"{path} must hold a list of rows; {remedy}")
