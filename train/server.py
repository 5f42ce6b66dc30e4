"""Replies from an OpenAI-compatible server: concurrent, retried, token-exact where the server returns token ids."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from ..heads.errors import UserError
from ..inference.rows import RowError
from .regenerate import Options, Sink, Task

log = logging.getLogger(__name__)


def regenerate_on_server(tasks: list[Task], options: Options, sink: Sink) -> None:
    """Run every conversation through the server, `concurrency` at a time."""
    if any(task.conversation.messages is None for task in tasks):
        raise UserError("a server answers messages; for plain text prompts run the target in this process")
    try:
        asyncio.run(_all(tasks, options, sink))
    except ExceptionGroup as group:
        mistakes = group.subgroup(UserError)
        if mistakes is None:
            raise
        # Every request under way fails for the same reason: say it once.
        raise UserError(str(mistakes.exceptions[0])) from None


async def _all(tasks: list[Task], options: Options, sink: Sink) -> None:
    limits = asyncio.Semaphore(options.server.concurrency)
    warned = False
    async with httpx.AsyncClient(timeout=options.server.timeout_s) as client:

        async def work(task: Task) -> None:
            nonlocal warned
            async with limits:
                try:
                    exact = await _converse(client, task, options)
                except RowError as error:
                    log.warning("%s is left out: %s", task.id, error)
                    return
            if exact:
                sink.put(task)
            else:
                if not warned:
                    log.warning("the server returns no token ids (vLLM does, with return_token_ids); replies are kept as text")
                    warned = True
                sink.put_text(task)

        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(work(task))


async def _converse(client: httpx.AsyncClient, task: Task, options: Options) -> bool:
    """All replies of one conversation; whether every one came with its token ids."""
    exact = True
    while True:
        answer = await _post(client, _request(task, options), options)
        try:
            choice = answer["choices"][0]
            message = {k: v for k, v in choice["message"].items() if v is not None}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(f"server {options.server.url} answers in an unknown form; is it OpenAI-compatible?") from error
        message.setdefault("content", "")
        prompt, reply = answer.get("prompt_token_ids"), choice.get("token_ids")
        exact = exact and prompt is not None and reply is not None
        task.add_reply(prompt or [], reply or [], message, choice.get("finish_reason") or "length")
        if task.done or choice.get("finish_reason") != "stop":
            return exact
        task.advance()


def _request(task: Task, options: Options) -> dict[str, Any]:
    sampling = options.sampling
    request: dict[str, Any] = {
        "model": options.server.model or options.target.path,
        "messages": task.said,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if sampling.top_k:
        request["top_k"] = sampling.top_k
    if task.conversation.tools:
        request["tools"] = task.conversation.tools
    if task.conversation.template_kwargs:
        request["chat_template_kwargs"] = task.conversation.template_kwargs
    return request


async def _post(client: httpx.AsyncClient, request: dict[str, Any], options: Options) -> dict[str, Any]:
    url = f"{(options.server.url or '').rstrip('/')}/chat/completions"
    problem = ""
    for attempt in range(options.server.retries + 1):
        if attempt:
            await asyncio.sleep(min(0.5 * 2**attempt, 30))
        try:
            response = await client.post(url, json=request)
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
            continue
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError:
                problem = "it answers with something that is not JSON"
                break
        problem = f"status {response.status_code}: {response.text[:200]}"
        if response.status_code in (400, 413, 422):  # about this request, such as a prompt too long; others may go through
            raise RowError(problem)
        if response.status_code != 429 and response.status_code < 500:
            break
    raise UserError(f"server {url} does not answer ({problem}); check it, then run the same command to go on")
