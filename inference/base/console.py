"""Tables and progress output, on a terminal or in a log file."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Self, TypeVar

import rich.console
from rich import box
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

# Without a terminal a line of progress is printed every LINE_S seconds, and every SPARSE_S once
# the work has taken DENSE_S.
LINE_S = 30.0
DENSE_S = 600.0
SPARSE_S = 300.0


class OutputConsole(rich.console.Console):
    """Console that raises an error for a closed pipe (`| head`), where rich ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_table(title: str | None, **more: Any) -> Table:
    """Return an empty table without frame or padding; `more` goes to rich's `Table`."""
    return Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {message}", file=sys.stderr)


class ProgressReporter(Generic[T]):
    """Bar on a terminal or in a notebook with ipywidgets; elsewhere (SLURM, CI) lines on stderr.

    Only rank 0 shows anything, and only the reporter that was opened last prints lines.
    """

    quiet: ClassVar[bool] = False
    """True to show nothing."""
    _open: ClassVar[list[ProgressReporter[Any]]] = []

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        *,
        desc: str,
        unit: str = " prompts",
        total: int | None = None,
    ) -> None:
        """Start to report `desc`; `total`, or the iterable's length, is the number of `unit`."""
        if total is None and isinstance(iterable, Sized):
            total = len(iterable)
        self._iterable, self.total = iterable or (), total
        self._what, self._unit, self._detail = desc, unit.strip(), ""
        self._first = self._done = 0  # work of an earlier process, and all work done
        self._began = self._last = time.monotonic()
        self._ended = threading.Event()
        self._live: Live | None = None
        if ProgressReporter.quiet or os.environ.get("RANK", "0") != "0":
            self._ended.set()
            return
        ProgressReporter._open.append(self)
        console = OutputConsole(stderr=True)
        terminal = sys.stderr.isatty() and not console.is_dumb_terminal
        if terminal or (console.is_jupyter and find_spec("ipywidgets") is not None):
            # Lines printed meanwhile appear above the bar, unless stdout is a file.
            printed = sys.stdout.isatty()
            self._live = Live(self, console=console, transient=True, redirect_stdout=printed)
            self._live.start(refresh=True)
            atexit.register(self.close)  # or the cursor would stay hidden
        else:
            threading.Thread(target=self._speak, daemon=True, name="progress").start()

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(self.total, self._done, 20, pulse=self.total is None)
        grid.add_row(bar, Text(self.line(time.monotonic()), no_wrap=True, overflow="ellipsis"))
        return grid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        try:
            for item in self._iterable:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, n: int = 1) -> None:
        """Count `n` more of the work as done."""
        self._done += n

    def skip(self, n: int) -> None:
        """Count work of an earlier process, which took no time in this one."""
        self._first += n
        self.update(n)

    def now(self, detail: str) -> None:
        """Show `detail`, a description of the present step, next to the count."""
        self._detail = detail

    def say(self, text: str) -> None:
        """Print a line on standard output, in place of the next line of progress."""
        if not ProgressReporter.quiet:
            print(text, flush=True)
            self._last = time.monotonic()

    def close(self) -> None:
        """Stop reporting."""
        if not self._ended.is_set():
            self._ended.set()
            ProgressReporter._open.remove(self)
            if self._live is not None:
                self._live.stop()

    def _speak(self) -> None:
        """Print lines of progress when they are due."""
        while not self._ended.wait(1.0):
            if (
                ProgressReporter._open
                and ProgressReporter._open[-1] is self
                and self.due(time.monotonic())
            ):
                print(self.line(time.monotonic()), file=sys.stderr, flush=True)
                self._last = time.monotonic()

    def due(self, now: float) -> bool:
        """Return True if a line is to be printed at the time `now` (of `time.monotonic`)."""
        return now - self._last >= (LINE_S if now - self._began <= DENSE_S else SPARSE_S)

    def left_s(self, now: float | None = None) -> float | None:
        """Return the seconds left at the mean speed so far; None before any work is done."""
        # Work of an earlier process (a resumed run) took no part of the elapsed time.
        done = self._done - self._first
        if not self.total or done <= 0:
            return None
        now = time.monotonic() if now is None else now
        return (now - self._began) * (self.total - self._done) / done

    def line(self, now: float) -> str:
        """Return a line with the work done, the time it took, and an estimate of the time left."""
        elapsed, of_total, time_left = now - self._began, "", ""
        if self.total:
            of_total = f" of {self.total:,}"
            if (left_s := self.left_s(now)) is not None:
                time_left = f", about {duration_text(left_s)} left"
        detail = f" ({self._detail})" if self._detail else ""
        count = f"{self._done:,}{of_total} {self._unit}"
        return f"{self._what}: {count} after {duration_text(elapsed)}{time_left}{detail}"


def plural(number: int, what: str) -> str:
    """Return a count with its noun, such as `1 row` or `2 passes`."""
    ending = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending if number != 1 else ''}"


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e12:,.1f} TB" if bytes_ >= 1e12 else f"{bytes_ / 1e9:,.1f} GB"


def duration_text(seconds: float) -> str:
    """Return a duration as text, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
