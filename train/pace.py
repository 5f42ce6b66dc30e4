"""Speed of a training run, and the parts of a step that its time is spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PARTS = ("data", "target", "drafter", "optimiser")
"""Parts of a step.

data: making batches and counting their weights; target: the target's features; drafter: its forward
and backward passes; optimiser: clipping, and the change of the weights."""


class Pace:
    """Clock of a rank: seconds of each part of the steps since the last report."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._cuda, self._ranks = device.type == "cuda", ranks
        self._spans: list[tuple[str, Any, Any]] = []
        self._since = time.perf_counter()
        self._positions = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as `name`, one of `PARTS`."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        """Return the time, as an event of the device where there is one."""
        if not self._cuda:
            return time.perf_counter()
        # It takes its time when the GPU reaches it; nothing waits for that until `report`.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, positions: int) -> None:
        """Add positions, padding included, that this rank has trained on."""
        self._positions += positions

    def restart(self) -> None:
        """Begin to count again, as after an evaluation, which is no part of a step."""
        self._spans, self._positions, self._since = [], 0, time.perf_counter()

    def report(self) -> dict[str, float]:
        """Return the speed since the last report, and begin to count again.

        `tokens_s` are positions per second over all ranks; `share_*` the share of each part in this
        rank's time.
        """
        # One wait for each report: the last event has then happened, and so have all before it.
        if self._cuda and self._spans:
            self._spans[-1][2].synchronize()
        # Not 0, even if two reports follow each other within one tick of the clock.
        passed = max(time.perf_counter() - self._since, 1e-9)
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._spans:
            # `elapsed_time` is in milliseconds.
            seconds[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        metrics = {"tokens_s": self._positions * self._ranks / passed}
        metrics |= {f"share_{name}": spent / passed for name, spent in seconds.items()}
        self.restart()
        return metrics
