"""Requests in the form of OpenAI's API, as types, and what the engine gets of them.

Fields of vLLM are taken where they mean something here (top_k, min_p, repetition_penalty,
ignore_eos, return_token_ids, skip_special_tokens, chat_template_kwargs). A field that would change
the reply and cannot be honoured is refused; an unknown one too, since it may be a misspelling.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..conversations.formats import Conversation, conversation_of
from ..conversations.messages import RowError, joined
from ..conversations.plain import plain_ids
from ..conversations.rendering import prompt_ids
from ..conversations.rows import parsed
from ..conversations.templates import TEMPLATE_ARGUMENTS
from ..decode import Request
from ..settings import Sampling
from ..targets.target import Target
from .errors import LONGEST_NAME, RequestError, refused_by_type

MOST_CHOICES = 128
MOST_STOPS = 4  # as in OpenAI's API
LONGEST_STOP = 256  # characters; each token of a reply is compared with all of them
WHOLE = 1 << 31  # bound of numbers that have none of their own
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
"""OpenAI's words for `Generation.finish_reason`."""


Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Whole = Annotated[int, Meta(ge=-WHOLE, le=WHOLE)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed reply."""

    include_usage: bool = False
    """Send the numbers of tokens in a last event."""
    include_obfuscation: bool = False
    """Padding of events against eavesdroppers, an option of OpenAI; none is sent."""


class Common(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of requests have."""

    model: Annotated[str, Meta(max_length=LONGEST_NAME * 4)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    """At most 0: all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = False
    return_pieces: bool = False
    """Send the text token by token, with the origin of each; an option of draftsmith alone."""
    # Fields that would change the reply.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: JsonObject | None = None
    logprobs: bool | int | None = None
    response_format: JsonObject | None = None
    # Fields that change nothing of it.
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None

    def refused(self) -> str | None:
        """Return the name of a given field that cannot be honoured; None if there is none."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "logprobs"):
            if getattr(self, name):
                return name
        if (self.response_format or {}).get("type", "text") != "text":
            return "response_format"
        return None


class CompletionRequest(Common, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    """Text, texts, token ids, or several lists of token ids."""
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def refused(self) -> str | None:
        if self.echo or self.suffix:
            return "echo" if self.echo else "suffix"
        if self.best_of not in (None, 1, self.n):
            return "best_of"
        return super().refused()


Message = Annotated[
    JsonObject,
    Meta(
        extra_json_schema={
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"type": "string"},
            },
        }
    ),
]
"""Message of a conversation. The schema is for clients; `conversation_of` checks it, and takes a
content in parts too."""


class ChatRequest(Common, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None

    def refused(self) -> str | None:
        if self.tools:
            return "tools"
        return "top_logprobs" if self.top_logprobs else super().refused()


def read_request(body: bytes, kind: type[Any]) -> Any:
    """Return the request of type `kind` in a body. Raises `RequestError`."""
    try:
        value = parsed(body.decode())
    except (UnicodeDecodeError, RowError) as error:
        raise RequestError(f"the request cannot be read: {error}", code="invalid_json") from error
    try:
        request = msgspec.convert(without_nulls(value), kind)
    except msgspec.ValidationError as error:
        raise refused_by_type(error, kind) from error
    if (name := request.refused()) is not None:
        raise RequestError(
            f"{name} is not supported here; leave it out", name, "unsupported_parameter"
        )
    return request


def without_nulls(value: Any) -> Any:
    """Return a request without the keys that are null, which clients send for what is not given."""
    if not isinstance(value, dict):
        return value
    return {
        key: without_nulls(item) if key == "stream_options" else item
        for key, item in value.items()
        if item is not None
    }


def sampling_of(request: Common, defaults: Sampling) -> Sampling:
    """Return the sampling parameters of a request; `defaults` has those that it does not name.

    The seed is not among them: it belongs to each reply, and a batch has replies of many seeds.
    Raises `RequestError`.
    """
    values = {
        name: given
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        if (given := getattr(request, name)) is not None
    }
    if request.top_k is not None:
        values["top_k"] = max(request.top_k, 0)
    if values.get("temperature", defaults.temperature) == 0:
        # Clients send them all the same. They never remove the best token, which greedy takes.
        values |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    try:
        return replace(defaults, **values)
    except UserError as error:
        param = str(error).partition(" ")[0]
        raise RequestError(str(error), param if hasattr(defaults, param) else None) from error


def stops_of(request: Common) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return tuple(dict.fromkeys(stops))


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; larger ones are refused before any work is done for them."""

    name: str
    """Name of the target in messages, which have no path of this machine."""
    replies: int
    """Replies to all prompts of a request: as many as can wait."""
    longest: int
    """Tokens of a reply where the request gives no limit."""
    longest_token: int
    """Characters of the target's longest token: a longer text than all positions of it cannot
    fit."""


def requests_of(request: Common, target: Target, limits: Limits) -> list[Request]:
    """Return what is to be decoded for a request: all samples of each prompt, in order.

    Noise belongs to a request's seed; without one each request has noise of its own. Raises
    `RequestError` for a prompt that cannot be decoded.
    """
    prompts = given_prompts(request)
    replies = len(prompts) * (request.n or 1)
    if replies > limits.replies:
        raise RequestError(
            f"{replies} replies are asked for, and at most {limits.replies} can wait",
            "n" if len(prompts) == 1 else "prompt",
        )
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens or limit
    # `row_keys` takes 64 bits; 0 is the name of the only prompt of `Decoder.generate`.
    name = 0 if request.seed is not None else secrets.randbits(62)
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    found = []
    for number, prompt in enumerate(prompts):
        ids = encoded(prompt, request, target, limits, param)
        room = target.max_positions - len(ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param)
        if room < 1:
            raise too_long(f"{len(ids)} tokens", target, param)
        if not all(0 <= token < target.vocab_size for token in ids):
            raise RequestError(
                f"a prompt holds something that is no token id of {limits.name} (0 to "
                f"{target.vocab_size - 1})",
                param,
            )
        most = min(limit or limits.longest, room)
        for sample in range(request.n or 1):
            found.append(Request(ids, name + number, sample, most, request.seed))
    return found


def given_prompts(request: Common) -> list[Conversation | str | list[int]]:
    """Return the prompts of a request as they were given. Raises `RequestError`."""
    if isinstance(request, ChatRequest):
        check_chat(request)
        row = {"messages": request.messages, "chat_template_kwargs": request.chat_template_kwargs}
        try:
            return [conversation_of({**row, "reasoning_effort": request.reasoning_effort})]
        except RowError as error:
            raise RequestError(str(error), "messages") from error
    assert isinstance(request, CompletionRequest)
    given = request.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    found: list[Any] = []
    for prompt in given:
        tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not tokens and not isinstance(prompt, str):
            raise RequestError("a prompt is a text or a list of token ids", "prompt")
        found.append(prompt)
    return found


def encoded(
    prompt: Conversation | str | list[int],
    request: Common,
    target: Target,
    limits: Limits,
    param: str,
) -> list[int]:
    """Return the token ids of a prompt. Raises `RequestError`, for a long text without encoding."""
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, str):
        length = len(prompt)
    else:
        messages = prompt.messages or []
        length = sum(len(joined(message.get("content", ""), "")) for message in messages)
        if len(messages) > target.max_positions:
            raise too_long(f"{len(messages)} messages", target, param)
    if length > target.max_positions * limits.longest_token:
        raise too_long(f"{length} characters", target, param)
    try:
        if isinstance(prompt, str):
            assert isinstance(request, CompletionRequest)
            if request.add_special_tokens:
                return plain_ids(target.tokenizer, prompt)
            return target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return prompt_ids(prompt, target.tokenizer, limits.name)
    except (RowError, UserError) as error:
        raise RequestError(f"the prompt cannot be encoded: {error}", param) from error


def too_long(length: str, target: Target, param: str) -> RequestError:
    """Return the refusal of a prompt of `length`."""
    return RequestError(
        f"a prompt of {length} leaves no room in {target.max_positions} positions; shorten it",
        param,
        "context_length_exceeded",
    )


def check_chat(request: ChatRequest) -> None:
    """Raise `RequestError` for a reply that is begun already, and arguments that are no variables.

    A template of the client's own could run for ever.
    """
    if request.messages[-1].get("role") == "assistant":
        raise RequestError(
            "the last message is the assistant's; this server begins each reply", "messages"
        )
    for name in request.chat_template_kwargs or {}:
        if name in TEMPLATE_ARGUMENTS:
            raise RequestError(
                f"chat_template_kwargs.{name} is no variable of a chat template",
                "chat_template_kwargs",
            )
