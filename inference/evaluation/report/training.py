"""Training runs on a report's page: a table of them, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ....heads.files import JsonObject
from ..results import NAN
from .axes import Axis
from .charts import COLOURS, Series, line_chart
from .page import Figure, side_by_side
from .tables import Table, by_column, is_finite, number, with_interval

STEPS = Axis("step", low=0)


@dataclass(frozen=True)
class Training:
    """Name of a training run, and the rows of its log."""

    name: str
    rows: Sequence[JsonObject]

    def curve(self, key: str, evaluated: bool | None = None) -> list[tuple[float, float]]:
        """Return (step, value) of every row with a finite value of `key`, by step.

        `evaluated` chooses rows of evaluations, or those of training; both if None. A step that was
        logged again after a restart counts once, with its last value.
        """
        values = {}
        for row in self.rows:
            wanted = evaluated is None or evaluated == ("tau_estimated" in row)
            if wanted and is_finite(row.get(key)):
                values[row["step"]] = row[key]
        return sorted(values.items())


def trainings(runs: Sequence[Training]) -> Table | None:
    """Return a row for each training run, with its end and its best evaluation; `None` for no runs.

    The best evaluation is the one of the highest measured tau, or of the highest estimated tau
    where nothing was measured. A drafter that was trained further has a tau before its first step.
    """
    rows = []
    for run in runs:
        loss = run.curve("loss")
        measured, estimated = dict(run.curve("tau_measured")), dict(run.curve("tau_estimated"))
        taus = measured or estimated
        best = max(taus, key=lambda step: taus[step], default=NAN)
        rows.append({
            "run": run.name,
            "steps": f"{max(row['step'] for row in run.rows):.0f}",
            "last loss": number(loss[-1][1] if loss else None, ".3f"),
            "tau before training": with_interval(measured[0], bounds(run, 0))
            if 0 in measured
            else number(estimated.get(0)),
            "best tau, measured": with_interval(measured.get(best), bounds(run, best)),
            "tau, estimated there": number(estimated.get(best)),
            "at step": number(best, ".0f"),
        })  # fmt: skip
    return Table("Training runs", *by_column(rows)) if rows else None


def bounds(run: Training, step: float) -> tuple[float, float] | None:
    """Return the 95% interval of the tau measured at that step; `None` where it is not known."""
    low, high = (dict(run.curve(f"tau_measured_{edge}")).get(step) for edge in ("low", "high"))
    return None if low is None or high is None else (low, high)


def curves(runs: Sequence[Training]) -> str:
    """Return charts over the steps of each training run: loss, tau, and acceptance by position."""
    return "".join(side_by_side([_loss(run), _tau(run), _acceptance(run)]) for run in runs)


def _loss(run: Training) -> Figure:
    line = Series("loss", run.curve("loss"), 1, named=False)
    draw = partial(line_chart, [line], STEPS, Axis("loss"))
    return Figure(f"{run.name}: training loss", draw)


def _tau(run: Training) -> Figure:
    """Return the chart of measured and estimated tau, with a level through the one of step 0."""
    measured, estimated = run.curve("tau_measured"), run.curve("tau_estimated")
    intervals = [bounds(run, step) for step, _ in measured]
    lines = [
        Series("measured", measured, 1, intervals, joined=False),
        Series("estimated", estimated, 2, dashed=True),
    ]
    note = (
        "dashed: estimated by replay on known texts; points: measured by decoding, with 95% "
        "intervals"
    )
    level = dict(measured or estimated).get(0)
    if level is not None:
        note += "; dotted: before training"
    y = Axis("tau (tokens a round)", low=1)
    draw = partial(line_chart, lines, STEPS, y, level)
    return Figure(f"{run.name}: held-out tau", draw, note)


# What a log may hold of acceptance by position, the best first: whether it is of evaluations, the
# key, and what it is. docs/metrics.md#training-metrics
BY_POSITION = (
    (True, "surv", "share of held-out rounds that accept at least so many drafts"),
    (False, "surv", "share of training positions that accept at least so many drafts"),
    (False, "alpha", "overlap of target and drafter at that position, on training texts"),
)


def _acceptance(run: Training) -> Figure:
    """Return the chart of acceptance by position, as many positions as there are colours."""
    lines: list[Series] = []
    note = ""
    for evaluated, key, meaning in BY_POSITION:
        for depth in range(1, COLOURS + 1):
            if points := run.curve(f"{key}@{depth}", evaluated):
                lines.append(Series(f"position {depth}", points, depth))
        if lines:
            note = meaning
            break
    draw = partial(line_chart, lines, STEPS, Axis("share", 0, 1))
    return Figure(f"{run.name}: acceptance by position", draw, note)
