"""HTTP of the local server: OpenAI's paths, counters, and the page."""

from __future__ import annotations

import asyncio
import difflib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...heads.files import JsonObject
from ..settings import Sampling
from .engine import STOPPING, BatchSettings, Engine, EngineClosed, QueueFull
from .protocol import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    read_request,
    requests_of,
    sampling_of,
    stops_of,
)
from .replies import ClientLeft, DecodingFailed, Pending

PAGE = Path(__file__).with_name("page")
LARGEST_BODY = 16 << 20  # bytes
LEFT = 499  # status in the server's own log: the client has left, and nobody reads it
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Service:
    """Models, defaults and limits of the server."""

    engine: Engine
    name: str
    """Name of the target as a model; it decodes with the first drafter."""
    default: str
    """The first drafter."""
    defaults: Sampling
    """Sampling parameters that a request does not name."""
    longest: int = 1024
    """Tokens of a reply where the request gives no limit."""
    api_key: str | None = None
    hosts: list[str] = field(default_factory=lambda: ["*"])
    """Names under which the server may be addressed."""
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def models(self) -> dict[str, str]:
        """The drafter of each model: the target's name, and that name with each drafter's."""
        named = {f"{self.name}:{drafter}": drafter for drafter in self.engine.proposers}
        return {self.name: self.default, **named}


def app_of(service: Service) -> Starlette:
    """Return the application, whose engine the caller closes."""
    engine = service.engine

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": listed(service)})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        found = [entry for entry in listed(service) if entry["id"] == name]
        return JSONResponse(found[0]) if found else failure(f"there is no model {name!r}", 404)

    async def chat(request: Request) -> Response:
        return await complete(request, ChatRequest, service)

    async def completions(request: Request) -> Response:
        return await complete(request, CompletionRequest, service)

    async def health(request: Request) -> Response:
        return JSONResponse(
            {"status": "ok" if engine.alive else "the decoding thread has ended"},
            200 if engine.alive else 503,
        )

    async def version(request: Request) -> Response:
        return JSONResponse({"version": f"draftsmith {metadata.version('draftsmith')}"})

    async def counters(request: Request) -> Response:
        return Response(engine.counters.text(), media_type="text/plain; version=0.0.4")

    engine.counters.watch(lambda: engine.running, lambda: engine.waiting)
    return Starlette(
        routes=[
            *(Route(path, page_file, name=path) for path in FILES),
            Route("/v1/models", allowed(models, service)),
            Route("/v1/models/{model:path}", allowed(one_model, service)),
            Route("/v1/chat/completions", allowed(chat, service), methods=["POST"]),
            Route("/v1/completions", allowed(completions, service), methods=["POST"]),
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", counters),
        ],
        # A name that another site's owner lets point at this machine must not reach the server.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=service.hosts)],
        exception_handlers={
            404: unknown_path,
            HTTPException: refused,
            Exception: unforeseen,
        },
    )


async def page_file(request: Request) -> Response:
    """Return one of the page's files."""
    name = FILES[request.url.path]
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response((PAGE / name).read_text(), media_type=TYPES[Path(name).suffix], headers=headers)


async def unknown_path(request: Request, error: Exception) -> Response:
    """Return the answer to a path that there is not."""
    there = "/v1/chat/completions, /v1/completions, /v1/models, /health, /version and /metrics"
    return failure(f"there is no {request.url.path}; there are {there}, and the page at /", 404)


async def refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that the framework refuses, such as a GET in place of POST."""
    assert isinstance(error, HTTPException)
    return failure(error.detail, error.status_code, dict(error.headers or {}))


async def unforeseen(request: Request, error: Exception) -> Response:
    """Return the answer to a request that met an internal error, which the server's log shows."""
    return failure(f"an internal error: {type(error).__name__}; see the server's log", 500)


def failure(message: str | Exception, status: int, headers: dict[str, str] | None = None):
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": str(message), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def allowed(handler: Handler, service: Service) -> Handler:
    """Return `handler` behind the check of the API key, with its errors as answers."""
    wanted = f"Bearer {service.api_key}".encode()

    async def checked(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")  # as it was sent
        if service.api_key is not None and not secrets.compare_digest(given, wanted):
            return failure("the API key is missing or wrong", 401)
        try:
            return await handler(request)
        except RequestError as error:
            return failure(error, error.status)
        except QueueFull:
            full = f"{service.engine.queue} requests wait already; try again later"
            return failure(full, 503, {"Retry-After": "1"})
        except EngineClosed:
            return failure(STOPPING, 503)
        except DecodingFailed as error:
            return failure(error, 503 if str(error) == STOPPING else 500)
        except (ClientLeft, ClientDisconnect):
            return failure("the client has left", LEFT)

    return checked


def listed(service: Service) -> list[JsonObject]:
    """Return the entries of `/v1/models`: the target, and under it each drafter."""
    target = service.engine.target
    entries = []
    for model, drafter in service.models.items():
        entries.append(
            {
                "id": model,
                "object": "model",
                "created": service.started,
                "owned_by": "draftsmith",
                "root": service.name,
                "parent": None if model == service.name else service.name,
                "max_model_len": target.max_positions,
                "drafter": drafter,
                "chat": bool(target.tokenizer.chat_template),
            }
        )
    return entries


async def complete(
    request: Request, kind: type[ChatRequest] | type[CompletionRequest], service: Service
) -> Response:
    """Decode what a request asks for, and return the answer, whole or as a stream of events.

    Raises `RequestError`, `QueueFull`, and for a whole answer `DecodingFailed` and `ClientLeft`.
    """
    asked = read_request(await body_of(request), kind)
    model = asked.model or service.name
    if (drafter := service.models.get(model)) is None:
        close = difflib.get_close_matches(model, service.models, n=1)
        meant = f"did you mean {close[0]}? There" if close else "there"
        there = ", ".join(service.models)
        raise RequestError(f"there is no model {model!r}; {meant} are: {there}", 404)
    settings = BatchSettings(
        drafter, sampling_of(asked, service.defaults), stops_of(asked), asked.ignore_eos
    )
    requests = requests_of(asked, service.engine.target, service.longest)
    if len(requests) > service.engine.queue:
        raise RequestError(
            f"{len(requests)} replies are asked for, and at most {service.engine.queue} can wait"
        )
    left = asyncio.ensure_future(leaving(request))
    try:
        pending = Pending(service.engine, requests, settings, asked, model)
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return EventStream(pending, left, usage)
        async for _ in pending.steps(left):
            pass
        return JSONResponse(pending.whole())
    finally:
        if not asked.stream:
            left.cancel()


class EventStream(StreamingResponse):
    """Answer that is sent as a stream of events; however it ends, its replies end with it."""

    def __init__(self, pending: Pending, left: asyncio.Future[None], usage: bool) -> None:
        self._pending, self._left = pending, left
        headers = {"Cache-Control": "no-cache"}
        super().__init__(
            streamed(pending, left, usage), media_type="text/event-stream", headers=headers
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A client that left before the first event has never begun the iterator.
            self._pending.give_up()
            self._left.cancel()


async def streamed(
    pending: Pending, left: asyncio.Future[None], usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer; `usage`: the last one has the numbers of tokens."""
    try:
        async for step in pending.steps(left):
            yield event_of(pending.chunk(*step))
        if usage:
            yield event_of(pending.last_chunk())
        yield b"data: [DONE]\n\n"
    except ClientLeft:
        pass  # nobody reads on
    except DecodingFailed as error:
        yield event_of({"error": {"message": str(error), "type": "server_error"}})


def event_of(value: JsonObject) -> bytes:
    """Return a server-sent event that holds a JSON value."""
    # ASCII, since clients split lines at some characters outside of it.
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def body_of(request: Request) -> bytes:
    """Return the body of a request. Raises `RequestError` if it is too large or not JSON by name.

    A page of another site can send text to this server without asking, but not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("send the request with Content-Type: application/json", 415)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            raise RequestError(f"a request has at most {LARGEST_BODY >> 20} MiB", 413)
    return bytes(body)


async def leaving(request: Request) -> None:
    """Return when the client has closed the connection, after its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
