"""Where a round's time goes. Device work is timed on the device, without waiting for it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

PARTS = ("draft", "verify", "accept", "kv")


class Clock:
    """Marks between the parts of a round; seconds come one round late on a GPU, where events need
    not have happened yet."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._waiting: list[tuple[list[Any], list[Any]]] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def close(self, records: list[Any]) -> None:
        """End a round of `len(PARTS) + 1` marks; its seconds go into the `t_*_s` fields of
        `records`."""
        self._waiting.append((self._marks, records))
        self._marks = []
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Fill in the rounds whose events have happened; with `wait`, all rounds."""
        if wait and self._cuda and self._waiting:
            self._waiting[-1][0][-1].synchronize()
        while self._waiting and (not self._cuda or self._waiting[0][0][-1].query()):
            marks, records = self._waiting.pop(0)
            for part, (first, second) in zip(PARTS, pairwise(marks), strict=True):
                seconds = first.elapsed_time(second) / 1000 if self._cuda else second - first
                for record in records:
                    setattr(record, f"t_{part}_s", seconds)
