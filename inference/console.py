"""Tables and progress of long work, on a terminal or in the log file of a job without one."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import rich.console
from rich import box
from rich.table import Table

with warnings.catch_warnings():
    # In a notebook without ipywidgets, tqdm warns and shows its bar as text; so it is wanted.
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm

# Without a terminal a line of progress is printed every LINE_S seconds. After DENSE_S seconds of
# work it is printed only if a SHARE of the work was done since the last line, or after SPARSE_S
# seconds.
LINE_S = 30.0
DENSE_S = 600.0
SHARE = 0.05
SPARSE_S = 300.0


class Console(rich.console.Console):
    """Console of rich that reports a closed pipe (`| head`); rich itself ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_table(title: str | None, **more: Any) -> Table:
    """Return an empty table without frame or padding; `more` goes to rich's `Table`."""
    return Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {message}", file=sys.stderr)


class Progress(tqdm):
    """Bar of tqdm on a terminal or in a notebook, lines on stderr without (nohup, SLURM, CI).

    Of several objects that are open only the last one prints lines, and of several ranks only the
    first.
    """

    quiet: ClassVar[bool] = False
    """True if no progress is shown at all."""
    _open: ClassVar[list[Progress]] = []
    # Until `__init__` has run: Python closes an object whose making was interrupted too.
    disable = True
    _ended = threading.Event()
    _ended.set()

    def __init__(
        self,
        iterable: Any = None,
        *,
        desc: str,
        unit: str = " prompts",
        total: int | None = None,
        show: bool = True,
        **more: Any,
    ) -> None:
        """Start to show progress; `show=False` shows nothing. `more` goes to tqdm."""
        show = show and not Progress.quiet and os.environ.get("RANK", "0") == "0"
        # None: tqdm disables itself without a terminal, unless it is in a notebook
        super().__init__(
            iterable,
            desc=desc,
            unit=unit,
            total=total,
            disable=None if show else True,
            leave=False,
            **more,
        )
        self._what, self._unit, self._detail = desc, unit.strip(), ""
        # Counts at the start, now, and at the last line. A disabled tqdm does not count its own.
        self._first = self._done = self._said = self.n
        self._began = self._last = time.monotonic()
        if show and self.disable:
            self._ended = threading.Event()
            Progress._open.append(self)
            threading.Thread(target=self._speak, daemon=True, name="progress").start()

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, n: float | None = 1) -> bool | None:
        self._done += n or 0
        return super().update(n)

    def skip(self, n: int) -> None:
        """Count work of an earlier process, which took no time in this one."""
        self._first += n
        if not self.disable:
            self.initial += n  # tqdm estimates the time left from what was done since `initial`
        self.update(n)

    def now(self, detail: str) -> None:
        """Show `detail`, a description of the present step, next to the count."""
        self._detail = detail
        self.set_postfix_str(detail)

    def say(self, text: str) -> None:
        """Print a line on standard output, in place of the next line of progress."""
        if Progress.quiet:
            return
        self.write(text, file=sys.stdout)
        sys.stdout.flush()
        self._last, self._said = time.monotonic(), self._done

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            # by identity: tqdm has an == of its own, which `remove` would use
            Progress._open[:] = [bar for bar in Progress._open if bar is not self]
        super().close()

    def _speak(self) -> None:
        """Print lines of progress whenever they are due, in a thread of its own."""
        while not self._ended.wait(1.0):
            if Progress._open and Progress._open[-1] is self and self.due(time.monotonic()):
                print(self.line(time.monotonic()), file=sys.stderr, flush=True)
                self._last, self._said = time.monotonic(), self._done

    def due(self, now: float) -> bool:
        """Return True if a line is to be printed at the time `now` (of `time.monotonic`)."""
        waited = now - self._last
        large_share = self.total is not None and self._done - self._said >= SHARE * self.total
        often = large_share or now - self._began <= DENSE_S
        return waited >= (LINE_S if often else SPARSE_S)

    def left_s(self, now: float | None = None) -> float | None:
        """Return an estimate of the seconds left at the time `now`, None before any work is done.

        It is by the average of the whole time, evaluations and the like included.
        """
        # What was done before the start (a resumed run) took none of the elapsed time.
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
                time_left = f", about {clock(left_s)} left"
        detail = f" ({self._detail})" if self._detail else ""
        count = f"{self._done:,.0f}{of_total} {self._unit}"
        return f"{self._what}: {count} after {clock(elapsed)}{time_left}{detail}"


def several(number: int, what: str) -> str:
    """Return a number of things, such as `1 row`, `2 passes`."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def clock(seconds: float) -> str:
    """Return a duration as text, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
