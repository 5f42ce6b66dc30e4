"""Remarks that stand next to measured figures: a drafter that loses, a busy machine, loops.

A speed without them is read as what the drafter gains, and a tau of looping replies as what it
learned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .results import Conditions, Report, SettingFigures, caption, known

LOSS = 0.995  # speed-ups below it are printed as 0.99 or less
SPARE = 0.5  # running processes beyond the cores that a quiet machine shows for a moment
LOOPING = 0.2  # share of replies that loop from which tau is doubtful


def slower(speedups: Mapping[str, float | None]) -> str:
    """Return `slower than plain decoding: NAME (0.91x)` for those that are; "" where none is."""
    lost = [f"{name} ({x:.2f}x)" for name, x in speedups.items() if known(x) and x < LOSS]
    return f"slower than plain decoding: {', '.join(lost)}" if lost else ""


def busy(loads: list[float | None], cores: int | None, threads: int | None) -> str:
    """Return a line where other work took the cores that a measurement needed; "" elsewhere.

    `loads` are mean numbers of running processes, the measurement's own threads among them while it
    runs. So a quiet machine shows up to as many as the threads, and only more than that, and more
    than there are cores, is other work that slows it down.
    """
    highest = max((load for load in loads if load is not None), default=None)
    if highest is None or cores is None or highest <= max(cores, threads or 1) + SPARE:
        return ""
    count = f"{cores} core{'s' if cores != 1 else ''}"
    return f"the machine was busy (load {highest:.1f} on {count}): read tau, not speed"


def busy_now() -> str:
    """Return `busy` of the last minute."""
    return busy([load()], os.cpu_count(), torch.get_num_threads())


def load() -> float | None:
    """Return the mean number of running processes of the last minute; None if it is not known."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def looping(share: float | None) -> str:
    """Return how many replies loop, where that makes tau doubtful; "" elsewhere."""
    if not known(share) or share < LOOPING:
        return ""
    return f"{share:.0%} of the replies loop, which raises tau"


def remarks(report: Report) -> list[str]:
    """Return the remarks on a report of `draftsmith evaluate`, a line each."""
    lines = []
    if report.settings and (line := busy_of(report.conditions, report.threads)):
        lines.append(line)
    for setting in report.settings:
        lines += [f"{caption(setting)}: {line}" for line in of_setting(setting)]
    return lines


def busy_of(conditions: Conditions | None, threads: int | None) -> str:
    """Return `busy` of the conditions of a measurement; "" where they are not known."""
    if conditions is None:
        return ""
    # The load is the whole machine's, of which the process may use a part only.
    cores = conditions.machine_cores or conditions.cores
    return busy([conditions.load_before, conditions.load_after], cores, threads)


def of_setting(setting: SettingFigures) -> list[str]:
    """Return the remarks on one setting."""
    speedups = {name: figures.speedup for name, figures in setting.drafting.items()}
    return list(filter(None, [slower(speedups), looping(setting.plain.loop_share)]))
