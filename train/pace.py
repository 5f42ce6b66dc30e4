"""How fast a run goes and where its time goes. Device work is timed on the device, without waiting
for it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..inference.evaluation.gains import GPUS

PARTS = ("data", "target", "drafter", "optimiser")
"""Making batches and counting their weights; the target's features; the drafter forward and
backward; clipping and the step."""


def peak_of(device: torch.device) -> float | None:
    """FLOP/s that this GPU's data sheet promises in bf16; None for what is not listed, CPUs among
    them."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (1e12 * gpu.tflops for known, gpu in GPUS.items() if re.search(rf"\b{known}\b", name)), None
    )


class Pace:
    """Seconds of each part of the steps since the last report."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._cuda, self._ranks, self._peak = device.type == "cuda", ranks, peak_of(device)
        self._spans: list[tuple[str, Any, Any]] = []
        self.flops_per_position = 0.0
        """Of one position, forward and backward."""
        self._since = time.perf_counter()
        self._positions = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`, one of `PARTS`."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, positions: int) -> None:
        """This rank has been through so many positions, padding included."""
        self._positions += positions

    def restart(self) -> None:
        """Forget what has passed: an evaluation is no part of the pace."""
        self._spans, self._positions, self._since = [], 0, time.perf_counter()

    def report(self) -> dict[str, float]:
        """Positions a second over all ranks, the share of each part of this rank's time, and MFU
        where the peak is known."""
        if self._cuda and self._spans:
            self._spans[-1][2].synchronize()
        passed = max(time.perf_counter() - self._since, 1e-9)
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._spans:
            seconds[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        found = {"tokens_s": self._positions * self._ranks / passed}
        found |= {f"share_{name}": spent / passed for name, spent in seconds.items()}
        if self._peak is not None:
            found["mfu"] = self.flops_per_position * self._positions / passed / self._peak
        self.restart()
        return found
