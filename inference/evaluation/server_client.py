"""Client of a running engine, which times the chunks of each reply as they arrive.

Requests are lists of token ids, a fixed number of them in flight at once. A request is never
retried, which would hide its cost. Requests carry no seed, since engines draw seeded noise row by
row, which costs speed; sampled replies differ from run to run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

import httpx
from msgspec import Meta, Struct

from ...heads.documents import DocumentError, convert
from ...heads.errors import UserError
from ...heads.exchange.engines import ENGINES
from ...heads.exchange.engines.engine import CounterNames, ServerFacts
from ...heads.files import JsonObject, no_constant
from ..base.settings import SERVER_KEY_VARIABLE, Sampling, check_url
from ..conversations.prompts import Prompt
from .results import ServerReport
from .server_counters import Counters, ServerReply, read_counters

PROTOCOLS = {name: engine.server for name, engine in ENGINES.items() if engine.server is not None}
*_first, _last = (ENGINES[name].title for name in PROTOCOLS)
MEASURED = f"{', '.join(_first)} or {_last}"
"""Titles of the engines that can be measured, as a list in a sentence."""
WHOLE_REPLY_S = 600.0  # limit for a reply, however slowly it arrives, and between two chunks
ANSWER_S = 30.0  # limit for any other answer: models, version, counters
SETTLE_S = 3.0  # limit for counters, which engines update shortly after the last chunk
# A text in which tokenizers differ: code, digits, letters outside ASCII.
PROBE = "def add(a, b):\n    return a + b  # 1234 and ünïcode"
NextPrompt = Callable[[Prompt, list[int]], Prompt | None]
"""Function of a prompt and its reply's token ids: the conversation's next prompt, or `None`."""


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


def client_of(url: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client for the server at `url`, whose requests carry `headers`.

    Raises `UserError` for an invalid URL.
    """
    check_url(url, "--server")
    # Engines close a connection that was idle for 5 s; if it is reused at that moment, the server
    # seems to have died.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
    )
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(WHOLE_REPLY_S, connect=10.0),
        limits=limits,
    )


async def connect(
    client: httpx.AsyncClient, target: str, model: str | None, tokenizer: Any
) -> ServerReport:
    """Return a server's description of itself, as a report without settings.

    `target` is the target's name; `model` is the server's name for it, needed if it serves several.
    Raises `UserError`, also for an unknown engine, for a model that it does not serve, and if its
    tokens of a text differ from those of `tokenizer`.
    """
    url = str(client.base_url).rstrip("/")
    models = await models_of(client)
    name = model_named(models, target, model, url, "--server-model")
    engine, facts = await _recognised(client)
    protocol = PROTOCOLS[engine]
    client.headers.update(protocol.headers)
    if isinstance(protocol.counts, CounterNames):
        counters = await counters_of(client, engine)
        if counters.generated is None and protocol.no_tokens is not None:
            raise UserError(f"{url} is not a {MEASURED}, or {protocol.no_tokens}")
    server_ids = await _tokens_of_probe(client, name)
    if server_ids not in (None, tokenizer(PROBE, add_special_tokens=False)["input_ids"]):
        raise UserError(
            f"{url} serves {name} with another tokenizer than --target's; name that model as "
            "--target"
        )
    return ServerReport(
        url=url,
        engine=engine,
        version=facts.version,
        model=name,
        context=facts.context or models[name].max_model_len,
        speculates=facts.speculates,
        settings=[],
    )


async def _recognised(client: httpx.AsyncClient) -> tuple[str, ServerFacts]:
    """Return the name of a server's engine, and the facts in its answers."""
    # In reverse, because the first engine, vLLM, has no answer of its own and matches any server.
    for engine, protocol in reversed(PROTOCOLS.items()):
        facts = protocol.recognise([await _get(client, path) for path in protocol.paths])
        if facts is not None:
            return engine, facts
    raise AssertionError("vLLM matches any server")


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


def model_named(
    models: dict[str, ModelEntry], target: str, wanted: str | None, url: str, option: str
) -> str:
    """Return the model's name for requests: `wanted`, the target's, or the only base model's.

    `option` names it on the command line. Raises `UserError` if `wanted` is not served, or if
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


async def _tokens_of_probe(client: httpx.AsyncClient, model: str) -> Any:
    """Return the server's tokens of `PROBE`; None if /tokenize is missing or of another form.

    llama.cpp has its own names for the fields.
    """
    body: JsonObject = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    try:
        async with asyncio.timeout(ANSWER_S):
            body |= {"content": PROBE, "add_special": False}
            answer = await client.post("/tokenize", json=body)
        return answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError, ValueError, RecursionError, KeyError, TypeError):
        return None


async def counters_of(
    client: httpx.AsyncClient,
    engine: str,
    before: Counters | None = None,
    replies: Sequence[ServerReply] = (),
) -> Counters:
    """Return the present counters of an engine. Raises `UserError` if it has none.

    With a reading `before` the function waits until they include the tokens of `replies` and
    nothing runs, for at most `SETTLE_S` seconds: requests of other clients may never end.
    """
    protocol = PROTOCOLS[engine]
    assert isinstance(protocol.counts, CounterNames)
    deadline = time.perf_counter() + SETTLE_S
    tokens = sum(reply.tokens for reply in replies)
    while True:
        response = await _request(client, "/metrics")
        if response.status_code != 200:
            raise UserError(
                f"{client.base_url} has no /metrics (status {response.status_code}); "
                f"{protocol.no_metrics}"
            )
        now = read_counters(response.text, protocol.counts)
        if before is None or time.perf_counter() > deadline:
            return now
        complete = now.generated is None or now.generated - (before.generated or 0) >= tokens
        if complete and not now.running:
            return now
        await asyncio.sleep(0.05)


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the JSON at `path`, or None. Raises `UserError` if the server does not answer."""
    response = await _request(client, path)
    if response.status_code in (401, 403):
        raise UserError(
            f"{client.base_url} requires a valid API key; set {SERVER_KEY_VARIABLE}, or name a "
            "file with it where the command takes one"
        )
    try:
        return response.json() if response.status_code == 200 else None
    except (ValueError, RecursionError):
        return None


async def _request(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Return the answer to a GET request. Raises `UserError` if none arrives in `ANSWER_S`."""
    try:
        # httpx limits the time between two bytes, this the time of the whole answer.
        async with asyncio.timeout(ANSWER_S):
            return await client.get(path)
    except (httpx.HTTPError, TimeoutError) as error:
        raise UserError(
            f"server {client.base_url} does not answer ({str(error) or type(error).__name__}); "
            "start it, or check --server"
        ) from error


async def replies_to(
    client: httpx.AsyncClient,
    server: ServerReport,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: Sampling,
    max_new_tokens: int,
    follow: NextPrompt,
    done: Callable[[], object] = lambda: None,
) -> list[ServerReply]:
    """Send all prompts, `concurrency` of them at once; return the replies, turn by turn.

    The next prompt is sent as soon as one is answered. The later turns of a conversation, which
    `follow` returns, are sent one after the other in its place. `done` is called when a prompt and
    its later turns are answered. Raises `UserError` as soon as one request fails.
    """
    # By prompt, since replies do not arrive in the order of the prompts.
    replies: list[list[ServerReply]] = [[] for _ in prompts]
    # All workers draw from one iterator, so that each prompt goes to the first that is free.
    waiting = iter(range(len(prompts)))

    async def work() -> None:
        for index in waiting:
            prompt: Prompt | None = prompts[index]
            while prompt is not None:
                turn = len(replies[index])
                reply = await ask(client, server, prompt, turn, sampling, max_new_tokens)
                replies[index].append(reply)
                prompt = follow(prompt, reply.ids) if reply.ids is not None else None
            done()

    # If the server dies, all requests in flight fail. The first error is raised; `asyncio.run`
    # cancels the other workers.
    await asyncio.gather(*(work() for _ in range(min(concurrency, len(prompts)))))
    return [reply for turns in replies for reply in turns]


async def ask(
    client: httpx.AsyncClient,
    server: ServerReport,
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
        # An engine may refuse a limit beyond the end of its context.
        room = min(room, server.context - len(prompt.token_ids))
    protocol = PROTOCOLS[server.engine]
    path, body = protocol.request(server.model or "", prompt.token_ids, sampling, room)
    reply = ServerReply(prompt, turn, time.perf_counter())
    try:
        async with (
            asyncio.timeout(WHOLE_REPLY_S),
            client.stream("POST", path, json=body) as response,
        ):
            if response.status_code != 200:
                reason = " ".join((await response.aread()).decode(errors="replace").split())
                crowded = response.status_code in (429, 503)
                raise UserError(
                    f"{server.url} refuses prompt {prompt.id} of {len(prompt.token_ids)} tokens "
                    f"(status {response.status_code}: {reason[:200]}); "
                    f"{'give a lower --concurrency' if crowded else 'check its limits'}"
                )
            async for event in _events(response):
                protocol.read(reply, convert(event, protocol.chunk), time.perf_counter())
            # An engine that aborts a request ends its stream like any other.
            if reply.finish in ("", "abort", "error") or not reply.arrivals:
                raise DocumentError("its end is missing")
    except (TimeoutError, DocumentError, httpx.HTTPError) as error:
        why = str(error) or type(error).__name__
        raise UserError(
            f"server {server.url} failed while it wrote the reply to prompt {prompt.id} ({why}); "
            "look at its log, then measure again"
        ) from error
    return reply


async def _events(response: httpx.Response) -> AsyncIterator[JsonObject]:
    """Yield the server-sent events up to [DONE]. Raises `DocumentError` for an invalid event."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line.removeprefix("data:").strip()
        if text == "[DONE]":
            return
        try:
            event = json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"a chunk that is not JSON: {text[:80]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            raise DocumentError(f"a chunk that is an error: {text[:200]}")
        yield event
