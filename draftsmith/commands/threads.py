"""Number of CPU threads of a command, and how they wait, by what else the machine is doing.

OpenMP's threads spin while they wait for each other. On cores that other processes use too, a
thread that spins takes the time that the thread it waits for needs: decoding with two threads on
two busy cores is several times slower than with one. A decoding pass consists of operations so
short that threads which sleep in between cost more than they gain, so it takes only threads that
have a core each. A training step consists of longer ones: it keeps all threads, which sleep while
they wait, since several threads get a larger share of crowded cores than one, unless so much else
runs that they mostly wait. Both settings are read when torch is first imported, so they are chosen
before, from the processes that run at that moment. docs/log/2026-11-experiments.md, "Threads on a
shared machine", has the measurements.

Threads change only the speed of a command, and the last bits of what is trained. A command that
continues earlier work therefore takes the number that the work began with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ..inference.evaluation.journal import journal_path

CHOICES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT",
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME",
)  # fmt: skip
"""Variables by which a user chooses; with one of them nothing is chosen here."""
FIRST_LOOK_S, SECOND_LOOK_S = 0.15, 0.6
EVERY_S = 0.01  # between two readings of the number of running processes
SPARE = 0.5  # running processes beyond the cores that a quiet machine shows for a moment
CROWD = 1.5  # other running processes per core from which one thread trains as fast as several


def choose_threads(options: Any, training: bool = False) -> None:
    """Choose the threads of the command with these options, and print a line where that matters.

    `training` is true for a command whose time goes into training steps.
    Nothing is chosen once torch is imported, for a command that loads no target, for one of several
    ranks, or where the environment says anything about threads.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = any(name in os.environ for name in CHOICES)
    if "torch" in sys.modules or not hasattr(options, "target") or ranks > 1 or chosen:
        return
    cores, wanted = os.cpu_count() or 1, usable_cores()
    others = other_processes(FIRST_LOOK_S)
    if crowded(others, wanted, cores):  # a process that was just ending does not count
        others = other_processes(SECOND_LOOK_S)
    busy, number = crowded(others, wanted, cores), stored_threads(options)
    if busy and number is None:
        number = crowded_threads(others, wanted, cores, training)
    if number is not None:
        os.environ["OMP_NUM_THREADS"] = str(number)
    if not busy:
        return
    said = "one thread"
    if number != 1:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        said = f"{number} threads, which sleep while they wait"
    load = f"load {others:.1f} on {cores} core{'s' if cores != 1 else ''}"
    print(f"the machine is busy ({load}): {said}; read tau, not tokens/s", file=sys.stderr)


def crowded(others: float, wanted: int, cores: int) -> bool:
    """Return true where `wanted` threads and `others` need more than there are `cores`."""
    return others + wanted > cores + SPARE


def crowded_threads(others: float, wanted: int, cores: int, training: bool) -> int:
    """Return how many of `wanted` threads a command takes on a crowded machine.

    They are those that have a core which no other process needs, at least one; training takes all
    of them up to `CROWD`.
    """
    if training and others < CROWD * cores:
        return wanted
    return max(1, min(wanted, int(cores - others + SPARE)))


def usable_cores() -> int:
    """Return the number of physical cores that this process may use, which is torch's default."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or 1, allowed or 1)


def other_processes(seconds: float) -> float:
    """Return the mean number of other running threads of the machine within `seconds`.

    It is read from Linux's `/proc/stat`, since the mean of the last minute has the command before
    this one in it. Elsewhere it is that mean, and 0 without one.
    """
    counts: list[int] = []
    end = time.monotonic() + seconds
    try:
        while not counts or time.monotonic() < end:
            running = Path("/proc/stat").read_text().split("procs_running", 1)[1]
            counts.append(int(running.split(None, 1)[0]) - 1)  # without this thread
            time.sleep(EVERY_S)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return sum(counts) / len(counts)


def stored_threads(options: Any) -> int | None:
    """Return the number of threads of the earlier work that this command continues; else None.

    It is in the last checkpoint of a training run, in the journal of an evaluation or a tuning, and
    in the profile by which trees are chosen.
    """
    places: list[tuple[Path, tuple[str, ...]]] = []
    if profile := getattr(options, "profile", None):
        places.append((Path(str(profile)), ("machine", "threads")))
    if report := getattr(options, "json", None):
        places.append((journal_path(report), ("identity", "threads")))
    if out := getattr(options, "out", None):
        places.append((journal_path(out), ("identity", "machine", "threads")))
        last = Path(out, "last").resolve().parent
        places.append((last / "provenance.json", ("threads",)))
    return next(filter(None, (_number(*place) for place in places)), None)


def _number(path: Path, keys: tuple[str, ...]) -> int | None:
    """Return the number at `keys` of a JSON file, or of a journal's first line; None without."""
    try:
        with path.open(encoding="utf-8") as file:
            value = json.loads(file.readline() if keys[0] == "identity" else file.read())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whoever reads the file next says what is wrong with it
    return value if isinstance(value, int) and value > 0 else None
