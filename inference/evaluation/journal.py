"""What a long measurement has done so far, on disk: killed at any time, the same command goes on
behind it.

A file of lines beside the report: first what is measured (target, prompts, drafters, options,
machine), then one line for every finished piece of work. It is deleted when the report is whole.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ...heads.errors import UserError
from ..decode import Generation, Round

log = logging.getLogger(__name__)


class Journal:
    """Finished pieces of work by their keys; without a path they are remembered for this process
    only."""

    def __init__(self, report: str | None, identity: dict[str, Any], what: str) -> None:
        """`report`: the file that the measurement will write. A journal beside it whose `identity`
        is another is replaced. `what` is measured, for the log. Raises `UserError` where the folder
        cannot be written to."""
        self.path = journal_path(report) if report is not None else None
        self._done: dict[str, Any] = {}
        self._file: TextIO | None = None
        if self.path is None:
            return
        first = json.dumps({"identity": identity}, sort_keys=True)
        end = self._read(first)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+" if end else "w", encoding="utf-8")
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path.parent}: {error.strerror}; choose another output"
            ) from error
        if not end:
            self._append(first)
        elif self._done:
            log.info("%s: going on with %s that was interrupted", report, what)

    def _read(self, first: str) -> int:
        """Take over the whole lines of an earlier process; where they end in the file, 0 for
        nothing that is of use."""
        assert self.path is not None
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError:
            return 0
        if (
            not lines
            or lines[0].decode(errors="replace").rstrip("\n") != first
            or not lines[0].endswith(b"\n")
        ):
            return 0
        end = len(lines[0])
        for line in lines[1:]:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or entry != _entry(entry.get("key"), entry.get("value")):
                # a line that was being written when the process died, or that has changed since
                break
            self._done[entry["key"]] = entry["value"]
            end += len(line)
        return end

    def _append(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def get(self, key: str) -> Any:
        """What was put under `key`, as JSON gives it back; None for work that is still to be
        done."""
        return self._done.get(key)

    def put(self, key: str, value: Any) -> None:
        """Note a finished piece of work; `value` is anything that JSON can hold."""
        if self._file is not None:
            self._done[key] = value
            self._append(json.dumps(_entry(key, value)))

    @property
    def resumed(self) -> bool:
        """Whether there is work in it that need not be done again."""
        return bool(self._done)

    def finish(self) -> None:
        """The report is whole: the journal goes."""
        if self._file is not None and self.path is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


def _entry(key: Any, value: Any) -> dict[str, Any]:
    """A line: the checksum is of key and value as JSON writes them, which is how they come back."""
    return {"key": key, "value": value, "crc32": zlib.crc32(json.dumps([key, value]).encode())}


def journal_path(report: str) -> Path:
    """Where the journal of a report stands."""
    path = Path(report)
    return path.parent / f".{path.name}.progress"


def as_json(found: dict[str, list[Generation]]) -> dict[str, list[dict[str, Any]]]:
    """Replies by the way that they were decoded in."""
    return {
        name: [asdict(generation) for generation in generations]
        for name, generations in found.items()
    }


def from_json(stored: dict[str, list[dict[str, Any]]]) -> dict[str, list[Generation]]:
    """What `as_json` was given."""
    return {name: [_generation(one) for one in generations] for name, generations in stored.items()}


def _generation(stored: dict[str, Any]) -> Generation:
    return Generation(**{**stored, "rounds": [Round(**round_) for round_ in stored["rounds"]]})
