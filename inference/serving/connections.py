"""uvicorn's server with limits on its connections."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .engine import Engine

IDLE_S = 5.0
"""Time in which a connection has to bring a whole request's head, after it was opened and after
each answer. `intake.LATEST_S` limits the time for a body."""
UNREAD_S = 60.0
"""Time after which a client that reads nothing of its answer loses its connection."""
SPARE = 256
"""Connections besides those of requests that run or wait: of pages, and of clients between two
requests."""


class Server(uvicorn.Server):
    """Server that ends what is being decoded before it waits for its connections."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._engine = engine
        # what each connection did, and since when
        self._seen: dict[Any, tuple[Any, float]] = {}
        self.stopped_by: int | None = None
        """Number of the first signal that asked the server to stop."""
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            limit_concurrency=engine.rows + engine.queue + SPARE,
        )
        super().__init__(config)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM ask the server to stop, also before it runs.

        The command's own handlers raise an exception, which the start of the event loop may lose.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = sig
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        self.close_idle(time.monotonic())
        return await super().on_tick(counter)

    def close_idle(self, now: float) -> None:
        """Close connections without a request for `IDLE_S`, or unread for `UNREAD_S`, at `now`."""
        seen: dict[Any, tuple[Any, float]] = {}
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            if transport is None:
                continue
            cycle = getattr(connection, "cycle", None)
            busy, unsent = cycle is not None and not cycle.response_complete, 0
            if not transport.is_closing():
                unsent = transport.get_write_buffer_size()
            state = id(cycle), busy, unsent
            before, since = self._seen.get(connection, (None, now))
            seen[connection] = state, since if state == before else now
            if not unsent and busy:
                continue  # its request is under way
            if now - seen[connection][1] > (UNREAD_S if unsent else IDLE_S):
                transport.abort()  # what is unsent would keep it open
        self._seen = seen

    async def shutdown(self, sockets: Any = None) -> None:
        await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)
