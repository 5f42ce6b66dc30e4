"""Prometheus counters of the server.

What vLLM counts too has vLLM's name and meaning, so that clients that read those counters
(`draftsmith evaluate --server` among them) read these. Only draftsmith's own begin with its name.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from ..decode import Round

DEEPEST = 32  # positions that are counted one by one


class ServerCounters:
    """Counters of all requests since the server was started."""

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Begin at 0; the functions return the numbers of running and of waiting requests."""
        disable_created_metrics()  # the time of each counter's beginning, which nobody reads
        registry = self._registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        self._prompts = counter("vllm:prompt_tokens", "Prompt tokens of all requests.")
        self._tokens = counter("vllm:generation_tokens", "Tokens written for all requests.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Rounds with drafts.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Verified drafts.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their depth, from 0.",
            "position",
        )
        self._rounds = counter("draftsmith:rounds", "Rounds of each drafter.", "drafter")
        self._emitted = counter(
            "draftsmith:round_tokens", "Tokens that the rounds of each drafter emitted.", "drafter"
        )
        self._tau = Gauge(
            "draftsmith:tau", "Tokens a round, of each drafter.", ["drafter"], registry=registry
        )
        self._ended = counter("draftsmith:requests", "Requests by the reason for their end.", "end")
        for name, meaning, function in (
            ("vllm:num_requests_running", "Requests that are decoded now.", running),
            ("vllm:num_requests_waiting", "Requests in the queue.", waiting),
        ):
            Gauge(name, meaning, registry=registry).set_function(function)
        self._totals: dict[str, tuple[int, int]] = {}

    def prompted(self, tokens: int) -> None:
        """Count a request with a prompt of so many tokens."""
        self._prompts.inc(tokens)

    def stepped(self, drafter: str, record: Round) -> None:
        """Count a round of one request, or its prefill."""
        emitted = len(record.tokens)
        self._tokens.inc(emitted)
        if record.drafted is None:
            return
        rounds, tokens = self._totals.get(drafter, (0, 0))
        self._totals[drafter] = rounds + 1, tokens + emitted
        self._rounds.labels(drafter).inc()
        self._emitted.labels(drafter).inc(emitted)
        self._tau.labels(drafter).set((tokens + emitted) / (rounds + 1))
        if record.drafted:
            self._drafts.inc()
            self._drafted.inc(record.drafted)
            self._accepted.inc(record.accepted)
            for depth in range(min(record.accepted, DEEPEST)):
                self._by_position.labels(str(depth)).inc()

    def ended(self, reason: str) -> None:
        """Count the end of a request: one of `Generation.finish_reason`, cancelled, refused or
        error."""
        self._ended.labels(reason).inc()

    def text(self) -> bytes:
        """Return the counters in the text form of Prometheus."""
        return generate_latest(self._registry)
