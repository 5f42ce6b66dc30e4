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
COUNTED = {  # names, meanings and labels of what is counted
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


class ServerCounters:
    """Counters of all requests since the server was started."""

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Begin at 0; the functions return the numbers of running and of waiting requests."""
        disable_created_metrics()  # the time of each counter's beginning, which nobody reads
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
        """Count a request with a prompt of so many tokens."""
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
