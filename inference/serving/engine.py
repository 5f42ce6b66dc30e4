"""Decoding of requests that arrive at any time, in one thread, and counters of it for Prometheus.

Waiting requests with equal settings become a batch of the decode loop. A batch takes no further
requests. Several batches alternate, a round each, so that a new request need not wait until all
others end: the total of their rows is limited, not their number.

Counters that vLLM has too have its names and meanings, so that clients that read those (`draftsmith
evaluate --server` among them) read these. Names of draftsmith's own counters begin with its name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from ...heads.files import JsonObject
from ..base.detokenize import special_ids
from ..base.settings import GREEDY, Sampling
from ..decode import Request, Round, decode
from ..proposers.contract import Proposer
from ..targets.target import Target

log = logging.getLogger(__name__)

BATCHES = 2  # batches that begin without waiting for further requests
MAX_BATCH_WAIT_S = 0.25
"""Time for which requests are collected if `BATCHES` batches run already. Many small batches are
slower than few large ones."""
PADDED = 8192
"""Positions that the prompts of a batch, padded to the longest, may hold in any case."""
IDLE_BATCH_WAIT_S = 0.005  # time for which an idle engine collects requests
Deliver = Callable[[Round | None, str | None], None]
"""Function that gets the record of each step of a reply and the reason for its end. If decoding has
failed, the record is None and the reason a message. It never raises."""
QUEUE = 256
"""Replies that may wait. More concurrent clients should use a serving engine."""
STOPPING = "the server is stopping"
INTERNAL = "an internal error; the server's log says which"
LONGEST_MESSAGE = 500  # characters: a message may quote what a client sent

DEEPEST = 32  # positions that have their own counter
COUNTED = {  # names, help texts and labels of the counters
    "vllm:prompt_tokens": ("Prompt tokens of all requests.", ()),
    "vllm:generation_tokens": ("Tokens written for all requests.", ()),
    "vllm:spec_decode_num_drafts": ("Rounds with drafts.", ()),
    "vllm:spec_decode_num_draft_tokens": ("Verified drafts.", ()),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted drafts.", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("By depth, from 0.", ("position",)),
    "draftsmith:rounds": ("Rounds of each drafter.", ("drafter",)),
    "draftsmith:round_tokens": ("Tokens that its rounds emitted.", ("drafter",)),
    "draftsmith:requests": ("Requests by the reason for their end.", ("end",)),
}


class RequestError(Exception):
    """Request that is refused or fails: message, field, code, HTTP status and headers.

    Errors of the server itself have a status of 500 or more.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = "invalid_value",
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers

    def body(self) -> JsonObject:
        """Return the error as JSON."""
        text = str(self)
        if len(text) > LONGEST_MESSAGE:
            text = text[: LONGEST_MESSAGE - 1] + "…"
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class BatchSettings:
    """Settings in which the requests of one batch are equal."""

    drafter: str
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(eq=False)
class Job:
    """Reply that a client waits for."""

    request: Request
    settings: BatchSettings
    deliver: Deliver = field(repr=False)
    """Called in the engine's thread."""
    given_up: bool = False
    since: float = field(default_factory=time.monotonic)
    """Time of its creation."""


@dataclass(eq=False)
class _ServedBatch:
    """Jobs that are decoded together; those with indices in `open` have not ended."""

    jobs: Sequence[Job]
    open: set[int]
    rounds: Iterator[None]
    """Runs a round with each step; see `Engine._rounds`."""


class ServerCounters:
    """Counters of all requests since the server was started."""

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Start at 0; the functions return the numbers of running and of waiting requests."""
        disable_created_metrics()  # a time of creation for each counter
        registry = self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, meaning, labels, registry=registry)
            for name, (meaning, labels) in COUNTED.items()
        }
        for name, meaning, function in (
            ("vllm:num_requests_running", "Requests that are decoded now.", running),
            ("vllm:num_requests_waiting", "Requests in the queue.", waiting),
        ):
            Gauge(name, meaning, registry=registry).set_function(function)

    def _add(self, name: str, amount: int = 1, label: str | None = None) -> None:
        counter = self._counters[name]
        (counter if label is None else counter.labels(label)).inc(amount)

    def prompted(self, tokens: int) -> None:
        """Count the tokens of a request's prompt."""
        self._add("vllm:prompt_tokens", tokens)

    def stepped(self, drafter: str, record: Round) -> None:
        """Count a round of one request, or its prefill."""
        emitted = len(record.tokens)
        self._add("vllm:generation_tokens", emitted)
        if record.drafted is None:
            return
        self._add("draftsmith:rounds", 1, drafter)
        self._add("draftsmith:round_tokens", emitted, drafter)
        if record.drafted:
            self._add("vllm:spec_decode_num_drafts")
            self._add("vllm:spec_decode_num_draft_tokens", record.drafted)
            self._add("vllm:spec_decode_num_accepted_tokens", record.accepted)
            for depth in range(min(record.accepted, DEEPEST)):
                self._add("vllm:spec_decode_num_accepted_tokens_per_pos", 1, str(depth))

    def ended(self, reason: str) -> None:
        """Count the end of a request: a `Generation.finish_reason`, cancelled, refused, error."""
        self._add("draftsmith:requests", 1, reason)

    def text(self) -> bytes:
        """Return the counters in the text form of Prometheus."""
        return generate_latest(self._registry)


class Engine:
    """Thread that decodes jobs with the drafters of `proposers`, at most `rows` at a time.

    At most `queue` jobs wait. A compiled target runs one batch at a time, since captured graphs
    share one cache. An error ends the jobs of its batch, never the thread.
    """

    def __init__(
        self, target: Target, proposers: dict[str, Proposer], rows: int = 16, queue: int = QUEUE
    ) -> None:
        self.target, self.proposers = target, proposers
        self.rows, self.queue = rows, queue
        self.counters = ServerCounters(lambda: self.running, lambda: self.waiting)
        self.hidden = target.eos_ids | special_ids(target.tokenizer)
        """Tokens that are left out of a reply's text."""
        self.padded = max(target.max_positions, PADDED)
        """Positions that the padded prompts of a batch may hold: at least those of one prompt of
        the target's full length."""
        self.longest_token = max(map(len, target.tokenizer.get_vocab()))
        """Characters of the longest token's name, which is at least as long as its text. It bounds
        the length of a text that can fit."""
        self._waiting: deque[Job] = deque()
        self._running: list[_ServedBatch] = []
        self._idle: dict[str, list[Proposer]] = {name: [one] for name, one in proposers.items()}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none. Raises `RequestError` where the queue is full or closed."""
        with self._changed:
            if self._closed:
                raise RequestError(STOPPING, code="stopping", status=503)
            if len(self._waiting) + len(jobs) > self.queue:
                for _ in jobs:
                    self.counters.ended("refused")
                full = f"{self.queue} requests wait already; try again later"
                raise RequestError(full, None, "queue_full", 503, {"Retry-After": "1"})
            self._waiting += jobs
            for job in jobs:
                self.counters.prompted(len(job.request.prompt_ids))
            self._changed.notify()

    def give_up(self, jobs: Sequence[Job]) -> None:
        """Drop jobs whose client has left before the next round; ended jobs are ignored."""
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
                try:
                    if jobs := self._next_jobs():
                        still_open = set(range(len(jobs)))
                        rounds = self._rounds(jobs, still_open)
                        self._running.append(_ServedBatch(jobs, still_open, rounds))
                    for batch in list(self._running):
                        self._advance(batch)
                except Exception:  # the thread has to survive for the next request
                    log.exception("decoding failed")
                    self._end_running(INTERNAL)
        finally:  # no client waits for a reply that never comes
            with self._changed:
                self._closed = True
                waiting, self._waiting = list(self._waiting), deque()
            self._end_running(STOPPING)
            for job in waiting:
                self._fail(job, STOPPING)

    def _end_running(self, message: str) -> None:
        """Deliver an error to every job that runs."""
        running, self._running = self._running, []
        for batch in running:
            for index in batch.open:
                self._fail(batch.jobs[index], message)

    def _fail(self, job: Job, message: str) -> None:
        """Deliver an error to a job that waits or runs."""
        self.counters.ended("error")
        job.deliver(None, message)

    def _advance(self, batch: _ServedBatch) -> None:
        """Run a round of a batch, and remove it once it has ended or failed."""
        try:
            next(batch.rounds)
            return
        except StopIteration:
            pass
        except Exception:  # the other batches must continue
            log.exception("decoding failed")
            # The error may name files of this machine, so it goes into the log only.
            for index in batch.open:
                self._fail(batch.jobs[index], INTERNAL)
        self._running.remove(batch)

    def _rounds(self, jobs: Sequence[Job], still_open: set[int]) -> Iterator[None]:
        """Decode jobs together, a round with each step, and deliver the new tokens of each.

        Those that have ended or were given up leave `still_open`.
        """
        settings = jobs[0].settings
        idle = self._idle[settings.drafter]  # proposers without a batch
        proposer = idle.pop() if idle else self.proposers[settings.drafter].clone()
        loop = decode(
            self.target,
            proposer,
            [job.request for job in jobs],
            max(job.request.max_new_tokens or 1 for job in jobs),
            settings.sampling,
            frozenset() if settings.ignore_eos else None,
            settings.stop,
        )
        given_up = None  # the first value that is sent to a generator must be None
        try:
            while still_open:
                for index, record, reason in loop.send(given_up):
                    self.counters.stepped(settings.drafter, record)
                    if reason is not None:
                        still_open.discard(index)
                        self.counters.ended(reason)
                    jobs[index].deliver(record, reason)
                yield
                given_up = {index for index in still_open if jobs[index].given_up}
                for _ in given_up:
                    self.counters.ended("cancelled")
                still_open -= given_up
        finally:
            loop.close()
            idle.append(proposer)

    def _wait(self) -> bool:
        """Wait for something to decode; return False once the engine is closed."""
        with self._changed:
            idle = not self._running
            while not (self._waiting or self._running or self._closed):
                self._changed.wait()
        if idle and not self._closed:
            time.sleep(IDLE_BATCH_WAIT_S)
        return not self._closed

    def _next_jobs(self) -> list[Job]:
        """Return the jobs of the next batch, [] if none is to begin.

        They have the settings of the one that waits longest. Those whose client has left are
        removed from the queue.
        """
        with self._changed:
            left = [job for job in self._waiting if job.given_up]
            for job in left:
                self._waiting.remove(job)
                self.counters.ended("cancelled")
            running = len(self._running)
            if not self._waiting or (self.target.static and running):
                return []
            waited = time.monotonic() - self._waiting[0].since
            if running >= BATCHES and waited < MAX_BATCH_WAIT_S:
                return []
            jobs = self._together(self.rows - self.running)
            for job in jobs:
                self._waiting.remove(job)
            return jobs

    def _together(self, room: int) -> list[Job]:
        """Return at most `room` jobs to decode with the one that waits longest.

        A prompt that would pad the batch beyond `padded` positions waits for the next batch.
        """
        jobs: list[Job] = []
        longest = 0
        for job in self._waiting:
            length = max(longest, len(job.request.prompt_ids))
            fits = not jobs or length * (len(jobs) + 1) <= self.padded
            if len(jobs) < room and job.settings == self._waiting[0].settings and fits:
                jobs.append(job)
                longest = length
        return jobs
