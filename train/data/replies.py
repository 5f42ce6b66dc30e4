"""Replies from an OpenAI-compatible server.

Requests run concurrently and are tried again when they fail. Replies are token-exact if the server
returns token ids.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Annotated

import httpx
import msgspec

from ...heads.documents import DocumentError, Token, convert, demand
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...inference.base.settings import SERVER_KEY_VARIABLE, Sampling, check_url, headers_with_key
from ...inference.conversations.messages import RowError, without_nulls
from ...inference.evaluation.server_client import client_of, model_named, models_of
from .regeneration import ReplyTask, RowWriter

log = logging.getLogger(__name__)

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)  # before each attempt: a server may take 31 s to return
REPLY_S = 600.0  # longest wait for a whole reply


@dataclass
class ServerOptions:
    """OpenAI-compatible server that runs the target.

    An API key that it wants is in the variable DRAFTSMITH_SERVER_KEY.
    """

    url: str | None = None
    """Base address, such as http://localhost:8000/v1; if not given, the target runs in this
    process."""
    model: str | None = None
    """Name of the model on the server; the target's path if not given."""
    concurrency: int = 32
    """Number of requests under way at one time."""

    def __post_init__(self) -> None:
        check_url(self.url, "--server.url")
        if self.concurrency < 1:
            raise UserError("--server.concurrency must be at least 1")


def regenerate_on_server(
    tasks: list[ReplyTask],
    sink: RowWriter,
    server: ServerOptions,
    target: str,
    sampling: Sampling,
    max_new_tokens: int,
) -> None:
    """Run every conversation through the server, and append each to `sink` when it is finished.

    `target` is the path of the target. Raises `UserError` for plain text prompts and for a server
    that does not answer.
    """
    if any(task.conversation.messages is None for task in tasks):
        raise UserError(
            "a server answers messages; for plain text prompts run the target in this process"
        )
    try:
        asyncio.run(_ServerWriter(server, sampling, max_new_tokens).run_all(tasks, sink, target))
    except ExceptionGroup as group:
        user_errors = group.subgroup(UserError)
        if user_errors is None:
            raise
        # Every request under way fails for the same reason, which is reported once.
        raise UserError(str(user_errors.exceptions[0])) from None


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
            "the content of the message is not text",
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


class _ServerWriter:
    """Server whose model writes the replies of conversations."""

    def __init__(self, server: ServerOptions, sampling: Sampling, max_new_tokens: int) -> None:
        self._server, self._sampling, self._max_new_tokens = server, sampling, max_new_tokens
        self._url = f"{(server.url or '').rstrip('/')}/chat/completions"
        self._slots = asyncio.Semaphore(server.concurrency)
        # What is logged once about the server.
        self._says_ids = self._answered = True

    async def run_all(self, tasks: list[ReplyTask], sink: RowWriter, target: str) -> None:
        """Run every conversation, and append each to `sink` when it is finished."""
        headers = headers_with_key()
        self._model = self._server.model or await self._listed_model(headers, target)
        self._client = httpx.AsyncClient(headers=headers, timeout=REPLY_S)
        async with self._client, asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(self.run(task, sink))

    async def _listed_model(self, headers: dict[str, str], target: str) -> str:
        """Return the server's name of the target among the models that it lists.

        A server without such a list is asked for the target's name.
        """
        url = self._server.url or ""
        try:
            async with client_of(url, headers) as client:
                models = await models_of(client)
        except UserError:
            return target
        return model_named(models, target, None, url, "--server.model")

    async def run(self, task: ReplyTask, sink: RowWriter) -> None:
        """Run one conversation when it is its turn, and append it to `sink`.

        One that the server refuses is left out with a warning.
        """
        async with self._slots:
            try:
                exact = await self._converse(task)
            except RowError as error:
                log.warning("%s is left out: %s", task.id, error)
                return
        if not exact and self._says_ids:
            self._says_ids = False
            log.warning(
                "the server returns no token ids (vLLM does, with return_token_ids); "
                "replies are kept as text"
            )
        sink.put(task, exact)

    async def _converse(self, task: ReplyTask) -> bool:
        """Get all replies of one conversation; return true if every one came with its token ids.

        Raises `RowError` if the server refuses one of the prompts.
        """
        exact = True
        while True:
            answer = await self._post(self._request(task))
            choice = answer.choices[0]
            message = {**without_nulls(choice.message), "content": choice.content}
            exact = exact and answer.prompt_token_ids is not None and choice.token_ids is not None
            task.add_reply(
                answer.prompt_token_ids or [],
                choice.token_ids or [],
                {"role": "assistant", **message},
                choice.finish_reason or "length",
                choice.stop_reason if choice.stop_reason is not None else choice.matched_stop,
            )
            if not task.advance():
                return exact

    def _request(self, task: ReplyTask) -> JsonObject:
        """Return the body of a request for the next reply of a conversation."""
        sampling = self._sampling
        more = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "tools": task.conversation.tools,
            "chat_template_kwargs": task.conversation.template_kwargs,
        }
        return {
            "model": self._model,
            "messages": task.said,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self._max_new_tokens,
            "seed": sampling.seed,
            "return_token_ids": True,
            "skip_special_tokens": False,
            # Not all servers know these, so that only those that change something are sent.
            **{name: value for name, value in more.items() if value},
        }

    async def _post(self, request: JsonObject) -> CompletionAnswer:
        """Return the answer to a request.

        A server that fails, or answers in another form, is asked again after `PAUSES_S`. The first
        refused connection of a command is logged. Raises `RowError` if the server refuses this
        request, `UserError` if it does not answer.
        """
        problem = ""
        for attempt, pause_s in enumerate(PAUSES_S, 1):
            await asyncio.sleep(pause_s)
            try:
                # The client's own limit is for each read: a server that sends a byte a second would
                # never meet it.
                async with asyncio.timeout(REPLY_S):
                    response = await self._client.post(self._url, json=request)
            except TimeoutError:
                problem = f"no whole answer within {REPLY_S:g} s"
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = str(error) or type(error).__name__
                left_s = sum(PAUSES_S[attempt:])
                if isinstance(error, httpx.ConnectError) and left_s and self._answered:
                    self._answered = False
                    log.warning("server %s does not answer yet; trying for %g s", self._url, left_s)
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
                problem += f"; give its API key in the variable {SERVER_KEY_VARIABLE}"
            if response.status_code == 404 and not self._url.endswith("/v1/chat/completions"):
                problem = f"status 404; OpenAI's API is mostly at {self._server.url}/v1"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise UserError(
            f"server {self._url} does not answer ({problem}); check it, then run the same command "
            "to continue"
        )
