"""Callbacks of a training: what a program may do at its log lines, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Callback:
    """What a program does while a drafter is trained; every method may be overridden.

    Methods are called on the main process, after the metrics of all ranks were reduced. So they
    cost nothing at other steps, and metrics are those of `metrics.jsonl`
    (docs/metrics.md#training-metrics). An exception ends the training with that exception.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle the metrics of the steps since the last call, every `log_every` steps.

        `step` counts from 1. Return True to end the training: the drafter is then evaluated and
        saved, as after the last step.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle an evaluation, such as `tau_measured`; return True to end the training."""

    def on_checkpoint(self, step: int, folder: Path, best: bool) -> None:
        """Handle a checkpoint: the drafter's folder, and whether it is the best so far."""

    def on_end(self, best: Path) -> None:
        """Handle the end of a training that was not asked to stop; `best` is the best drafter."""
