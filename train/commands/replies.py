"""Replies from an OpenAI-compatible server.

Requests run concurrently and are tried again when they fail. Replies are token-exact if the server
returns token ids.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import httpx
import msgspec

from ...heads.documents import DocumentError, Token, convert, demand
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...inference.conversations.messages import RowError, without_nulls
from ...inference.evaluation.server.client import client_of, model_named, models_of
from ...inference.keys import OF_SERVER, headers_with_key
from .options import RegenerateOptions as Options
from .tasks import Sink, Task

log = logging.getLogger(__name__)

RETRIES = 5  # after a failed attempt; with growing pauses a server has 31 s to come back
REPLY_S = 600.0  # longest wait for a whole reply


def regenerate_on_server(tasks: list[Task], options: Options, sink: Sink) -> None:
    """Run every conversation through the server, `concurrency` of them at a time.

    Raises `UserError` for plain text prompts and for a server that does not answer.
    """
    if any(task.conversation.messages is None for task in tasks):
        raise UserError(
            "a server answers messages; for plain text prompts run the target in this process"
        )
    try:
        asyncio.run(_all(tasks, options, sink))
    except ExceptionGroup as group:
        user_errors = group.subgroup(UserError)
        if user_errors is None:
            raise
        # Every request under way fails for the same reason, which is reported once.
        raise UserError(str(user_errors.exceptions[0])) from None


async def _all(tasks: list[Task], options: Options, sink: Sink) -> None:
    """Run every conversation, and append each to `sink` when it is finished.

    A conversation that the server refuses is left out with a warning.
    """
    limits = asyncio.Semaphore(options.server.concurrency)
    warned = False
    headers = headers_with_key(options.server.api_key_file, "--server.api-key-file")
    model = await _model(options, headers)
    refused = asyncio.Event()
    async with httpx.AsyncClient(headers=headers, timeout=REPLY_S) as client:

        async def work(task: Task) -> None:
            """Run one conversation when it is its turn, and append it to `sink`."""
            nonlocal warned
            async with limits:
                try:
                    exact = await _converse(client, task, options, model, refused)
                except RowError as error:
                    log.warning("%s is left out: %s", task.id, error)
                    return
            if not (exact or warned):
                log.warning(
                    "the server returns no token ids (vLLM does, with return_token_ids); "
                    "replies are kept as text"
                )
                warned = True
            sink.put(task, exact)

        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(work(task))


async def _converse(
    client: httpx.AsyncClient, task: Task, options: Options, model: str, refused: asyncio.Event
) -> bool:
    """Get all replies of one conversation; return true if every one came with its token ids.

    Raises `RowError` if the server refuses one of the prompts.
    """
    exact = True
    while True:
        answer = await _post(client, _request(task, options, model), options, refused)
        choice = answer.choices[0]
        message = {"role": "assistant", **without_nulls(choice.message), "content": choice.content}
        exact = exact and answer.prompt_token_ids is not None and choice.token_ids is not None
        task.add_reply(
            answer.prompt_token_ids or [],
            choice.token_ids or [],
            message,
            choice.finish_reason or "length",
            choice.stop_reason if choice.stop_reason is not None else choice.matched_stop,
        )
        if not task.go_on():
            return exact


async def _model(options: Options, headers: dict[str, str]) -> str:
    """Return the server's name of the target: as given, or found among the models that it lists.

    A server without such a list is asked for the target's name.
    """
    url, target = options.server.url or "", options.target.path
    if options.server.model is not None:
        return options.server.model
    try:
        async with client_of(url, headers) as client:
            models = await models_of(client)
    except UserError:
        return target
    return model_named(models, target, None, url, "--server.model")


def _request(task: Task, options: Options, model: str) -> JsonObject:
    """Return the body of a request to `model` for the next reply of a conversation."""
    sampling = options.sampling
    request: JsonObject = {
        "model": model,
        "messages": task.said,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": options.max_new_tokens,
        "seed": sampling.seed,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    more = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "tools": task.conversation.tools,
        "chat_template_kwargs": task.conversation.template_kwargs,
    }
    # Not all servers know these, so that only those that change something are sent.
    return request | {name: value for name, value in more.items() if value}


class CompletionChoice(msgspec.Struct):
    """Reply in the form of OpenAI's protocol, with its token ids as vLLM adds them."""

    message: JsonObject
    finish_reason: str | None = None
    token_ids: list[Token] | None = None
    stop_reason: int | str | None = None
    """Token or stop string that ended the reply (vLLM); SGLang calls it `matched_stop`."""
    matched_stop: int | str | None = None

    def __post_init__(self) -> None:
        demand(
            isinstance(self.message.get("content", ""), str | None),
            "the content of the message is no text",
        )
        demand(
            self.message.get("role", "assistant") == "assistant",
            "the message is not the assistant's",
        )

    @property
    def content(self) -> str:
        return self.message.get("content") or ""


class CompletionAnswer(msgspec.Struct):
    """Answer of a server to one request."""

    choices: Annotated[list[CompletionChoice], msgspec.Meta(min_length=1)]
    prompt_token_ids: list[Token] | None = None


def _pause_s(attempt: int) -> float:
    """Return the seconds before the attempt of that number; 0 is the first one."""
    return min(0.5 * 2**attempt, 30) if attempt else 0.0


async def _post(
    client: httpx.AsyncClient, request: JsonObject, options: Options, refused: asyncio.Event
) -> CompletionAnswer:
    """Return the answer to a request.

    A server that fails, or answers in another form, is asked again `RETRIES` times, with growing
    pauses. The first refused connection of a command is logged, and sets `refused`. Raises
    `RowError` if it refuses this request, `UserError` if it does not answer.
    """
    url = f"{(options.server.url or '').rstrip('/')}/chat/completions"
    problem = ""
    for attempt in range(RETRIES + 1):
        await asyncio.sleep(_pause_s(attempt))
        try:
            # The client's own limit is for each read: a server that sends a byte a second would
            # never meet it.
            async with asyncio.timeout(REPLY_S):
                response = await client.post(url, json=request)
        except TimeoutError:
            problem = f"no whole answer within {REPLY_S:g} s"
            continue
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = str(error) or type(error).__name__
            left_s = sum(map(_pause_s, range(attempt + 1, RETRIES + 1)))
            if isinstance(error, httpx.ConnectError) and left_s and not refused.is_set():
                refused.set()
                log.warning(
                    "server %s does not answer yet; trying for %g s", options.server.url, left_s
                )
            continue
        if response.status_code == 200:
            try:
                return convert(response.json(), CompletionAnswer)
            except DocumentError as error:
                problem = f"it answers in another form than OpenAI's: {error}"
            except (ValueError, RecursionError):
                problem = "it answers with something that is not JSON"
            continue
        problem = f"status {response.status_code}: {response.text[:200]}"
        # These are about this request, such as a prompt too long; others may go through.
        if response.status_code in (400, 413, 422):
            raise RowError(problem)
        if response.status_code in (401, 403):
            problem += f"; give its API key with --server.api-key-file, or in {OF_SERVER}"
        if response.status_code == 404 and not url.removesuffix("/chat/completions").endswith(
            "/v1"
        ):
            problem = f"status 404; OpenAI's API is mostly at {options.server.url}/v1"
        if response.status_code != 429 and response.status_code < 500:
            break
    raise UserError(
        f"server {url} does not answer ({problem}); check it, then run the same command to continue"
    )
