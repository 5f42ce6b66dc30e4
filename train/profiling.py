"""A profile of some steps, for those who want to see what a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .config import ProfilerConfig


@contextmanager
def profiler(config: ProfilerConfig, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """A function to call after every step. After `config.steps` of them from `config.first` on
    (counted from the start of this process) it writes OUTPUT/profile/rank-N.json, which Chrome's
    tracing page and Perfetto open."""
    if not config.steps:
        yield lambda: None
        return
    path = folder / "profile" / f"rank-{rank}.json"

    def write(finished: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    window = schedule(wait=config.first, warmup=0, active=config.steps, repeat=1)
    with profile(activities=activities, schedule=window, on_trace_ready=write) as running:
        yield running.step
