"""Decoding of requests that come at any time, in one thread.

Waiting requests with equal settings become a batch of the decode loop. A batch takes no further
requests; up to `BATCHES` of them run in turns, a round each, so that a request that comes while
others run need not wait for the last of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...heads.errors import UserError
from ..decode import Request, Round, decode
from ..drafters import proposer_like
from ..proposer import Proposer
from ..settings import GREEDY, Sampling
from ..targets.target import Target
from .counters import ServerCounters

log = logging.getLogger(__name__)

BATCHES = 2  # batches that run in turns
COLLECT_S = 0.005  # time in which further requests may join the first one of an idle engine
Deliver = Callable[[Round | None, str | None], None]
"""Function that gets the record of each step of a reply and the reason for its end; the record is
None and the reason a message where decoding has failed. It never raises."""


STOPPING = "the server is stopping"


class QueueFull(Exception):
    """The queue is full, so that no further request can wait."""


class EngineClosed(Exception):
    """The engine decodes nothing any more."""


@dataclass(frozen=True)
class BatchSettings:
    """Settings in which the requests of one batch are equal."""

    drafter: str
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(eq=False)
class Job:
    """One reply that a client waits for."""

    request: Request
    settings: BatchSettings
    deliver: Deliver = field(repr=False)
    """Called in the engine's thread."""
    given_up: bool = False


class _Batch:
    """Jobs that are decoded together; those in `open` have not ended."""

    def __init__(self, target: Target, proposer: Proposer, jobs: Sequence[Job]) -> None:
        self.jobs, self.proposer = jobs, proposer
        self.open = set(range(len(jobs)))
        settings = jobs[0].settings
        longest = max(job.request.max_new_tokens or 1 for job in jobs)
        self._steps = decode(
            target,
            proposer,
            [job.request for job in jobs],
            longest,
            settings.sampling,
            frozenset() if settings.ignore_eos else None,
            settings.stop,
        )
        self._started = False

    def step(self, counters: ServerCounters) -> None:
        """Run one round, and deliver what each job gained. Raises `StopIteration` at the end."""
        # Nothing can be sent into a generator that has not begun.
        given_up = {i for i in self.open if self.jobs[i].given_up} if self._started else set()
        for _ in given_up:
            counters.ended("cancelled")
        self.open -= given_up
        steps = self._steps.send(given_up) if self._started else next(self._steps)
        self._started = True
        for index, record, reason in steps:
            job = self.jobs[index]
            counters.stepped(job.settings.drafter, record)
            if reason is not None:
                self.open.discard(index)
                counters.ended(reason)
            job.deliver(record, reason)

    def fail(self, message: str, counters: ServerCounters) -> None:
        """Deliver an error to every job that has not ended, and release the batch."""
        self._steps.close()
        for index in self.open:
            counters.ended("error")
            self.jobs[index].deliver(None, message)
        self.open.clear()


class Engine:
    """Thread that decodes jobs with the drafters of `proposers`, at most `rows` in a batch.

    At most `queue` jobs wait. A compiled target runs one batch at a time, since captured graphs
    share one cache.
    """

    def __init__(
        self, target: Target, proposers: dict[str, Proposer], rows: int = 16, queue: int = 256
    ) -> None:
        self.target, self.proposers = target, proposers
        self.rows, self.queue = rows, queue
        self.counters = ServerCounters()
        self._batches = 1 if target.compiled else BATCHES
        self._waiting: deque[Job] = deque()
        self._running: list[_Batch] = []
        self._idle: dict[str, list[Proposer]] = {name: [one] for name, one in proposers.items()}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none. Raises `QueueFull` and `EngineClosed`."""
        with self._changed:
            if self._closed:
                raise EngineClosed
            if len(self._waiting) + len(jobs) > self.queue:
                for _ in jobs:
                    self.counters.ended("refused")
                raise QueueFull
            self._waiting += jobs
            for job in jobs:
                self.counters.prompted(len(job.request.prompt_ids))
            self._changed.notify()

    def give_up(self, jobs: Sequence[Job]) -> None:
        """Drop jobs whose client has left, before the next round; ended ones are passed over."""
        with self._changed:
            for job in jobs:
                job.given_up = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the round that runs; what has not ended gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=30)

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows of all running batches."""
        return sum(len(batch.open) for batch in list(self._running))

    @property
    def alive(self) -> bool:
        """True while the thread decodes."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait():
                if (batch := self._next_batch()) is not None:
                    self._running.append(batch)
                for batch in list(self._running):
                    self._advance(batch)
        finally:  # whatever happens, nobody waits for a reply that never comes
            with self._changed:
                self._closed = True
                waiting, self._waiting = list(self._waiting), deque()
            running, self._running = self._running, []
            for batch in running:
                batch.fail(STOPPING, self.counters)
            for job in waiting:
                self.counters.ended("error")
                job.deliver(None, STOPPING)

    def _wait(self) -> bool:
        """Return true as soon as there is something to decode, and false when the engine closes."""
        with self._changed:
            idle = not self._running
            while not (self._waiting or self._running or self._closed):
                self._changed.wait()
        if idle and not self._closed:
            time.sleep(COLLECT_S)
        return not self._closed

    def _next_batch(self) -> _Batch | None:
        """Return a batch of the jobs that have the settings of the one that waits longest.

        None if there is none, or no room for another batch.
        """
        with self._changed:
            left = [job for job in self._waiting if job.given_up]
            for job in left:
                self._waiting.remove(job)
                self.counters.ended("cancelled")
            if not self._waiting or len(self._running) >= self._batches:
                return None
            settings = self._waiting[0].settings
            alike = [job for job in self._waiting if job.settings == settings]
            jobs = alike[: self.rows]
            for job in jobs:
                self._waiting.remove(job)
        return _Batch(self.target, self._proposer(settings.drafter), jobs)

    def _proposer(self, name: str) -> Proposer:
        """Return a proposer of a drafter that is at work on no batch."""
        idle = self._idle[name]
        return idle.pop() if idle else proposer_like(self.proposers[name])

    def _advance(self, batch: _Batch) -> None:
        """Run a round of a batch; a batch that has ended or failed is released."""
        try:
            batch.step(self.counters)
            return
        except StopIteration:
            pass
        except UserError as error:
            batch.fail(str(error), self.counters)
        except Exception as error:  # the other requests must go on
            log.exception("decoding failed")
            batch.fail(f"an internal error: {type(error).__name__}: {error}", self.counters)
        self._running.remove(batch)
        self._idle[batch.jobs[0].settings.drafter].append(batch.proposer)
