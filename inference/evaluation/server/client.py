"""Client of a running engine, which times the chunks of each reply as they arrive.

Requests are lists of token ids, a given number of them in flight at once. No request is tried
again: a second try would hide what the first one cost. Requests carry no seed, since engines draw
seeded noise row by row, which costs speed; replies at a temperature differ from run to run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
from msgspec import Meta, Struct

from ....heads.documents import DocumentError, convert
from ....heads.errors import UserError
from ....heads.exchange.engines import ENGINES
from ....heads.exchange.engines.servers import CounterNames, ServerFacts, ServerProtocol
from ....heads.files import JsonObject, no_constant
from ...conversations.prompts import Prompt
from ...keys import OF_SERVER
from ...settings import Sampling, check_url
from .counters import Counters, read_counters

PROTOCOLS = {name: engine.server for name, engine in ENGINES.items() if engine.server is not None}
*_first, _last = (ENGINES[name].title for name in PROTOCOLS)
MEASURED = f"{', '.join(_first)} or {_last}"
"""Titles of the engines that can be measured, as a list in a sentence."""
WHOLE_REPLY_S = 600.0  # limit for a reply, however slowly it arrives
ANSWER_S = 30.0  # limit for any other answer: models, version, counters
SILENCE_S = 600.0  # limit between two chunks
SETTLE_S = 3.0  # limit for counters: engines add them up a moment after the last chunk has left
# A text in which tokenizers differ: code, digits, letters outside ASCII.
PROBE = "def add(a, b):\n    return a + b  # 1234 and ünïcode"


class ModelEntry(Struct):
    """A model of `/v1/models`, or an adapter of one."""

    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a prompt and its reply may have together."""
    parent: str | None = None
    """The base model of an adapter."""


class ModelList(Struct):
    """Answer of `/v1/models`; fields that are not listed are ignored."""

    data: list[ModelEntry]


@dataclass
class EngineServer:
    """Address and properties of a server, known before it is measured."""

    url: str
    engine: str
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


@dataclass
class Load:
    """Outcome of a run of requests at one concurrency."""

    replies: list[ServerReply]
    """Replies in the order of the prompts, turn by turn."""
    seconds: float
    """Time from the first request to the last chunk."""
    peak: int
    """Highest number of requests that were in flight at once."""
    busy: float = 0.0
    """Share of the time in which this client itself used the processor. Near 1 the client is the
    bottleneck, and the figures are its own rather than the server's."""


Follow = Callable[[Prompt, list[int]], Prompt | None]
"""Function of a prompt and its reply's token ids: the conversation's next prompt, or `None`."""


def client_of(url: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client for the server at `url`, whose requests carry `headers`.

    Raises `UserError` for what is no address.
    """
    root = url.rstrip("/").removesuffix("/v1")
    check_url(url, "--server")
    # Engines close a connection that was idle for 5 s; one that is taken up at that moment would
    # look like a server that died.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
    )
    return httpx.AsyncClient(
        base_url=root,
        headers=headers,
        timeout=httpx.Timeout(SILENCE_S, connect=10.0),
        limits=limits,
    )


async def connect(client: httpx.AsyncClient, target: str, model: str | None = None) -> EngineServer:
    """Ask a server for its engine, version and model, and return them.

    `target` is the target's name; `model` is the server's name of it, needed if it serves several.
    Raises `UserError`, also for a server of another engine and for a model that it does not serve.
    """
    url = str(client.base_url).rstrip("/")
    models = await models_of(client)
    name = model_named(models, target, model, url, "--server-model")
    engine, facts = await _recognised(client)
    protocol = PROTOCOLS[engine]
    client.headers.update(protocol.headers)
    if isinstance(protocol.counts, CounterNames):
        counters = await counters_of(client, protocol)
        if counters.generated is None and protocol.no_tokens is not None:
            raise UserError(f"{url} is none of {MEASURED}, or {protocol.no_tokens}")
    return EngineServer(
        url=url,
        engine=engine,
        version=facts.version,
        model=name,
        context=facts.context or models[name].max_model_len,
        speculates=facts.speculates,
    )


async def models_of(client: httpx.AsyncClient) -> dict[str, ModelEntry]:
    """Return the models of a server by their names. Raises `UserError` if it does not list them."""
    listed = await _get(client, "/v1/models")
    try:
        return {entry.id: entry for entry in convert(listed, ModelList).data}
    except DocumentError as error:
        problem = "" if listed is None else f" that can be read ({error})"
        url = str(client.base_url).rstrip("/")
        raise UserError(
            f"{url} has no /v1/models{problem}; give --server the root of a {MEASURED}"
        ) from error


async def _recognised(client: httpx.AsyncClient) -> tuple[str, ServerFacts]:
    """Return the name of a server's engine, and what its own answers say."""
    # In reverse, because the first engine, vLLM, has no answer of its own and takes every server.
    for engine, protocol in reversed(PROTOCOLS.items()):
        facts = protocol.recognise([await _get(client, path) for path in protocol.paths])
        if facts is not None:
            return engine, facts
    raise AssertionError("vLLM takes every server")


def model_named(
    models: dict[str, ModelEntry], target: str, wanted: str | None, url: str, option: str
) -> str:
    """Return the model's name for requests: the wanted, the target's, or the only base model's.

    `option` is where a user names it. Raises `UserError` if the wanted one is not served, or if
    several base models are.
    """
    if wanted is not None:
        if wanted not in models:
            raise UserError(f"{url} serves no model {wanted!r}; there are: {', '.join(models)}")
        return wanted
    if target in models:
        return target
    bases = [name for name, entry in models.items() if entry.parent is None]
    if len(bases) != 1:
        raise UserError(f"{url} serves {', '.join(models) or 'no model'}; name one with {option}")
    return bases[0]


async def check_tokenizer(client: httpx.AsyncClient, server: EngineServer, tokenizer: Any) -> None:
    """Raise `UserError` if the server makes other tokens of a text than `tokenizer` does.

    A server without /tokenize, or with one of another form, is not checked.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await client.post(
                "/tokenize",
                json={
                    # llama.cpp has its own names.
                    "model": server.model,
                    "prompt": PROBE,
                    "content": PROBE,
                    "add_special_tokens": False,
                    "add_special": False,
                },
            )
        server_ids = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError, ValueError, RecursionError, KeyError, TypeError):
        return
    if server_ids is None:
        return
    if server_ids != tokenizer(PROBE, add_special_tokens=False)["input_ids"]:
        raise UserError(
            f"{server.url} serves {server.model} with another tokenizer than --target's; name "
            "that model as --target"
        )


async def counters_of(client: httpx.AsyncClient, protocol: ServerProtocol) -> Counters:
    """Return the counters of an engine as they are now. Raises `UserError` if there are none."""
    assert isinstance(protocol.counts, CounterNames)
    response = await _request(client, "/metrics")
    if response.status_code != 200:
        raise UserError(
            f"{client.base_url} has no /metrics (status {response.status_code}); "
            f"{protocol.no_metrics}"
        )
    return read_counters(response.text, protocol.counts)


async def settled(
    client: httpx.AsyncClient, protocol: ServerProtocol, before: Counters, tokens: int
) -> Counters:
    """Return the counters once they hold `tokens` more than `before` and nothing runs.

    After `SETTLE_S` seconds they are returned as they are: requests of other clients may never end.
    Raises `UserError` if there are none.
    """
    deadline = time.perf_counter() + SETTLE_S
    while True:
        now = await counters_of(client, protocol)
        complete = now.generated is None or now.generated - (before.generated or 0) >= tokens
        if (complete and not now.running) or time.perf_counter() > deadline:
            return now
        await asyncio.sleep(0.05)


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the JSON at `path`, `None` if there is none. Raises `UserError` without an answer."""
    response = await _request(client, path)
    if response.status_code in (401, 403):
        raise UserError(
            f"{client.base_url} wants another API key, or one at all; put it into a file and "
            f"name that with --server-api-key-file, or set {OF_SERVER}"
        )
    try:
        return response.json() if response.status_code == 200 else None
    except (ValueError, RecursionError):
        return None


async def _request(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Return the answer to a GET request. Raises `UserError` if none arrives in `ANSWER_S`."""
    try:
        # httpx's own limit is on the time between two bytes, and this one on the whole answer.
        async with asyncio.timeout(ANSWER_S):
            return await client.get(path, timeout=ANSWER_S)
    except (httpx.HTTPError, TimeoutError) as error:
        raise UserError(
            f"server {client.base_url} does not answer ({str(error) or type(error).__name__}); "
            "start it, or check --server"
        ) from error


async def load(
    client: httpx.AsyncClient,
    server: EngineServer,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: Sampling,
    max_new_tokens: int,
    follow: Follow,
    done: Callable[[], Any] = lambda: None,
) -> Load:
    """Send all prompts, `concurrency` of them at once, and return the replies with their times.

    The next prompt is sent as soon as one is answered. The later turns of a conversation, which
    `follow` makes, are sent one after the other in its place. `done` is called when a prompt and
    its later turns are answered. Raises `UserError` as soon as one request fails.
    """
    # By prompt, since replies arrive in another order than prompts were sent in.
    replies: list[list[ServerReply]] = [[] for _ in prompts]
    # All workers draw from one iterator, so that each prompt goes to the first that is free.
    waiting = iter(range(len(prompts)))
    in_flight = peak = 0

    async def work() -> None:
        nonlocal in_flight, peak
        for index in waiting:
            prompt: Prompt | None = prompts[index]
            while prompt is not None:
                # All workers run in one thread and change hands at an `await` only, so no lock is
                # needed.
                in_flight += 1
                peak = max(peak, in_flight)
                turn = len(replies[index])
                reply = await ask(client, server, prompt, turn, sampling, max_new_tokens)
                in_flight -= 1
                replies[index].append(reply)
                prompt = follow(prompt, reply.ids) if reply.ids is not None else None
            done()

    # Of this thread, which runs the event loop and thereby all requests.
    start, worked = time.perf_counter(), time.thread_time()  # wall time, and processor time
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(work())
    except ExceptionGroup as failures:
        known: BaseException | None = failures.subgroup(UserError)
        if known is None:
            raise
        while isinstance(known, ExceptionGroup):  # a group may hold groups
            known = known.exceptions[0]
        # All requests in flight fail for one reason (a server that has died, say): report it once.
        raise UserError(str(known)) from None
    every: list[ServerReply] = []
    for turns in replies:
        every += turns
    seconds = max(reply.arrivals[-1] for reply in every) - start
    return Load(every, seconds, peak, (time.thread_time() - worked) / seconds)


async def ask(
    client: httpx.AsyncClient,
    server: EngineServer,
    prompt: Prompt,
    turn: int,
    sampling: Sampling,
    max_new_tokens: int,
) -> ServerReply:
    """Send one request and return its reply, read to its end.

    Raises `UserError` if it fails, or if its reply breaks off or takes more than `WHOLE_REPLY_S`.
    """
    room = max_new_tokens
    if server.context is not None:
        # An engine may refuse a limit that leads past the end of its context.
        room = min(room, server.context - len(prompt.token_ids))
    protocol = server.protocol
    path, body = protocol.request(server.model, prompt.token_ids, sampling, room)
    reply = ServerReply(prompt, turn, time.perf_counter())
    try:
        async with (
            asyncio.timeout(WHOLE_REPLY_S),
            client.stream("POST", path, json=body) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _refusal(server, prompt, response.status_code, text)
            async for event in _events(response, server):
                protocol.read(reply, convert(event, protocol.chunk), time.perf_counter())
    except TimeoutError as error:
        raise UserError(
            f"server {server.url} has not finished its reply to prompt {prompt.id} after "
            f"{WHOLE_REPLY_S:g} s; look at its log"
        ) from error
    except DocumentError as error:
        raise UserError(
            f"server {server.url} answers in an unknown form ({error}); is it the engine itself?"
        ) from error
    except httpx.HTTPError as error:
        raise UserError(
            f"server {server.url} broke off while it wrote ({str(error) or type(error).__name__}); "
            "look at its log, then measure again"
        ) from error
    # An engine that aborts a request ends its stream like any other.
    if reply.finish in ("", "abort", "error") or not reply.arrivals:
        raise UserError(
            f"server {server.url} ended a reply to prompt {prompt.id} unfinished; look at its "
            "log, then measure again"
        )
    return reply


def _refusal(server: EngineServer, prompt: Prompt, status: int, body: str) -> UserError:
    """Return the error for a request that was answered with `status` and `body`."""
    try:
        # The message is the object itself, its `error`, or the `message` of either.
        message = json.loads(body)
        for key in ("error", "message"):
            message = message.get(key, message) if isinstance(message, dict) else message
    except (ValueError, RecursionError):
        message = body
    message = " ".join(str(message).split())[:200]
    if status in (429, 503):
        return UserError(
            f"{server.url} refuses so many requests at once (status {status}: {message}); give a "
            "lower --concurrency"
        )
    return UserError(
        f"{server.url} refuses prompt {prompt.id} of {len(prompt.token_ids)} tokens (status "
        f"{status}: {message}); check its limits"
    )


async def _events(response: httpx.Response, server: EngineServer) -> AsyncIterator[JsonObject]:
    """Yield the server-sent events up to [DONE]. Raises `UserError` for an error or no object."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line.removeprefix("data:").strip()
        if text == "[DONE]":
            return
        try:
            event = json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"server {server.url} sends a chunk that is not JSON ({text[:80]!r}); is it the "
                "engine itself?"
            ) from error
        if not isinstance(event, dict) or "error" in event:
            raise UserError(
                f"server {server.url} failed within a reply ({text[:200]}); look at its log, then "
                "measure again"
            )
        yield event
