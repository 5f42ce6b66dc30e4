"""Replies being decoded: the engine's steps become text, and answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...heads.files import JsonObject
from ..api import Reply, Transcript, none_for_nan
from ..decode import Request, Round
from .engine import INTERNAL, STOPPING, BatchSettings, Engine, Job, RequestError
from .protocol import ChatRequest, RequestFields

LEFT = 499  # status in the server's log for a client that has left
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
"""OpenAI's names for `Generation.finish_reason`."""


def figures(reply: Reply) -> JsonObject:
    """Return rounds, tau, acceptance and speed of a reply, as the server sees its times."""
    return {
        "rounds": len(reply.rounds),
        "tau": none_for_nan(reply.tau),
        "acceptance": [round(share, 4) for share in reply.acceptance],
        "tokens_per_second": none_for_nan(reply.tokens_per_second),
        "ttft_s": reply.ttft_s,
        "decode_s": reply.decode_s,
    }


class PendingReplies:
    """The replies to one request, from its submission until they have ended or are given up."""

    def __init__(
        self,
        engine: Engine,
        asked: RequestFields,
        model: str,
        settings: BatchSettings,
        requests: Sequence[Request],
    ) -> None:
        """Submit all requested replies. Raises `RequestError` as `Engine.submit` does."""
        self._engine, self.asked, self._model = engine, asked, model
        self._loop = asyncio.get_running_loop()
        # None: the client has left
        self._events: asyncio.Queue[tuple[int, Round | None, str | None] | None] = asyncio.Queue()
        self.chat = isinstance(asked, ChatRequest)
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + token_hex(12)
        self.created = int(time.time())
        hidden = engine.hidden if asked.skip_special_tokens else frozenset[int]()
        # Without the prompt, which the job has: it may be long, and the replies many.
        self.choices = [
            Transcript(Reply([]), engine.target.tokenizer, settings.stop, hidden) for _ in requests
        ]
        self.jobs = [
            Job(request, settings, partial(self._deliver, number))
            for number, request in enumerate(requests)
        ]
        engine.submit(self.jobs)

    def _deliver(self, number: int, record: Round | None, reason: str | None) -> None:
        """Hand a step over from the engine's thread to the loop of the connections."""
        # The loop is closed if the server has stopped meanwhile; no one listens any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, record, reason))

    async def steps(
        self, left: asyncio.Future[None]
    ) -> AsyncIterator[tuple[int, Round, list[tuple[str, bool]]]]:
        """Yield each step: the number of its choice, its record, and its new pieces of text.

        Raises `RequestError` once `left` is done, and if decoding fails. In any case the engine
        then drops the rest of the request.
        """
        left.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            still_open = set(range(len(self.jobs)))
            while still_open:
                event = await self._events.get()
                if event is None:
                    raise RequestError("the client has left", None, None, LEFT)
                number, record, reason = event
                if record is None:
                    code, status = ("stopping", 503) if reason == STOPPING else (None, 500)
                    raise RequestError(reason or INTERNAL, None, code or "internal_error", status)
                if reason is not None:
                    still_open.discard(number)
                yield number, record, self.choices[number].pieces(record, reason)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let the engine drop the replies that have not ended."""
        self._engine.give_up(self.jobs)

    def whole(self) -> JsonObject:
        """Return the answer with all replies, once they have ended."""
        choices = []
        for number, choice in enumerate(self.choices):
            reply = choice.reply
            entry = self._entry(number, reply.text, reply.token_ids)
            if self.chat:
                entry["message"] = {"role": "assistant", "content": reply.text, "refusal": None}
            choices.append(entry)
        head = self._head("chat.completion")
        if self.chat and self.asked.return_token_ids:
            head["prompt_token_ids"] = self.jobs[0].request.prompt_ids
        written = [figures(choice.reply) for choice in self.choices]
        return {**head, "choices": choices, "usage": self.usage(), "draftsmith": written}

    def chunk(self, number: int, record: Round, pieces: list[tuple[str, bool]]) -> JsonObject:
        """Return the event of a stream for one step of a reply."""
        reply = self.choices[number].reply
        text = "".join(piece for piece, _ in pieces)
        entry = self._entry(number, text, record.tokens)
        if self.chat:
            # The role comes with the first event, which is the prefill's.
            role = {"role": "assistant"} if record.drafted is None else {}
            entry["delta"] = {**role, "content": text}
        event = {**self._head("chat.completion.chunk"), "choices": [entry]}
        if self.asked.return_pieces:
            entry["pieces"] = [{"text": piece, "drafted": drafted} for piece, drafted in pieces]
            # Time of the reply's own rounds, without the prefill and the engine's other batches.
            entry["round"] = {"tokens": len(record.tokens), "seconds": record.t_round_s}
            if reply.finish_reason:
                event["draftsmith"] = figures(reply)
        return event

    def usage(self) -> JsonObject:
        """Return the numbers of tokens of all replies; each prompt counts once."""
        prompts = {job.request.id: len(job.request.prompt_ids) for job in self.jobs}
        prompt = sum(prompts.values())
        written = sum(len(choice.reply.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }

    def _head(self, kind: str) -> JsonObject:
        """Return the keys of every answer; `kind` is that of a chat."""
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self._model}

    def _entry(self, number: int, text: str, token_ids: Sequence[int]) -> JsonObject:
        """Return the keys of a choice that whole answers and events share."""
        reason = FINISH.get(self.choices[number].reply.finish_reason)
        entry: JsonObject = {"index": number, "finish_reason": reason, "logprobs": None}
        if not self.chat:
            entry["text"] = text
        if self.asked.return_token_ids:
            entry["token_ids"] = token_ids
        return entry

    async def events(self, left: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a streamed answer, which ends once `left` is done."""
        try:
            async for step in self.steps(left):
                yield event_of(self.chunk(*step))
            if self.asked.stream_options.include_usage:
                head = self._head("chat.completion.chunk")
                yield event_of({**head, "choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield event_of(error.body())


class EventStream(StreamingResponse):
    """Answer sent as a stream of events; when it ends for any reason, so do its replies."""

    def __init__(self, pending: PendingReplies, left: asyncio.Future[None]) -> None:
        self._pending, self._left = pending, left
        headers = {"Cache-Control": "no-cache"}
        super().__init__(pending.events(left), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # If the client left before the first event, the iterator has not started.
            self._pending.give_up()
            self._left.cancel()


def event_of(value: JsonObject) -> bytes:
    """Return a server-sent event that holds a JSON value."""
    # ASCII, since some clients split lines at other characters.
    return b"data: " + json.dumps(value).encode() + b"\n\n"
