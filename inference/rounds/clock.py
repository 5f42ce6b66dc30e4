"""Seconds of each part of a round. Device work is timed on the device, without waiting for it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

PARTS = ("draft", "verify", "accept", "kv")


class Clock:
    """Marks between the parts of a round, and the seconds between them.

    On a GPU the marks are events. A round's seconds are filled in once its last event has happened,
    usually one round late, so that timing adds no synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # marks of the round that runs: the part that ended, and an event or seconds of
        # `time.perf_counter`
        self._marks: list[Any] = []
        # marks and records of closed rounds whose seconds are not filled in yet
        self._waiting: list[tuple[list[Any], list[Any]]] = []

    def mark(self, part: str = "") -> None:
        """Note the end of a part of the round, one of `PARTS`; none: the begin of the round."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def close(self, records: list[Any]) -> None:
        """End a round; a part that was not marked took no time.

        Its seconds are written into the fields `t_draft_s`, `t_verify_s`, `t_accept_s` and `t_kv_s`
        of every one of `records` (`decode.Round`), at once or when its events have happened.
        """
        self._waiting.append((self._marks, records))
        self._marks = []
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Fill in the rounds whose events have happened; with `wait`, wait for all rounds."""
        if wait and self._cuda and self._waiting:
            self._waiting[-1][0][-1][1].synchronize()
        # Events happen in the order of their recording: if the last one has, the whole round has.
        while self._waiting and (not self._cuda or self._waiting[0][0][-1][1].query()):
            marks, records = self._waiting.pop(0)
            for (_, first), (part, second) in pairwise(marks):
                # events give milliseconds
                seconds = first.elapsed_time(second) / 1000 if self._cuda else second - first
                for record in records:
                    setattr(record, f"t_{part}_s", seconds)
