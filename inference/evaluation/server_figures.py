"""Types of the figures in a report, and the figures of a live server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from ...heads.documents import Count

Number = float | None
Interval = tuple[Number, Number]
"""Both ends of a 95% interval; NaN where it is not known."""
ByName = Mapping[str, Number]
ByDepth = Sequence[Number]
Temperature = Annotated[float, Meta(ge=0)]


class Speculation(Struct, kw_only=True):
    """Figures of an engine's drafts during the measured requests; null for what is not known."""

    speculates: bool | None = None
    """True if the server drafts."""
    tau_incl_bonus: Number
    """From the server's counters; `tau_definition` says how."""
    tau_definition: str = ""
    """How `tau_incl_bonus` was counted."""
    tau_emitted: Number = None
    """Tokens after the prefill's over decoding steps: compare it with a local tau."""
    survival: ByDepth = []
    """Share of the drafts of which at least d tokens were accepted, d = 1, 2, .."""
    # A server may count anything: a restart between two readings makes differences negative.
    drafts: int | None = None
    """Drafts that the server counted."""
    drafted: int | None = None
    """Drafted tokens that it counted, roots excluded."""
    accepted: int | None = None
    """Accepted tokens that it counted."""
    rounds: int | None = None
    """Decoding steps, those without a draft included; a lower bound for vLLM and llama.cpp."""
    warnings: list[str] = []
    """Reasons to doubt the figures, in words."""


class ServerFigures(Speculation, kw_only=True):
    """Figures of a live server at one temperature and concurrency."""

    temperature: Temperature
    """Temperature of the sampling; 0 is greedy."""
    concurrency: Annotated[int, Meta(ge=1)]
    """Requests at once."""
    accept_rate: Number
    """Accepted over drafted tokens."""
    mean_n_draft: Number = None
    """Drafted tokens over drafts."""
    tokens_s: Number
    """All tokens over `seconds`, prefills and queue included."""
    seconds: Number = None
    """Time from the first request to the last chunk."""
    ttft_quantiles_s: ByName | None = None
    """By the client's clock, the server's queue included."""
    tpot_quantiles_s: ByName | None = None
    """Time per later token of each reply, by the client's clock."""
    requests: Count = 0
    """Replies that the client received."""
    tokens: int = 0
    """Tokens that it received."""
    chunks: Count = 0
    """Chunks that it received."""
    equal_to_plain: Count | None = None
    """Greedy replies equal to plain decoding here."""
    compared: Count | None = None
    """Replies that could be compared."""
    largest_gap: Number = None
    """The largest `top2_gap` where one of them first differs from plain decoding's."""


class ServerReport(Struct, kw_only=True):
    """A live server, and its figures in each setting."""

    url: str
    """Address."""
    engine: str
    """`vllm`, `sglang` or `llamacpp`."""
    version: str | None
    """The engine's version; empty where the server does not give it."""
    model: str | None = None
    """Name that requests give for the model."""
    context: Count | None = None
    """Tokens that a prompt and its reply may have together; null where it is not known."""
    speculates: bool | None = None
    """The server's own answer; null where it gives none."""
    settings: list[ServerFigures]

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version} at {self.url}"
