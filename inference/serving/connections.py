"""uvicorn's server with limits on its connections."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .engine import Engine

IDLE_S = 5.0
"""Time in which a connection has to bring a whole request's head, after it was opened and after
each answer. How long a body may take says `intake.LATEST_S`."""
SPARE = 256
"""Connections besides those of requests that run or wait: of pages, and of clients between two
requests."""


class Server(uvicorn.Server):
    """Server that ends what is being decoded before it waits for its connections."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._engine = engine
        self._idle: dict[Any, float] = {}  # since when a connection has had no request
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            limit_concurrency=engine.rows + engine.queue + SPARE,
        )
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        self.close_idle(time.monotonic())
        return await super().on_tick(counter)

    def close_idle(self, now: float) -> None:
        """Close the connections that have had no request for `IDLE_S` at the time `now`."""
        idle: dict[Any, float] = {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                continue  # it has a request
            idle[connection] = self._idle.get(connection, now)
            transport: Any = connection.transport
            if now - idle[connection] > IDLE_S and transport is not None:
                transport.abort()  # what is unsent would keep it open
        self._idle = idle

    async def shutdown(self, sockets: Any = None) -> None:
        await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)
