"""HTTP of the local server: OpenAI's paths, counters, and the page."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from huggingface_hub.repocard import metadata_load
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from yaml import YAMLError

from ...heads.files import JsonObject
from ..base.settings import Sampling
from .engine import INTERNAL, BatchSettings, Engine, RequestError
from .protocol import (
    ChatRequest,
    CompletionRequest,
    RequestFields,
    read_request,
    requests_of,
    sampling_of,
)
from .replies import EventStream, PendingReplies

PAGE = Path(__file__).with_name("page")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Scripts of the page cannot turn a text into HTML.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {f"/{file.name}": file for file in PAGE.iterdir() if file.suffix in TYPES}
FILES["/"] = FILES.pop("/page.html")
OPEN_PATHS = ("/health", "/version")
VERSION = f"draftsmith {metadata.version('draftsmith')}"
LARGEST_BODY = 2 << 20
"""Bytes. A prompt of 131,072 tokens has half a megabyte as text, up to 1.2 if all characters are
escaped as \\uXXXX, and a megabyte as token ids. While a body is parsed, no other thread runs
Python: 2 MiB of small lists take 0.3 s."""
LATEST_S = 10.0  # limit for sending a body
SPARE = 256
"""Connections in addition to requests that run or wait: pages, and clients between requests."""
Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Service:
    """Models, defaults and limits of the server."""

    engine: Engine
    defaults: Sampling
    """Sampling parameters for requests that do not set them."""
    longest: int = 1024
    """Tokens of a reply where the request gives no limit."""
    api_key: str | None = None
    hosts: list[str] = field(default_factory=lambda: ["*"])
    """Names under which the server may be addressed."""

    @property
    def name(self) -> str:
        """Name of the target as a model, which decodes with the first drafter."""
        path = self.engine.target.name
        return Path(path).name or path

    @cached_property
    def models(self) -> dict[str, JsonObject]:
        """Entries of `/v1/models` by their names: the target, and under it each drafter."""
        target, drafters = self.engine.target, list(self.engine.proposers)
        config = target.model.config.get_text_config()
        shared = {
            "object": "model",
            "created": int(time.time()),
            "owned_by": "draftsmith",
            "root": self.name,
            "max_model_len": target.max_positions,
            "chat": bool(target.tokenizer.chat_template),
            "code": writes_code(target.name),
        }
        own = {
            "parent": None,
            "drafter": drafters[0],
            # The last part of a path is often just "target", "best" or "final".
            "title": "/".join(Path(target.name).parts[-2:]).strip("/"),
            "about": f"{target.model.config.model_type}, {config.num_hidden_layers} layers, "
            f"hidden size {config.hidden_size}, {str(target.dtype).removeprefix('torch.')}, "
            f"{target.device.type}",
        }
        found = {self.name: {"id": self.name, **shared, **own}}
        for drafter in drafters:
            model = f"{self.name}:{drafter}"
            own = {"parent": self.name, "drafter": drafter, "title": drafter, "about": None}
            found[model] = {"id": model, **shared, **own}
        return found

    def model(self, name: str) -> JsonObject:
        """Return the entry of a model. Raises `RequestError` for an unknown one."""
        if name in self.models:
            return self.models[name]
        message = f"unknown model {name!r}; there are: {', '.join(self.models)}"
        raise RequestError(message, "model", "model_not_found", 404)


def writes_code(path: str) -> bool:
    """Return true if the model card in a target's folder has the tag "code"."""
    try:
        card = metadata_load(Path(path, "README.md")) or {}
    except (OSError, ValueError, YAMLError):  # it is missing or damaged
        return False
    tags = card.get("tags")
    return isinstance(tags, list) and "code" in tags


def app_of(service: Service) -> Starlette:
    """Return the application, whose engine the caller closes."""
    routes, handlers = [Route(path, page_file) for path in FILES], handlers_of(service)
    for path, handler in handlers.items():
        method = "POST" if path.endswith("completions") else "GET"
        if service.api_key is not None and path not in OPEN_PATHS:
            handler = with_key(handler, service.api_key)
        routes.append(Route(path, handler, methods=[method]))

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            message = f"unknown path {request.url.path}; there are {', '.join(handlers)}"
            error = RequestError(message, None, "unknown_url", 404)
        elif isinstance(error, HTTPException):  # such as a GET in place of a POST
            headers = dict(error.headers or {})
            error = RequestError(error.detail, None, None, error.status_code, headers)
        elif isinstance(error, ClientDisconnect):  # while it sent its body: no one reads the answer
            error = RequestError("the client has left")
        elif not isinstance(error, RequestError):  # the server's log shows it
            error = RequestError(INTERNAL, None, "internal_error", 500)
        return JSONResponse(error.body(), error.status, error.headers)

    return Starlette(
        routes=routes,
        # Against DNS rebinding: another site's host name must not reach the server.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=service.hosts)],
        exception_handlers=dict.fromkeys(
            (HTTPException, ClientDisconnect, RequestError, Exception), failed
        ),
    )


def handlers_of(service: Service) -> dict[str, Handler]:
    """Return the handlers by path; those of `OPEN_PATHS` need no API key."""

    async def health(request: Request) -> Response:
        if service.engine.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the decoding thread has ended"}, 503)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*service.models.values()]})

    async def one_model(request: Request) -> Response:
        return JSONResponse(service.model(request.path_params["model"]))

    async def counters(request: Request) -> Response:
        return Response(service.engine.counters.text(), media_type="text/plain; version=0.0.4")

    return {
        "/v1/chat/completions": partial(complete, kind=ChatRequest, service=service),
        "/v1/completions": partial(complete, kind=CompletionRequest, service=service),
        "/v1/models": models,
        "/v1/models/{model:path}": one_model,  # a name may have slashes
        "/metrics": counters,
        "/health": health,
        "/version": version,
    }


async def page_file(request: Request) -> Response:

    file = FILES[request.url.path]
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(file.read_text(), media_type=TYPES[file.suffix], headers=headers)


def with_key(handler: Handler, key: str) -> Handler:
    """Return `handler` after a check that the request carries the API key."""
    wanted = f"Bearer {key}".encode()

    async def checked(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")  # as it was sent
        if not secrets.compare_digest(given, wanted):
            raise RequestError("the API key is missing or wrong", None, "invalid_api_key", 401)
        return await handler(request)

    return checked


async def complete(request: Request, kind: type[RequestFields], service: Service) -> Response:
    """Decode the replies to a request, and return the answer, whole or as a stream of events.

    Raises `RequestError`.
    """
    engine, name = service.engine, service.name

    def understood(body: bytes) -> partial[PendingReplies]:
        """Parse a body, encode its prompts, and return a function that submits them.

        Raises `RequestError`.
        """
        asked = read_request(body, kind)
        model = asked.model or name
        drafter = service.model(model)["drafter"]
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        settings = BatchSettings(
            drafter,
            sampling_of(asked, service.defaults),
            tuple(dict.fromkeys(stops)),
            asked.ignore_eos,
        )
        requests = requests_of(asked, engine, name, service.longest)
        return partial(PendingReplies, engine, asked, model, settings, requests)

    # In another thread, so that other connections need not wait.
    submit = await run_in_threadpool(understood, await body_of(request))
    pending = submit()
    left = asyncio.ensure_future(leaving(request))
    if pending.asked.stream:
        return EventStream(pending, left)
    try:
        async for _ in pending.steps(left):
            pass
        return JSONResponse(pending.whole())
    finally:
        left.cancel()


async def body_of(request: Request) -> bytes:
    """Return the body of a request.

    Raises `RequestError` for one that is too large, too late or not declared as JSON. Without the
    server's consent another site's page can send it text, but not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        why = "send the request with Content-Type: application/json"
        raise RequestError(why, code="unsupported_media_type", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(LATEST_S):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BODY:
                    why = f"a request has at most {LARGEST_BODY >> 20} MiB"
                    raise RequestError(why, code="request_too_large", status=413)
    except TimeoutError as error:
        why = f"the request was not sent within {LATEST_S:g} seconds"
        close = {"Connection": "close"}  # do not wait for the rest of the body
        raise RequestError(why, None, "request_timeout", 408, close) from error
    return bytes(body)


async def leaving(request: Request) -> None:
    """Return when the client closes the connection, once its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class DecodingServer(uvicorn.Server):
    """Server that on shutdown stops decoding before it waits for its connections."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._engine = engine
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
    def signals_stop_server(self) -> Iterator[None]:
        """Make SIGINT and SIGTERM stop the server, even before it runs.

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

    async def shutdown(self, sockets: Any = None) -> None:
        await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)
