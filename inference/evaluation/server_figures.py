"""Figures of a live server, as a report holds them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...heads.documents import Count
from .definitions import ByDepth, ByName, Number, Temperature


class ServerRequest(Struct, kw_only=True):
    """One reply of a server."""

    id: str | int
    """The row's id, or its number."""
    turn: Count = 0
    """Turn of the conversation, from 0."""
    n_prompt: Count = 0
    """Tokens of the prompt."""
    n_out: Count = 0
    """Tokens of the reply."""
    ttft_s: Number = None
    tpot_s: Number = None
    """Time per token after the first."""
    finish_reason: str | None = None
    """As the server gave it."""


class Divergence(Struct, kw_only=True):
    """First difference of a server's reply to plain decoding's."""

    id: str | int
    """The row's id, or its number."""
    turn: Count = 0
    """Turn of the conversation, from 0."""
    index: Count = 0
    """Index of the first token that differs."""
    top2_gap: Number = None


class ServerFigures(Struct, kw_only=True):
    """Figures of a live server at one temperature and concurrency."""

    temperature: Temperature
    """Of the sampling; 0 is greedy."""
    concurrency: Annotated[int, Meta(ge=1)]
    """Requests at once, as asked for."""
    in_flight_peak: Count = 0
    """Most requests that were in flight at once."""
    tau_incl_bonus: Number
    """From the server's counters; `tau_definition` says how."""
    tau_definition: str = ""
    """How `tau_incl_bonus` was counted."""
    tau_emitted: Number
    """Tokens after the prefill's over decoding steps: compare it with a local tau."""
    survival: ByDepth
    """From its counters."""
    accept_rate: Number
    """From its counters."""
    mean_n_draft: Number = None
    """From its counters."""
    tokens_s: Number
    """All tokens over `seconds`, prefills and queue included."""
    seconds: Number = None
    """Time from the first request to the last chunk."""
    ttft_quantiles_s: ByName | None = None
    """By the client's clock, the server's queue included."""
    tpot_quantiles_s: ByName | None = None
    """By the client's clock."""
    chunk_gap_quantiles_s: ByName | None = None
    """By the client's clock."""
    requests: Count = 0
    """Replies that the client received."""
    tokens: int = 0
    """Tokens that it received."""
    chunks: Count = 0
    """Chunks that it received."""
    # A server may count anything: a restart between two readings makes differences negative.
    drafts: int | None = None
    """Drafts that the server counted."""
    drafted: int | None = None
    """Drafted tokens that it counted."""
    accepted: int | None = None
    """Accepted tokens that it counted."""
    rounds: int | None = None
    """Rounds that it counted; a lower bound for vLLM."""
    speculates: bool | None = None
    """Whether the server drafts."""
    client_busy: Number = None
    """Share of the time in which the measuring process was busy."""
    warnings: list[str] = []
    """Reasons to doubt the figures, in words."""
    per_request: list[ServerRequest] = []
    equal_to_plain: Count | None = None
    """Greedy replies equal to plain decoding here."""
    compared: Count | None = None
    """Replies that could be compared."""
    divergences: list[Divergence] = []


class ServerReport(Struct, kw_only=True):
    """Figures of a live server in each setting."""

    url: str
    """Address."""
    engine: str
    """`vllm`, `sglang` or `llamacpp`."""
    version: str | None
    """The engine's version."""
    model: str | None = None
    """Name that it was asked for."""
    context: Count | None = None
    """Longest text that it takes, in tokens."""
    definitions: dict[str, str] = {}
    """Short definitions of these figures."""
    settings: list[ServerFigures]

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version} at {self.url}"
