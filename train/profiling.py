"""Profile of some training steps, recorded by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .config import ProfilerConfig


@contextmanager
def profiler(config: ProfilerConfig, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yield a function that is to be called after every step.

    The first `config.first` steps of this process are not recorded, the next `config.steps` are.
    After the last of them, `profile/rank-N.json` is written in `folder`; Chrome's tracing page and
    Perfetto open it.
    """
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
