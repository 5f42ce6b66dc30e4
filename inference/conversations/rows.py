"""Rows from JSON files and from Python, malformed rows, and remarks about a source."""

from __future__ import annotations

import gzip
import io
import logging
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...heads.errors import UserError
from ...heads.files import checksum, whole_file
from ..base.console import plural
from ..base.settings import BadRows
from .messages import RowError, check_text, parsed

log = logging.getLogger(__name__)

SHARES = "share-*.jsonl"
"""Files that several workers of `data regenerate` write into one folder. A lost worker leaves its
last line unfinished, and the others never change its file."""


class MalformedRows:
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


class SourceNotes:
    """Keys that are not read, and remarks, each of which is reported once for a source."""

    def __init__(self) -> None:
        self._unread: dict[str, None] = {}
        self._remarks: Counter[str] = Counter()

    def add_unread_keys(self, names: Iterable[str]) -> None:
        """Add the names of keys that are ignored."""
        self._unread.update(dict.fromkeys(sorted(names)))

    def add_remark(self, remark: str) -> None:
        """Count a remark for one more row."""
        self._remarks[remark] += 1

    def lines(self) -> list[str]:
        """Return the notes as sentences, with the number of rows of each remark."""
        lines = [f"ignored keys: {', '.join(self._unread)}"] if self._unread else []
        remarks = self._remarks.items()
        return lines + [f"{remark} ({plural(count, 'row')})" for remark, count in remarks]

    def report(self, source: str) -> None:
        """Log the notes about a source."""
        for line in self.lines():
            log.warning("%s: %s", source, line)


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
    except (EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: it is damaged or cut off; copy it again") from error
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
    if not text.lstrip().startswith("["):
        return _rows_of_lines(io.StringIO(text), path)
    try:
        return enumerate(parsed(text), 1)
    except RowError as error:
        raise UserError(f"{path} is {error}; correct it") from error


@dataclass(frozen=True)
class InMemoryRows:
    """Rows given as Python objects, named after the argument: `data[3]`."""

    name: str
    rows: Iterable[Any]

    def __str__(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self.rows):
            try:
                check_text(row)
            except RowError as error:
                row = error
            yield f"{self.name}[{number}]", row


def rows_in_memory(given: Any, name: str) -> InMemoryRows:
    """Return rows, or prompts as texts, that a list or a data set of `datasets` holds.

    `name` is that of the argument, for messages. Raises `UserError` for objects of other types.
    """
    # If the package was not imported, no object can be one of its tables.
    datasets = sys.modules.get("datasets")
    tables = (datasets.Dataset, datasets.IterableDataset) if datasets else ()
    if not isinstance(given, (list, tuple, *tables)):
        raise UserError(
            f"{name} is a path, a list of rows, or a Dataset of the package datasets, not "
            f'{type(given).__name__}; use df.to_dict("records"), or one split of a DatasetDict'
        )
    return InMemoryRows(name, given)


def write_rows(given: InMemoryRows, path: Path) -> None:
    """Write rows to a JSONL file, whole or not at all; an equal file keeps its modification time.

    Raises `UserError`, also for a row that JSON cannot hold.
    """
    before = (checksum(path), path.stat()) if path.is_file() else None
    with whole_file(path) as aside, aside.open("wb") as file:
        for name, row in given:
            if isinstance(row, RowError):
                raise UserError(f"{name}: {row}; fix or remove it")
            try:
                # NaN becomes null, and times become texts.
                file.write(msgspec.json.encode(row, enc_hook=_plain) + b"\n")
            except (TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"{name} holds more than texts, numbers, lists and dicts; convert it"
                ) from error
    # Tables that were made from the file compare its time to see whether they are up to date.
    if before is not None and checksum(path) == before[0]:
        os.utime(path, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))


def _plain(value: Any) -> Any:
    """Return a mapping as a dict and an array as a list."""
    return dict(value) if isinstance(value, Mapping) else value.tolist()
