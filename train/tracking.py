"""Trackers of a training run: accelerate's, all with the same metrics and configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from ..heads.errors import UserError, first_line
from .config import RunConfig

# mlflow refuses these characters, which names of metrics have: surv@1, tau@<256, tau@>=4096.
SPELLED = {"mlflow": {"@": "_at_", "<": "below_", ">=": "from_"}}


def check_tracker(name: str) -> None:
    """Raise `UserError` where the package of a tracker cannot be imported."""
    if name == "none":
        return
    try:
        import_module(name)
    except ImportError as error:
        raise UserError(
            f"tracker is {name}, but it cannot be imported ({first_line(error)}); "
            f"pip install {name}, or leave the tracker out"
        ) from error
    # Of a package that accelerate does not know, or not in this version, it would say nothing.
    if name not in map(str, get_available_trackers()):
        raise UserError(
            f"accelerate {accelerate.__version__} does not know the tracker {name} as it is "
            "installed here; use a newer accelerate, or leave the tracker out"
        )


def start_tracker(accelerator: Accelerator, run: RunConfig) -> None:
    """Open the run's tracker, if it has one, with the configuration of the run."""
    if run.tracker != "none":
        accelerator.init_trackers(run.project, config=flat(run.as_json()))


def track(accelerator: Accelerator, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics to the run's tracker, if it has one."""
    for tracker in accelerator.trackers:
        tracker.log({spelled(name, tracker.name): x for name, x in metrics.items()}, step)


def spelled(metric: str, tracker: str) -> str:
    """Return the name of a metric as a tracker takes it."""
    for characters, word in SPELLED.get(tracker, {}).items():
        metric = metric.replace(characters, word)
    return metric


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Return nested tables and lists of tables as one table of dotted names.

    Every value is a text, a number or a truth value, and short: trackers take nothing else, and
    mlflow leaves out a text of more than 6,000 characters. A list of plain values is JSON.
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
