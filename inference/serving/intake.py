"""Bodies of requests, from the first byte until they are encoded: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from .errors import RequestError

LARGEST_BODY = 2 << 20
"""Bytes. A prompt of 131,072 tokens has half a megabyte as text, up to 1.2 where a language's
characters are all escaped as \\uXXXX, and a megabyte as token ids. While a body is parsed, no other
thread runs Python: 2 MiB of small lists take 0.3 s."""
MOST_HELD = 64 << 20  # bytes of all bodies that are being sent or wait to be encoded
LATEST_S = 10.0  # time in which a body has to be sent
LONG = 64 << 10
"""Bytes from which on a body counts as long: short ones do not wait for those."""
READERS = 2  # threads that encode short bodies
T = TypeVar("T")


class Intake:
    """Reader of bodies. The loop of the connections only collects bytes; threads do the rest."""

    def __init__(self) -> None:
        self._held = 0
        self._short, self._long = asyncio.Semaphore(READERS), asyncio.Semaphore(1)

    async def read(self, request: Request, reader: Callable[[bytes], T]) -> T:
        """Return what `reader` makes of the body of a request, in a thread.

        Raises `RequestError` for a body that is too large, too late or not JSON by name. A page of
        another site can send text to this server without asking, but not JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                "send the request with Content-Type: application/json",
                code="unsupported_media_type",
                status=415,
            )
        body = bytearray()
        try:
            await self._collect(request, body)
            async with self._long if len(body) > LONG else self._short:
                return await asyncio.to_thread(reader, bytes(body))
        finally:
            self._held -= len(body)

    async def _collect(self, request: Request, body: bytearray) -> None:
        """Add the bytes of a request to `body` as they come. Raises `RequestError`."""
        try:
            async with asyncio.timeout(LATEST_S):
                async for piece in request.stream():
                    body += piece
                    self._held += len(piece)
                    if len(body) > LARGEST_BODY:
                        raise RequestError(
                            f"a request has at most {LARGEST_BODY >> 20} MiB",
                            code="request_too_large",
                            status=413,
                        )
                    if self._held > MOST_HELD:
                        raise RequestError(
                            "too many requests are being sent; try again later",
                            code="overloaded",
                            status=503,
                        )
        except TimeoutError as error:
            raise RequestError(
                f"the request was not sent within {LATEST_S:g} seconds",
                code="request_timeout",
                status=408,
            ) from error
