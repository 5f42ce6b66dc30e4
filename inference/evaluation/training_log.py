"""Log of a training run: `metrics.jsonl` in its output folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from ...heads.errors import UserError
from ...heads.files import JsonObject

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[JsonObject]:
    """Return the rows that a training run has logged, at least one.

    A last line that a killed run has left half-written is left out, with a warning. Raises
    `UserError` for a file that cannot be read, for another line that is no row, and for a log
    without rows.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} ({error}); name the folder of a training run"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _ = row["step"] + 0  # raises TypeError for a step that is no number
            rows.append({name: math.nan if v is None else v for name, v in row.items()})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                raise UserError(
                    f"{path} is no log of a training run: line {number} holds no step; fix or "
                    "remove it"
                ) from error
            log.warning("%s: its last line is not whole and is left out", path)
    if not rows:
        raise UserError(f"{path} holds no step yet; wait until the run has logged one")
    return rows


def repair_metrics(path: Path) -> None:
    """End the log `path` with a whole line, so that the next one does not follow on half a line.

    What a killed run, or one on a full disk, has left half-written is cut off, with a warning. A
    log that does not exist is left so.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return
        try:
            json.loads(content[whole:])
            file.write(b"\n")  # all but the end of the line was written
        except ValueError:
            log.warning("%s: its last line was not whole and is cut off", path)
            file.truncate(whole)
