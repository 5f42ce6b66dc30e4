"""Journal of a long measurement on disk, from which the same command resumes after a kill.

It is a hidden file of JSON lines next to the report. The first line identifies the measurement
(target, prompts, drafters, options, machine); each further line is the key and value of a finished
piece of work. The journal is deleted when the report is complete.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, TextIO

import psutil

from ...heads.errors import UserError
from ...heads.files import JsonObject

log = logging.getLogger(__name__)


class Journal:
    """Finished pieces of work by their keys; without a path nothing is stored."""

    def __init__(self, report: str | None, identity: JsonObject, what: str) -> None:
        """Open the journal next to `report`, the file that the measurement will write.

        One with another `identity` is replaced. `what` names the work in the log, such as "an
        evaluation". Raises `UserError` where the folder cannot be written to.
        """
        self.path = journal_path(report) if report is not None else None
        self._done: JsonObject = {}
        self._file: TextIO | None = None
        if self.path is None:
            return
        # Sorted, so that equal facts make equal lines, which `_read` compares.
        first = json.dumps({"identity": identity}, sort_keys=True)
        end = self._read(self.path, first)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # "r+" keeps what the file holds, "w" empties it
            self._file = self.path.open("r+" if end else "w", encoding="utf-8")
            # drops a line that a killed process left incomplete
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path.parent}: {error.strerror}; choose another output"
            ) from error
        if not end:
            self._append(first)
        elif self._done:
            log.info("%s: resuming %s that was interrupted", report, what)

    def _read(self, path: Path, first: str) -> int:
        """Read the complete lines of an earlier process whose first line was `first`.

        Returns the byte position of their end in the file, 0 if nothing can be used.
        """
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError:
            return 0
        if not lines or lines[0] != f"{first}\n".encode():
            return 0
        end = len(lines[0])
        for line in lines[1:]:
            if not line.endswith(b"\n"):
                break  # it was being written when the process died
            try:
                key, value = json.loads(line)
                self._done[key] = value
            except (ValueError, TypeError, RecursionError):
                break  # it is damaged
            end += len(line)
        return end

    def _append(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")
            # on disk before the work counts as done: a machine may stop, not only the process
            self._file.flush()
            os.fsync(self._file.fileno())

    def get(self, key: str) -> Any:
        """Return the value of `key`, as JSON reads it back; None for unfinished work."""
        return self._done.get(key)

    def put(self, key: str, value: object) -> None:
        """Store a finished piece of work; JSON must be able to hold `value`."""
        if self._file is not None:
            self._done[key] = value
            self._append(json.dumps([key, value]))

    def finish(self) -> None:
        """Delete the journal; to be called when the report has been written."""
        if self._file is not None and self.path is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


def journal_path(report: str) -> Path:
    """Return the path of a report's journal, a hidden file next to it."""
    path = Path(report)
    return path.parent / f".{path.name}.progress"


def interruption_message(report: str, what: str) -> str:
    """Return the message for a user who interrupted: what was `what` (measured) and is kept."""
    journal, written = journal_path(report), Path(report)
    if journal.is_file():
        return f"what was {what} is kept in {journal}; the same command continues where it stopped"
    # The journal is deleted once the report is complete, before it is shown.
    if written.is_file() and written.stat().st_mtime > psutil.Process().create_time():
        return f"{report} is complete"
    return f"nothing was {what} yet; the same command begins again"
