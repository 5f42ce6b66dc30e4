"""A running vLLM or SGLang: requests of token ids, so many in flight at once, their chunks timed as
they come.

No request is tried again: a second try would hide what the first one cost. Requests carry no seed,
since engines draw seeded noise row by row, which costs speed; replies at a temperature differ from
run to run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ....heads.documents import DocumentError, convert
from ....heads.errors import UserError
from ....heads.files import no_constant
from ...conversations.prompts import Prompt
from ...settings import Sampling, check_url
from .answers import ModelEntry, ModelList, SglangChunk, SglangFinish, SglangMeta, VllmChunk
from .counters import Counters, read_counters

WHOLE_REPLY_S = 600.0  # for a reply, however slowly it comes
ANSWER_S = 30.0  # for what it says of itself
SILENCE_S = 600.0  # a chunk that has not come by then does not come
SETTLE_S = 3.0  # engines add up their counters a moment after the last chunk has left
PROBE = "def add(a, b):\n    return a + b  # 1234 and ünïcode"


@dataclass
class EngineServer:
    """What is known of a server before it is measured."""

    url: str
    engine: str
    """vllm or sglang."""
    version: str
    model: str
    context: int | None
    """Tokens that a prompt and its reply may have together, where the server says so."""
    speculates: bool | None
    """As SGLang says of itself; vLLM's counters say it."""


@dataclass
class ServerReply:
    """What the server wrote to one prompt, and when; times are of one clock, in seconds."""

    prompt: Prompt
    turn: int
    """From 0."""
    sent: float
    ids: list[int] | None = None
    """Token ids, the end token included; `None` where the server does not give them."""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When each chunk that brought tokens came."""
    finish: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    """SGLang's `meta_info`."""

    @property
    def ttft_s(self) -> float:
        """From sending the request, the wait in the server's queue included."""
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per later token; `None` for a reply of one token."""
        return (
            (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None
        )


@dataclass
class Load:
    """A run of requests at one concurrency."""

    replies: list[ServerReply]
    """In the order of the prompts, turn by turn."""
    seconds: float
    """From the first request to the last chunk."""
    peak: int
    """Requests that were in flight at once, at most."""
    busy: float = 0.0
    """Share of the time in which this client was at work: near 1, what it measures is itself."""


Follow = Callable[[Prompt, list[int]], Prompt | None]
"""The conversation with a reply to it and what the user says next, or `None`."""


def client_of(url: str) -> httpx.AsyncClient:
    """A client without a limit of its own on connections. Raises `UserError` for what is no
    address."""
    root = url.rstrip("/").removesuffix("/v1")
    check_url(url, "--server")
    # Engines close a connection that was idle for 5 s; one that is taken up at that moment would
    # look like a server that died.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
    )
    return httpx.AsyncClient(
        base_url=root, timeout=httpx.Timeout(SILENCE_S, connect=10.0), limits=limits
    )


async def connect(client: httpx.AsyncClient, target: str, model: str | None = None) -> EngineServer:
    """Ask a server what it is. `model`: the name of the model there, if it serves several. Raises
    `UserError`."""
    url = str(client.base_url).rstrip("/")
    listed = await _get(client, "/v1/models")
    try:
        models = {entry.id: entry for entry in convert(listed, ModelList).data}
    except DocumentError as error:
        found = "" if listed is None else f" that can be read ({error})"
        raise UserError(
            f"{url} has no /v1/models{found}; give --server the root of a vLLM or SGLang"
        ) from error
    name = _model(models, target, model, url)
    about = {"model": name, "context": models[name].max_model_len, "url": url}
    info = await _get(client, "/server_info") or await _get(client, "/get_server_info")
    if isinstance(info, dict) and ("internal_states" in info or "speculative_algorithm" in info):
        speculates = (
            bool(info.get("speculative_algorithm")) if "speculative_algorithm" in info else None
        )
        return EngineServer(
            engine="sglang", version=str(info.get("version", "")), speculates=speculates, **about
        )
    if (await counters_of(client)).generated is None:
        raise UserError(
            f"{url} is no SGLang, and counts no tokens in /metrics as a vLLM does; start the vLLM "
            "without --disable-log-stats, "
            "and name the engine itself, not a gateway before it"
        )
    version = await _get(client, "/version")
    named = str(version.get("version", "")) if isinstance(version, dict) else ""
    return EngineServer(engine="vllm", version=named, speculates=None, **about)


def _model(models: dict[str, ModelEntry], target: str, wanted: str | None, url: str) -> str:
    """The name to ask for: the wanted one, the target's, or the only one that is no adapter."""
    if wanted is not None:
        if wanted not in models:
            raise UserError(f"{url} serves no model {wanted!r}; there are: {', '.join(models)}")
        return wanted
    if target in models:
        return target
    bases = [name for name, entry in models.items() if entry.parent is None]
    if len(bases) != 1:
        raise UserError(
            f"{url} serves {', '.join(models) or 'no model'}; name one with --server-model"
        )
    return bases[0]


async def check_tokenizer(client: httpx.AsyncClient, server: EngineServer, tokenizer: Any) -> None:
    """Demand that the server reads a text as `tokenizer` does, where it has /tokenize. Raises
    `UserError`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await client.post(
                "/tokenize",
                json={"model": server.model, "prompt": PROBE, "add_special_tokens": False},
            )
        theirs = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError, ValueError, RecursionError, KeyError, TypeError):
        return
    if theirs is not None and theirs != tokenizer(PROBE, add_special_tokens=False)["input_ids"]:
        raise UserError(
            f"{server.url} serves {server.model} with another tokenizer than --target's; name "
            "that model as --target"
        )


async def counters_of(client: httpx.AsyncClient) -> Counters:
    """vLLM's counters now. Raises `UserError` if there are none."""
    response = await _request(client, "/metrics")
    if response.status_code != 200:
        raise UserError(
            f"{client.base_url} has no /metrics (status {response.status_code}); give --server a "
            "vLLM or an SGLang itself, "
            "not a gateway before it"
        )
    return read_counters(response.text)


async def settled(client: httpx.AsyncClient, before: Counters, tokens: int) -> Counters:
    """vLLM's counters once they hold `tokens` more than `before` and nothing runs, or after
    `SETTLE_S` seconds."""
    until = time.perf_counter() + SETTLE_S
    while True:
        now = await counters_of(client)
        there = now.generated is None or now.generated - (before.generated or 0) >= tokens
        if (there and not now.running) or time.perf_counter() > until:
            return now
        await asyncio.sleep(0.05)


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """The JSON there; `None` if there is none."""
    response = await _request(client, path)
    if response.status_code in (401, 403):
        raise UserError(
            f"{client.base_url} wants an API key, which this command does not send; start it "
            "without one"
        )
    try:
        return response.json() if response.status_code == 200 else None
    except (ValueError, RecursionError):
        return None


async def _request(client: httpx.AsyncClient, path: str) -> httpx.Response:
    try:
        async with asyncio.timeout(ANSWER_S):  # of the whole answer; httpx counts from byte to byte
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
    """Send prompts, `concurrency` of them in flight as long as there are so many; the next one as
    soon as one is answered.

    The later turns of a conversation follow on the reply, in its place. `done` is called for each
    prompt. Raises `UserError` as soon as one request fails.
    """
    replies: list[list[ServerReply]] = [[] for _ in prompts]
    waiting = iter(range(len(prompts)))
    flying = peak = 0

    async def work() -> None:
        nonlocal flying, peak
        for place in waiting:
            prompt: Prompt | None = prompts[place]
            while prompt is not None:
                flying += 1
                peak = max(peak, flying)
                reply = await ask(
                    client, server, prompt, len(replies[place]), sampling, max_new_tokens
                )
                flying -= 1
                replies[place].append(reply)
                prompt = follow(prompt, reply.ids) if reply.ids is not None else None
            done()

    start, worked = time.perf_counter(), time.thread_time()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(work())
    except ExceptionGroup as failed:
        mistakes = failed.subgroup(UserError)
        if mistakes is None:
            raise
        first: BaseException = mistakes
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        # all that are in flight fail for the same reason: say it once
        raise UserError(str(first)) from None
    every = [reply for turns in replies for reply in turns]
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
    """One request, read to its end. Raises `UserError` where it fails or breaks off."""
    room = (
        max_new_tokens
        if server.context is None
        else min(max_new_tokens, server.context - len(prompt.token_ids))
    )
    path, body = (_vllm if server.engine == "vllm" else _sglang)(server, prompt, sampling, room)
    reply = ServerReply(prompt, turn, time.perf_counter())
    try:
        async with (
            asyncio.timeout(WHOLE_REPLY_S),
            client.stream("POST", path, json=body) as response,
        ):
            if response.status_code != 200:
                raise _refusal(
                    server,
                    prompt,
                    response.status_code,
                    (await response.aread()).decode(errors="replace"),
                )
            read = _read_vllm if server.engine == "vllm" else _read_sglang
            async for event in _events(response, server):
                read(reply, event, time.perf_counter())
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
        why = str(error) or type(error).__name__
        raise UserError(
            f"server {server.url} broke off while it wrote ({why}); look at its log, then measure "
            "again"
        ) from error
    if reply.finish in ("", "abort", "error") or not reply.arrivals:
        raise UserError(
            f"server {server.url} ended a reply to prompt {prompt.id} unfinished; look at its "
            "log, then measure again"
        )
    return reply


def _refusal(server: EngineServer, prompt: Prompt, status: int, body: str) -> UserError:
    """Why a server did not take a request, and what to do."""
    try:
        said = json.loads(body)
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        said = body
    said = " ".join(str(said).split())[:200]
    if status in (429, 503):
        return UserError(
            f"{server.url} refuses so many requests at once (status {status}: {said}); give a "
            "lower --concurrency"
        )
    return UserError(
        f"{server.url} refuses prompt {prompt.id} of {len(prompt.token_ids)} tokens (status "
        f"{status}: {said}); check its limits"
    )


async def _events(response: httpx.Response, server: EngineServer) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to [DONE]."""
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


def _vllm(
    server: EngineServer, prompt: Prompt, sampling: Sampling, room: int
) -> tuple[str, dict[str, Any]]:
    # What is left out is taken from the target's generation_config there: so everything is said.
    return "/v1/completions", {
        "model": server.model,
        "prompt": prompt.token_ids,
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _read_vllm(reply: ServerReply, event: dict[str, Any], now: float) -> None:
    chunk = convert(event, VllmChunk)
    if chunk.usage is not None and reply.ids is None:
        reply.tokens = chunk.usage.completion_tokens
    for choice in chunk.choices or []:
        if choice.token_ids:
            reply.ids = [*(reply.ids or []), *choice.token_ids]
            reply.tokens = len(reply.ids)
        reply.finish = choice.finish_reason or reply.finish
        if choice.token_ids or choice.text or (reply.finish and not reply.arrivals):
            reply.arrivals.append(now)


def _sglang(
    server: EngineServer, prompt: Prompt, sampling: Sampling, room: int
) -> tuple[str, dict[str, Any]]:
    parameters = {
        "max_new_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "skip_special_tokens": False,
    }
    return "/generate", {
        "input_ids": prompt.token_ids,
        "sampling_params": parameters,
        "stream": True,
    }


def _read_sglang(reply: ServerReply, event: dict[str, Any], now: float) -> None:
    chunk = convert(event, SglangChunk)
    meta = chunk.meta_info or SglangMeta()
    reply.meta |= event.get("meta_info") or {}
    total = meta.completion_tokens or 0
    if total > reply.tokens:
        reply.arrivals.append(now)
        reply.tokens = total
    if (ids := chunk.output_ids) is not None:
        # Ids of the whole reply so far, or (a server option) of this chunk: the count of tokens
        # tells which.
        both = [ids, [*(reply.ids or []), *ids]]
        reply.ids = next((found for found in both if len(found) == total), None)
    reason = meta.finish_reason
    reply.finish = (
        reason.type if isinstance(reason, SglangFinish) else reason or ""
    ) or reply.finish
