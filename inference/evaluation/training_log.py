"""Log of a training run, `metrics.jsonl` in its output folder, and the table of several runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...heads.errors import UserError
from ...heads.files import JsonObject
from .figure_text import is_measured, number_text, number_with_interval
from .results import NAN
from .tables import FigureTable, table_of

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[JsonObject]:
    """Return the rows that a training run has logged, at least one.

    An incomplete last line of a killed run is left out, with a warning. Raises `UserError` for a
    file that cannot be read, for any other invalid line, and for a log without rows.
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
            _ = row["step"] + 0  # raises TypeError unless the step is a number
            rows.append({name: math.nan if v is None else v for name, v in row.items()})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                raise UserError(
                    f"{path} is not the log of a training run: line {number} holds no step; fix or "
                    "remove it"
                ) from error
            log.warning("%s: its last line is not whole and is left out", path)
    if not rows:
        raise UserError(f"{path} holds no step yet; wait until the run has logged one")
    return rows


def repair_metrics(path: Path) -> None:
    """Cut an incomplete last line off the log `path`, if it exists, with a warning.

    A killed run, or one on a full disk, may have left it; the next row must not continue it.
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


@dataclass(frozen=True)
class Training:
    """Training run with the rows of its log."""

    name: str
    rows: Sequence[JsonObject]

    def curve(self, key: str, evaluated: bool | None = None) -> dict[float, float]:
        """Return the finite values of `key` by their steps, in order.

        `evaluated` selects rows of evaluations or of training; None selects both. A step that was
        logged again after a restart counts once, with its last value.
        """
        values = {}
        for row in self.rows:
            wanted = evaluated is None or evaluated == ("tau_estimated" in row)
            if wanted and is_measured(row.get(key)):
                values[row["step"]] = row[key]
        return dict(sorted(values.items()))

    def tau(self, step: float) -> tuple[float | None, tuple[float | None, float | None]]:
        """Return tau as measured at a step, with its 95% interval; None for unknown figures."""
        measured, low, high = (
            self.curve(f"tau_measured{edge}").get(step) for edge in ("", "_low", "_high")
        )
        return measured, (low, high)


def trainings(runs: Sequence[Training]) -> FigureTable | None:
    """Return a row for each training run, with its end and its best evaluation; None without runs.

    The best evaluation has the highest measured tau, or estimated tau if nothing was measured. A
    drafter that was trained further has a tau before its first step.
    """
    rows = []
    for run in runs:
        measured, estimated = run.curve("tau_measured"), run.curve("tau_estimated")
        taus = measured or estimated
        best = max(taus, key=lambda step: taus[step], default=NAN)
        rows.append({
            "run": run.name,
            "steps": f"{max(row['step'] for row in run.rows):.0f}",
            "last loss": number_text([None, *run.curve("loss").values()][-1], ".3f"),
            "tau before training": number_with_interval(*run.tau(0))
            if 0 in measured
            else number_text(estimated.get(0)),
            "best tau, measured": number_with_interval(*run.tau(best)),
            "tau, estimated there": number_text(estimated.get(best)),
            "at step": number_text(best, ".0f"),
        })  # fmt: skip
    return table_of("Training runs", rows) if rows else None
