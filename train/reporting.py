"""Metrics of a run for people and trackers: log lines, a final table, and accelerate's trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from rich.table import Table

from ..heads.errors import UserError, first_line
from ..inference.base.console import duration_text, plain_table
from ..inference.evaluation.figure_text import looping
from ..inference.evaluation.training_log import METRICS_FILE, read_metrics
from .config import RunConfig

PROJECT = "draftsmith"  # name of the project in the tracker
# Names of metrics such as surv@1, tau@<256 and tau@>=4096 have characters that mlflow refuses.
REPLACED_CHARACTERS = {"mlflow": {"@": "_at_", "<": "below_", ">=": "from_"}}


def step_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None) -> str:
    """Return the line of the steps since the last one; `left_s` seconds of the run are left."""
    parts = [f"step {step}/{total}", f"loss {metrics['loss']:.4g}"]
    if not math.isnan(tau := metrics.get("tau_rows", math.nan)):
        parts.append(f"tau_rows {tau:.2f}")
    parts += [f"lr {metrics['lr']:.2g}", f"{metrics['tokens_s']:,.0f} tok/s"]
    if step < total and left_s is not None:
        parts.append(f"{duration_text(left_s)} left")
    return "  ".join(parts)


def evaluation_line(
    step: int, total: int, metrics: Mapping[str, float], best_tau: float, best_step: int
) -> str:
    """Return the line of an evaluation, which is the best so far if `best_step` is `step`."""
    if "tau_measured" in metrics:
        loops = looping(metrics.get("loop_share"))
        tau = f"tau {tau_of(metrics)} on held-out prompts{'; ' * bool(loops)}{loops}"
    else:
        tau = f"tau {metrics['tau_estimated']:.2f} estimated on held-out texts"
    best = "best so far" if best_step == step else f"best {best_tau:.2f} at step {best_step:,}"
    return f"step {step}/{total}  {tau}  {best}"


def summary(folder: Path, best_step: int) -> Table:
    """Return the table at the end of a run, from its `metrics.jsonl`. Raises `UserError`."""
    rows = read_metrics(folder / METRICS_FILE)
    judged = {row["step"]: row for row in rows if "tau_estimated" in row}
    table = plain_table(None, show_header=False)
    # A run that was killed between an evaluation and its line lacks the row.
    if (best := judged.get(best_step)) is not None:
        first = judged[min(judged)]
        table.add_row("best", f"step {best_step:,}, tau {tau_of(best)}")
        if loops := looping(best.get("loop_share")):
            table.add_row("held-out replies", loops)
        if first is not best:
            table.add_row("first measured", f"step {first['step']:,}, tau {tau_of(first)}")
    return table


def tau_of(row: Mapping[str, Any]) -> str:
    """Return the measured tau of an evaluation with its interval, or else the estimated one.

    The ends of the interval of few prompts are NaN.
    """
    if "tau_measured" not in row:
        return f"{row['tau_estimated']:.2f}, estimated"
    low, high = row["tau_measured_low"], row["tau_measured_high"]
    between = "" if math.isnan(low) else f" ({low:.2f}-{high:.2f})"
    return f"{row['tau_measured']:.2f}{between}"


def check_tracker(name: str) -> None:
    """Raise `UserError` for a tracker that cannot be used here."""
    if name == "none":
        return
    reason = f"accelerate {accelerate.__version__} does not find it here"
    try:
        import_module(name)
        # accelerate ignores a tracker that it does not know without an error.
        if name in map(str, get_available_trackers()):
            return
    except ImportError as error:
        reason = f"it cannot be imported ({first_line(error)})"
    raise UserError(f"tracker is {name}, but {reason}; pip install {name}, or leave it out")


def start_tracker(accelerator: Accelerator, run: RunConfig) -> None:
    """Open the run's tracker, if any, with the configuration of the run."""
    if run.tracker != "none":
        accelerator.init_trackers(PROJECT, config=flat(run.as_json()))


def track(accelerator: Accelerator, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics to the run's tracker, if any."""
    for tracker in accelerator.trackers:
        tracker.log({accepted_name(name, tracker.name): x for name, x in metrics.items()}, step)


def accepted_name(metric: str, tracker: str) -> str:
    """Return the name of a metric as a tracker takes it."""
    for characters, word in REPLACED_CHARACTERS.get(tracker, {}).items():
        metric = metric.replace(characters, word)
    return metric


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Return nested tables and lists of tables as one table of dotted names.

    A list of plain values becomes JSON: trackers accept short texts, numbers and truth values only.
    """
    if isinstance(values, list) and values and isinstance(values[0], dict):
        values = dict(enumerate(values))
    if isinstance(values, dict) and values:
        found: dict[str, Any] = {}
        for key, value in values.items():
            found |= flat(value, f"{name}.{key}" if name else str(key))
        return found
    plain = isinstance(values, str | int | float)
    return {name: values if plain else json.dumps(values, ensure_ascii=False)}
