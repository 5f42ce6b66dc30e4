"""Training runs on a report's page: a table of them, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ....heads.files import JsonObject
from .axes import Axis
from .charts import COLOURS, Series, line_chart
from .page import Figure, side_by_side
from .tables import NOTHING, Table, is_finite, number, with_interval


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
        loss, measured = run.curve("loss"), run.curve("tau_measured")
        estimated = dict(run.curve("tau_estimated"))
        last_step = max(row["step"] for row in run.rows)
        best = max(measured, key=lambda point: point[1], default=None)
        if best is not None:
            best_step = best[0]
        else:
            best_step = max(estimated, key=lambda step: estimated[step], default=None)
        rows.append([
            run.name,
            f"{last_step:.0f}",
            number(loss[-1][1] if loss else None, ".3f"),
            _before(run),
            NOTHING if best is None else with_interval(best[1], bounds(run, best[0])),
            NOTHING if best_step is None else number(estimated.get(best_step)),
            NOTHING if best_step is None else f"{best_step:.0f}",
        ])  # fmt: skip
    columns = [
        "run",
        "steps",
        "last loss",
        "tau before training",
        "best tau, measured",
        "tau, estimated there",
        "at step",
    ]
    return Table("Training runs", columns, rows) if rows else None


def _before(run: Training) -> str:
    """Return tau at step 0 with its interval if it was measured; a dash without an evaluation."""
    measured, estimated = run.curve("tau_measured"), run.curve("tau_estimated")
    for points in (measured, estimated):
        if points and points[0][0] == 0:
            return with_interval(points[0][1], bounds(run, 0) if points is measured else None)
    return NOTHING


def bounds(run: Training, step: float) -> tuple[float, float] | None:
    """Return the 95% interval of the tau measured at that step; `None` where it is not known."""
    low, high = (dict(run.curve(f"tau_measured_{edge}")).get(step) for edge in ("low", "high"))
    return None if low is None or high is None else (low, high)


def curves(runs: Sequence[Training]) -> str:
    """Return charts over the steps of each training run: loss, tau, and acceptance by position."""
    return "".join(side_by_side([_loss(run), _tau(run), _acceptance(run)]) for run in runs)


def _loss(run: Training) -> Figure:
    line = Series("loss", run.curve("loss"), 1, label="")
    draw = partial(line_chart, [line], Axis("step", low=0), Axis("loss"))
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
    level = None
    first = (measured or estimated)[:1]
    if first and first[0][0] == 0:
        level = first[0][1]
        note += "; dotted: before training"
    y = Axis("tau (tokens a round)", low=1)
    draw = partial(line_chart, lines, Axis("step", low=0), y, level)
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
    draw = partial(line_chart, lines, Axis("step", low=0), Axis("share", 0, 1))
    return Figure(f"{run.name}: acceptance by position", draw, note)
