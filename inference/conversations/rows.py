"""Rows of JSON and JSONL files, and the treatment of malformed ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ...heads.files import no_constant
from ..settings import BadRows
from .messages import RowError

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
    """Yield the name and the value of every row of a JSON or JSONL file.

    The value of a line that is not JSON is a `RowError`, so that the caller may leave it out. The
    last line of a file of `SHARES` is left out, with a warning, if it was not finished.
    Raises `UserError` for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}; check the path") from error
    if path.suffix == ".json":
        try:
            rows = parsed(text)
        except RowError as error:
            raise UserError(f"{path} is {error}; for one object a line, name it .jsonl") from error
        if not isinstance(rows, list):
            raise UserError(f"{path} must hold a list of rows")
        yield from ((f"{path.name}:{i}", row) for i, row in enumerate(rows, 1))
        return
    # not `splitlines`, which splits at characters that may be inside a JSON text
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path.name}:{number}", parsed(line)
            except RowError as error:
                if number == len(lines) and path.match(SHARES):
                    log.warning("%s: the last line was not finished, and is left out", path)
                    return
                yield f"{path.name}:{number}", error


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises `RowError`.

    Numbers have to be finite, and texts such that they can be written as UTF-8 again.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise RowError(
            f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except RecursionError as error:
        raise RowError("nested too deeply to be read") from error
    except ValueError as error:  # such as an integer of more digits than Python converts
        raise RowError(f"not to be read: {str(error).partition(';')[0]}") from error
    # Only an escape such as \ud83d can bring half of a surrogate pair into a text, so other rows
    # need not be encoded to find out.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("not text: it holds one half of a surrogate pair") from error
    return value
