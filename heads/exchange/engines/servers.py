"""Parts of what `--server` has to know of an engine: its requests, streams and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

if TYPE_CHECKING:
    from ...files import JsonObject

Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Token = Annotated[int, Meta(ge=0, le=1 << 24)]


@dataclass(frozen=True)
class ServerFacts:
    """Facts of a server by the engine's own answers."""

    version: str
    """Empty where the server does not give it."""
    speculates: bool | None = None
    """None where the answers do not say it."""
    context: int | None = None
    """Tokens that a prompt and its reply may have together, where /v1/models does not say it."""


@dataclass(frozen=True)
class CounterNames:
    """Names of an engine's Prometheus counters, which all requests share.

    Those of speculation are called `spec_decode_num_..` after the prefix. Libraries for Prometheus
    add `_total` to a counter's name, depending on their version; it is left out here.
    """

    prefix: str
    generated: str
    """Tokens written for all clients."""
    running: tuple[str, ...]
    """Requests in the engine, waiting ones included."""
    chunk_of_step: bool = False
    """True if each step sends a chunk, false if each token has its own."""


@dataclass(frozen=True)
class ReplyCounts:
    """Names of the counts that come with each reply; several names are of different versions."""

    rounds: str
    accepted: tuple[str, ...]
    drafted: tuple[str, ...]
    histograms: tuple[str, ...]
    """Element i of a histogram counts the rounds that accepted i drafts."""
    definition: str
    """Definition of tau where a reply has no count of accepted drafts."""


@dataclass(frozen=True)
class ServerProtocol:
    """Form of an engine's answers, requests and streams."""

    paths: tuple[str, ...]
    """Paths that are asked for in order to recognise it."""
    recognise: Callable[[Sequence[Any]], ServerFacts | None]
    """Function of the JSON at `paths`, None where there is none; it returns None for another
    engine."""
    request: Callable[[str, list[int], Any, int], tuple[str, JsonObject]]
    """Function of the model's name, the prompt, a `Sampling` and the largest number of tokens that
    returns path and body. All settings are given, because a server has its own defaults."""
    chunk: type
    """Type of an event of the stream; keys that it does not list are ignored."""
    read: Callable[[Any, Any, float], None]
    """Adds what a chunk brought at a time to a `ServerReply`."""
    counts: CounterNames | ReplyCounts
    definition: str
    """Definition of the server's tau."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of all requests."""
    no_metrics: str = "give --server the engine itself, not a gateway before it"
    """Remedy where there are no counters."""
    no_tokens: str | None = None
    """Error where the counters do not count tokens; None where that is none."""
