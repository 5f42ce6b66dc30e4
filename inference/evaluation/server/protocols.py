"""A server that is measured, and its replies; heads/exchange/engines has each engine's protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....heads.exchange.engines import ENGINES
from ....heads.exchange.engines.servers import ServerProtocol
from ....heads.files import JsonObject
from ...conversations.prompts import Prompt

PROTOCOLS = {name: engine.server for name, engine in ENGINES.items() if engine.server is not None}
*_first, _last = (ENGINES[name].title for name in PROTOCOLS)
MEASURED = f"{', '.join(_first)} or {_last}"
"""Titles of the engines that can be measured, as a list in a sentence."""


@dataclass
class EngineServer:
    """Address and properties of a server, known before it is measured."""

    url: str
    engine: str
    """Name of its engine."""
    version: str
    """Empty where the server does not give it."""
    model: str
    """Name that requests give for the model."""
    context: int | None
    """Tokens that a prompt and its reply may have together; `None` where it is not known."""
    speculates: bool | None
    """The server's own answer; `None` where it gives none."""

    @property
    def protocol(self) -> ServerProtocol:
        """Form of its requests and replies."""
        return PROTOCOLS[self.engine]


@dataclass
class ServerReply:
    """The server's reply to one prompt, and its times: `time.perf_counter` in seconds."""

    prompt: Prompt
    turn: int
    """Number of the turn in its conversation, from 0."""
    sent: float
    """The time at which the request was sent."""
    ids: list[int] | None = None
    """Token ids, the end token included; `None` where the server does not give them."""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """The time at which each chunk with tokens arrived."""
    finish: str = ""
    """The engine's reason for the end of the reply; empty until it has ended."""
    meta: JsonObject = field(default_factory=dict)
    """Counts that came with the reply; of several chunks the last value of each key."""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first chunk, the server's queue included."""
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; `None` for a reply of one token."""
        if self.tokens <= 1:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)
