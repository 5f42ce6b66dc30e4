"""Rows and prompts that Python gives as objects: lists, and data sets of the package datasets."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ...heads.files import checksum, whole_file
from .messages import RowError, check_text


@dataclass(frozen=True)
class GivenRows:
    """Rows that were given as objects. Those of a list are named after it: `data[3]`."""

    name: str
    rows: Iterable[Any]
    chat: bool = False
    """The target has a chat template: a text is a message of the user, else plain text."""

    def __str__(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self.rows):
            if isinstance(row, str):
                row = (
                    {"messages": [{"role": "user", "content": row}]} if self.chat else {"text": row}
                )
            try:
                check_text(row)
            except RowError as error:
                row = error
            yield f"{self.name}[{number}]", row


def given_rows(given: Any, name: str, split: str | None = None, chat: bool = False) -> GivenRows:
    """Return rows, or prompts as texts, that a list or a data set of `datasets` holds.

    `name` is that of the argument, for messages. Of a `DatasetDict` it is the `split`. Raises
    `UserError` for objects of other types, and without a split where one is needed.
    """
    # What is not imported has made none of the objects.
    datasets = sys.modules.get("datasets")
    of_splits = (datasets.DatasetDict, datasets.IterableDatasetDict) if datasets else ()
    tables = (datasets.Dataset, datasets.IterableDataset) if datasets else ()
    if isinstance(given, of_splits):
        if split not in given:
            what = f"has no split {split!r}" if split else f"is a {type(given).__name__}"
            splits = ", ".join(f"{name}[{str(one)!r}]" for one in given)
            raise UserError(f"{name} {what}; give one of its splits: {splits or 'it has none'}")
        given = given[split]
    elif split is not None:
        raise UserError(f"{name} has no splits; leave out split")
    if not isinstance(given, (list, tuple, *tables)):
        remedy = '; use df.to_dict("records")' if type(given).__name__ == "DataFrame" else ""
        raise UserError(
            f"{name} is a path, a list of rows, or a Dataset of the package datasets, not "
            f"{type(given).__name__}{remedy}"
        )
    for number, row in enumerate(given if isinstance(given, list | tuple) else ()):
        if not isinstance(row, str | Mapping):
            raise UserError(
                f"{name}[{number}] is of type {type(row).__name__}; a row is a dict such as "
                '{"messages": [...]} or {"prompt": ..., "completion": ...}'
            )
    return GivenRows(name, given, chat)


def write_rows(given: GivenRows, path: Path) -> None:
    """Write rows to a JSONL file, whole or not at all; one that is equal keeps its time.

    Raises `UserError`, also for a row that JSON cannot hold.
    """
    before = (checksum(path), path.stat()) if path.is_file() else None
    with whole_file(path) as aside, aside.open("w", encoding="utf-8") as file:
        for name, row in given:
            if isinstance(row, RowError):
                raise UserError(f"{name}: {row}; fix or remove it")
            try:
                file.write(json.dumps(_plain(row)) + "\n")
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{name} holds more than texts, numbers, lists and dicts; convert it"
                ) from error
    # By its time the tables that were made of it are known to be up to date.
    if before is not None and checksum(path) == before[0]:
        os.utime(path, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it: arrays as lists, times as texts, NaN as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value
