"""The device: settings of the process, transfer of small host values, and seconds on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PARTS = ("draft", "verify", "accept", "kv")
"""Parts of a round whose seconds are noted."""


def prepare(device: torch.device) -> None:
    """Set what holds for the whole process where models run on a kind of device."""
    if device.type == "cuda":
        # cuDNN's attention makes a plan for each length of the keys, 20 to 40 ms on an H100 by
        # others' traces, and eager rounds have new lengths all the time.
        torch.backends.cuda.enable_cudnn_sdp(False)


def read_later(tensor: Tensor) -> Callable[[], list[list[int]]]:
    """Begin to bring a table to the host; return a function that waits for it, and gives its rows.

    It does not wait for what is launched in between, which may overwrite the tensor.
    """
    if tensor.device.type != "cuda":
        there = tensor.tolist()
        return lambda: there
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[list[int]]:
        arrived.synchronize()
        return values.tolist()

    return read


def send(values: Tensor | Sequence[object], device: torch.device) -> Tensor:
    """Return `values`, numbers or a tensor on the host, on `device`, without waiting for it."""
    # A CUDA copy from pageable memory waits for all queued work; one from pinned memory does not.
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def row_of(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `numbers` as a tensor `[1, N]`, cached, as every round needs the same few."""
    if torch.compiler.is_compiling():
        # A compiler does not look into a cache, and a captured graph takes no numbers of the host.
        return torch.stack([torch.full((), number, device=device) for number in numbers])[None]
    return _kept_row(numbers, device)


@lru_cache(maxsize=256)
def _kept_row(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([numbers], device=device)


class Clock:
    """Marks between the parts of a round, and the seconds between them.

    On a GPU the marks are events. A round's seconds are filled in once its last event has happened,
    usually one round late, so that timing adds no synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # marks of the round that runs: the part that ended, and an event or seconds of
        # `time.perf_counter`
        self._marks: list[tuple[str, Any]] = []
        # marks and records of closed rounds whose seconds are not filled in yet
        self._waiting: list[tuple[list[tuple[str, Any]], Sequence[object]]] = []

    def mark(self, part: str = "") -> None:
        """Note the end of a part of the round, one of `PARTS`; none: the begin of the round."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def close(self, records: Sequence[object]) -> None:
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


def static_address(tensor: Tensor) -> Tensor:
    """Tell a compiler that a tensor stays where it is, and return it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor
