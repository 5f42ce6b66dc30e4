"""Replies under way: what the engine delivers becomes text, and answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

from ...heads.files import JsonObject
from ..api import Reply, Transcript, none_for_nan
from ..decode import Request, Round
from .engine import INTERNAL, STOPPING, BatchSettings, Engine, Job
from .errors import RequestError
from .protocol import FINISH, ChatRequest, Common


class ClientLeft(Exception):
    """The client has closed its connection."""


class DecodingFailed(RequestError):
    """The engine could not decode a reply; the message says why."""

    def __init__(self, message: str) -> None:
        code, status = ("stopping", 503) if message == STOPPING else ("internal_error", 500)
        super().__init__(message, code=code, status=status)


@dataclass(frozen=True)
class Asked:
    """A request that was read, and what the engine decodes for it."""

    fields: Common
    model: str
    settings: BatchSettings
    requests: Sequence[Request]


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


class Pending:
    """The replies to one request, from its submission until they have ended or are given up."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        """Submit all replies that are asked for. Raises `QueueFull` and `EngineClosed`."""
        self._engine, self._asked, self._model = engine, asked.fields, asked.model
        self._loop = asyncio.get_running_loop()
        # None: the client has left
        self._events: asyncio.Queue[tuple[int, Round | None, str | None] | None] = asyncio.Queue()
        self.chat = isinstance(asked.fields, ChatRequest)
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + token_hex(12)
        self.created = int(time.time())
        self.jobs, self.choices = [], []
        hidden = engine.hidden if asked.fields.skip_special_tokens else frozenset[int]()
        stops, tokenizer = asked.settings.stop, engine.target.tokenizer
        for number, request in enumerate(asked.requests):
            self.jobs.append(Job(request, asked.settings, partial(self._deliver, number)))
            # Without the prompt, which the job has: a request may ask for many replies to a long
            # one.
            self.choices.append(Transcript(Reply([]), tokenizer, stops, hidden))
        engine.submit(self.jobs)

    def _deliver(self, number: int, record: Round | None, reason: str | None) -> None:
        """Hand a step over from the engine's thread to the loop of the connections."""
        # The loop is closed where the server has stopped meanwhile: nobody listens any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, record, reason))

    async def steps(
        self, left: asyncio.Future[None]
    ) -> AsyncIterator[tuple[int, Round, list[tuple[str, bool]]]]:
        """Yield each step: the number of its choice, its record, and its new pieces of text.

        Raises `ClientLeft` once `left` is done, and `DecodingFailed`. However it ends, nothing of
        the request runs on afterwards.
        """
        left.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            still_open = set(range(len(self.jobs)))
            while still_open:
                event = await self._events.get()
                if event is None:
                    raise ClientLeft
                number, record, reason = event
                if record is None:
                    raise DecodingFailed(reason or INTERNAL)
                if reason is not None:
                    still_open.discard(number)
                yield number, record, self.choices[number].pieces(record, reason)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let the engine drop the replies that have not ended."""
        self._engine.give_up(self.jobs)

    def whole(self) -> JsonObject:
        """Return the answer with all replies, which have ended."""
        choices = []
        for number, choice in enumerate(self.choices):
            reply = choice.reply
            entry = self._entry(number, reply.finish_reason)
            if self.chat:
                entry["message"] = {"role": "assistant", "content": reply.text, "refusal": None}
            else:
                entry["text"] = reply.text
            if self._asked.return_token_ids:
                entry["token_ids"] = reply.token_ids
            choices.append(entry)
        prompt = {"prompt_token_ids": self.jobs[0].request.prompt_ids}
        return {
            **self._head("chat.completion"),
            **(prompt if self.chat and self._asked.return_token_ids else {}),
            "choices": choices,
            "usage": self.usage(),
            "draftsmith": [figures(choice.reply) for choice in self.choices],
        }

    def chunk(self, number: int, record: Round, pieces: list[tuple[str, bool]]) -> JsonObject:
        """Return the event of a stream for one step of a reply."""
        reply = self.choices[number].reply
        entry = self._entry(number, reply.finish_reason)
        text = "".join(piece for piece, _ in pieces)
        if self.chat:
            # The role comes with the first event, which is the prefill's.
            role = {"role": "assistant"} if record.drafted is None else {}
            entry["delta"] = {**role, "content": text}
        else:
            entry["text"] = text
        if self._asked.return_token_ids:
            entry["token_ids"] = record.tokens
        if self._asked.return_pieces:
            entry["pieces"] = [{"text": piece, "drafted": drafted} for piece, drafted in pieces]
            # A clock that runs only in the reply's rounds, whatever else the engine decodes
            # meanwhile; it stands still during the prefill.
            entry["round"] = {"tokens": len(record.tokens), "seconds": record.t_round_s}
        event = {**self._head("chat.completion.chunk"), "choices": [entry]}
        if reply.finish_reason and self._asked.return_pieces:
            event["draftsmith"] = figures(reply)
        return event

    def last_chunk(self) -> JsonObject:
        """Return the event of a stream that has the numbers of tokens."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

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

    def _entry(self, number: int, reason: str) -> JsonObject:
        return {"index": number, "finish_reason": FINISH.get(reason), "logprobs": None}
