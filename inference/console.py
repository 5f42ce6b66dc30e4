"""What a person sees of long work, on a terminal or in the log file of a job without one: tables
and progress."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import rich.console
from tqdm import tqdm

LINE_S = 30.0  # between two lines of progress where there is no terminal
DENSE_S = 600.0  # after so long, lines are only worth it
SHARE = 0.05  # for this share of the work
SPARSE_S = 300.0  # or after so long


class Console(rich.console.Console):
    """rich's, but that a reader who has gone (`| head`) is reported to the caller; rich itself ends
    the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Progress(tqdm):
    """tqdm's bar on a terminal. Without one (nohup, SLURM, CI) a line on stderr every 30 seconds;
    after ten minutes only for every 5% of the work, or every five minutes. Of several that are open
    the last one speaks; of several ranks the first."""

    _open: ClassVar[list[Progress]] = []

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
        """`show=False` shows nothing, as on every rank but the first. `more` goes to tqdm."""
        show = show and os.environ.get("RANK", "0") == "0"
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
        self._first = self._done = self._said = self.n
        self._began = self._last = time.monotonic()
        self._ended = threading.Event()
        if show and self.disable:
            Progress._open.append(self)
            threading.Thread(target=self._speak, daemon=True, name="progress").start()
        else:
            self._ended.set()

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

    def now(self, detail: str) -> None:
        """Say what is being done, beside the count."""
        self._detail = detail
        self.set_postfix_str(detail)

    def say(self, text: str) -> None:
        """Print a line on standard output, in place of the next line of progress."""
        self.write(text, file=sys.stdout)
        sys.stdout.flush()
        self._last, self._said = time.monotonic(), self._done

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            # tqdm has an == of its own
            Progress._open[:] = [other for other in Progress._open if other is not self]
        super().close()

    def _speak(self) -> None:
        while not self._ended.wait(1.0):
            if Progress._open and Progress._open[-1] is self and self.due(time.monotonic()):
                print(self.line(time.monotonic()), file=sys.stderr, flush=True)
                self._last, self._said = time.monotonic(), self._done

    def due(self, now: float) -> bool:
        """Whether a line is worth it at `now` (of `time.monotonic`)."""
        waited = now - self._last
        if waited < LINE_S:
            return False
        much = self.total is not None and self._done - self._said >= SHARE * self.total
        return much or now - self._began <= DENSE_S or waited >= SPARSE_S

    def line(self, now: float) -> str:
        """What is done so far, for how long, and about how long it will still take."""
        spent, of, left = now - self._began, "", ""
        if self.total:
            of = f" of {self.total:,}"
            if self._done > self._first:
                left = (
                    ", about "
                    f"{clock(spent * (self.total - self._done) / (self._done - self._first))} left"
                )
        detail = f" ({self._detail})" if self._detail else ""
        return (
            f"{self._what}: {self._done:,.0f}{of} {self._unit} after {clock(spent)}{left}{detail}"
        )


def clock(seconds: float) -> str:
    """Such as 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
