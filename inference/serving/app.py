"""HTTP of the local server: OpenAI's paths, counters, and the page."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from .engine import INTERNAL, STOPPING, BatchSettings, Engine, EngineClosed, QueueFull
from .errors import RequestError, error_of, failure, similar
from .intake import Intake
from .openapi import Endpoint, Handler, description
from .protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    Limits,
    read_request,
    requests_of,
    sampling_of,
    stops_of,
)
from .replies import Asked, ClientLeft, DecodingFailed, Pending
from .titles import drafter_title, target_facts, target_title, writes_code

PAGE = Path(__file__).with_name("page")
LEFT = 499  # status in the server's own log: the client has left, and nobody reads it
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # No text becomes HTML, whatever a script of the page does with it.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {f"/{file.name}": file for file in PAGE.iterdir() if file.suffix in TYPES}
FILES["/"] = FILES.pop("/page.html")
VERSION = f"draftsmith {metadata.version('draftsmith')}"
REFUSALS = ("400", "404", "408", "413", "415", "503")


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
    intake: Intake = field(default_factory=Intake)

    @property
    def models(self) -> dict[str, str]:
        """The drafter of each model: the target's name, and that name with each drafter's."""
        named = {f"{self.name}:{drafter}": drafter for drafter in self.engine.proposers}
        return {self.name: self.default, **named}

    @cached_property
    def titles(self) -> dict[str, str]:
        """The title of each model for people: the target's, and each drafter's."""
        proposers = self.engine.proposers
        titles = {model: drafter_title(proposers[name]) for model, name in self.models.items()}
        path = self.engine.target.name
        given = self.name != Path(path).name  # by a user, with --name
        return titles | {self.name: self.name if given else target_title(path)}

    @cached_property
    def about(self) -> str:
        """The target's architecture, depth, width, type of numbers and device."""
        return target_facts(self.engine.target)

    @cached_property
    def code(self) -> bool:
        """True if the target's card says that it writes code."""
        return writes_code(self.engine.target.name)

    @cached_property
    def limits(self) -> Limits:
        """What a request may ask for."""
        # A token's name has at least as many characters as its text.
        longest_token = max(map(len, self.engine.target.tokenizer.get_vocab()))
        return Limits(self.name, self.engine.queue, self.longest, longest_token)


def app_of(service: Service) -> Starlette:
    """Return the application, whose engine the caller closes."""
    endpoints = endpoints_of(service)
    document = description(endpoints, VERSION, service.api_key is not None)

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    routes = [Route(path, page_file, name=path) for path in FILES]
    for endpoint in endpoints:
        handler = allowed(endpoint.handler, service) if endpoint.keyed else endpoint.handler
        path = endpoint.path.replace("{model}", "{model:path}")  # a name may have slashes
        routes.append(Route(path, handler, methods=[endpoint.method]))
    routes.append(Route("/openapi.json", openapi))
    paths = ", ".join([*(endpoint.path for endpoint in endpoints), "/openapi.json"])

    async def unknown_path(request: Request, error: Exception) -> Response:
        message = f"there is no {request.url.path}; there are {paths}, and the page at /"
        return failure(message, 404, code="unknown_url")

    return Starlette(
        routes=routes,
        # A name that another site's owner lets point at this machine must not reach the server.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=service.hosts)],
        exception_handlers={
            404: unknown_path,
            HTTPException: refused,
            Exception: unforeseen,
        },
    )


def endpoints_of(service: Service) -> list[Endpoint]:
    """Return the paths of the API, of which the routes and `/openapi.json` are made."""
    engine = service.engine

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": listed(service)})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        found = [entry for entry in listed(service) if entry["id"] == name]
        if not found:
            raise no_model(name, service)
        return JSONResponse(found[0])

    async def health(request: Request) -> Response:
        return JSONResponse(
            {"status": "ok" if engine.alive else "the decoding thread has ended"},
            200 if engine.alive else 503,
        )

    async def version(request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def counters(request: Request) -> Response:
        return Response(engine.counters.text(), media_type="text/plain; version=0.0.4")

    chat = partial(complete, kind=ChatRequest, service=service)
    completions = partial(complete, kind=CompletionRequest, service=service)
    return [
        Endpoint("/v1/chat/completions", chat, "Reply to messages.", ChatRequest, REFUSALS),
        Endpoint("/v1/completions", completions, "Continue texts.", CompletionRequest, REFUSALS),
        Endpoint("/v1/models", models, "The target, and under it each drafter."),
        Endpoint("/v1/models/{model}", one_model, "One model.", errors=("404",)),
        Endpoint("/metrics", counters, "Counters for Prometheus.", media="text/plain"),
        Endpoint("/health", health, "Whether the server decodes.", keyed=False),
        Endpoint("/version", version, "The version of draftsmith.", keyed=False),
    ]


async def page_file(request: Request) -> Response:
    """Return one of the page's files."""
    file = FILES[request.url.path]
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(file.read_text(), media_type=TYPES[file.suffix], headers=headers)


async def refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that the framework refuses, such as a GET in place of POST."""
    assert isinstance(error, HTTPException)
    return failure(error.detail, error.status_code, headers=dict(error.headers or {}))


async def unforeseen(request: Request, error: Exception) -> Response:
    """Return the answer to a request that met an internal error, which the server's log shows."""
    return failure(INTERNAL, 500, code="internal_error")


def allowed(handler: Handler, service: Service) -> Handler:
    """Return `handler` after the check of the API key, with its errors as answers."""
    wanted = f"Bearer {service.api_key}".encode()

    async def checked(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")  # as it was sent
        if service.api_key is not None and not secrets.compare_digest(given, wanted):
            return failure("the API key is missing or wrong", 401, code="invalid_api_key")
        try:
            return await handler(request)
        except RequestError as error:
            # The rest of a body that came too late is not waited for.
            close = {"Connection": "close"} if error.status == 408 else None
            return failure(error, error.status, error.param, error.code, close)
        except QueueFull:
            full = f"{service.engine.queue} requests wait already; try again later"
            return failure(full, 503, code="queue_full", headers={"Retry-After": "1"})
        except EngineClosed:
            return failure(STOPPING, 503, code="stopping")
        except (ClientLeft, ClientDisconnect):
            return failure("the client has left", LEFT)

    return checked


def listed(service: Service) -> list[JsonObject]:
    """Return the entries of `/v1/models`: the target, and under it each drafter."""
    target = service.engine.target
    return [
        {
            "id": model,
            "object": "model",
            "created": service.started,
            "owned_by": "draftsmith",
            "root": service.name,
            "parent": None if model == service.name else service.name,
            "max_model_len": target.max_positions,
            "drafter": drafter,
            "title": service.titles[model],
            "about": service.about if model == service.name else None,
            "chat": bool(target.tokenizer.chat_template),
            "code": service.code,
        }
        for model, drafter in service.models.items()
    ]


def no_model(name: str, service: Service) -> RequestError:
    """Return the refusal of a request for a model that there is not."""
    close = similar(name, list(service.models))
    meant = f"did you mean {close}? There" if close else "there"
    there = ", ".join(service.models)
    message = f"there is no model {name!r}; {meant} are: {there}"
    return RequestError(message, "model", "model_not_found", 404)


def understood(body: bytes, kind: type[Common], service: Service) -> Asked:
    """Return what a body asks for, with its prompts encoded. Raises `RequestError`."""
    asked = read_request(body, kind)
    model = asked.model or service.name
    if (drafter := service.models.get(model)) is None:
        raise no_model(model, service)
    sampling = sampling_of(asked, service.defaults)
    settings = BatchSettings(drafter, sampling, stops_of(asked), asked.ignore_eos)
    requests = requests_of(asked, service.engine.target, service.limits)
    return Asked(asked, model, settings, requests)


async def complete(request: Request, kind: type[Common], service: Service) -> Response:
    """Decode what a request asks for, and return the answer, whole or as a stream of events.

    Raises `RequestError`, `QueueFull`, and for a whole answer `ClientLeft`.
    """
    read = partial(understood, kind=kind, service=service)
    asked = await service.intake.read(request, read)
    fields = asked.fields
    pending = Pending(service.engine, asked)
    left = asyncio.ensure_future(leaving(request))
    if fields.stream:
        usage = fields.stream_options is not None and fields.stream_options.include_usage
        return EventStream(pending, left, usage)
    try:
        async for _ in pending.steps(left):
            pass
        return JSONResponse(pending.whole())
    finally:
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
        yield event_of(error_of(error, error.status, code=error.code))


def event_of(value: JsonObject) -> bytes:
    """Return a server-sent event that holds a JSON value."""
    # ASCII, since clients split lines at some characters outside of it.
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def leaving(request: Request) -> None:
    """Return when the client has closed the connection, after its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
