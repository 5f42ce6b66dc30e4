"""Requests of OpenAI's API as types, and their translation into requests of the decode loop.

vLLM's fields are accepted where they apply (top_k, min_p, repetition_penalty, ignore_eos,
return_token_ids, skip_special_tokens, chat_template_kwargs). A field that would change the reply
and cannot be honoured is refused; so is an unknown one, since it may be a misspelling.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.settings import Sampling
from ..conversations.formats import Conversation, conversation_of
from ..conversations.messages import RowError, joined
from ..conversations.rendering import prompt_ids
from ..conversations.rows import parsed
from ..conversations.templates import check_template_kwargs
from ..decode import Request
from .engine import Engine, RequestError

LONGEST_NAME = 256  # characters
MOST_CHOICES = 128
MOST_STOPS = 4  # as in OpenAI's API
LONGEST_STOP = 256  # characters; each token of a reply is compared with all of them
WHOLE = 1 << 31  # bound of numbers without their own
# Fields that would change the reply, and that are not honoured.
UNSUPPORTED = (
    "tools", "top_logprobs", "echo", "suffix", "best_of", "presence_penalty", "frequency_penalty",
    "logit_bias", "logprobs", "response_format",
)  # fmt: skip

Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Whole = Annotated[int, Meta(ge=-WHOLE, le=WHOLE)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    """Send the numbers of tokens in the last event."""
    include_obfuscation: bool | None = None
    """OpenAI's padding of events against eavesdroppers; ignored."""


class RequestFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of requests."""

    model: Annotated[str, Meta(max_length=LONGEST_NAME)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    """At most 0: all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_pieces: bool = False
    """Send the text token by token, with the origin of each; draftsmith's own option."""
    # Fields that would change the reply.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: JsonObject | None = None
    logprobs: bool | int | None = None
    response_format: JsonObject | None = None
    # Fields that do not change it.
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionRequest(RequestFields, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    """Text, texts, token ids, or several lists of token ids."""
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatRequest(RequestFields, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[JsonObject], Meta(min_length=1)]
    """Messages as `conversation_of` reads and checks them."""
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None


def read_request(body: bytes, kind: type[Any]) -> Any:
    """Return the request of type `kind` in a body. Raises `RequestError`."""
    try:
        value = parsed(body.decode())
    except (UnicodeDecodeError, RowError) as error:
        raise RequestError(f"the request cannot be read: {error}", code="invalid_json") from error
    if isinstance(value, dict):  # clients send null for what is not given
        value = {name: item for name, item in value.items() if item is not None}
    try:
        request = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refused_by_type(error) from error
    if value.get("best_of") in (1, request.n):
        value["best_of"] = None
    if value.get("response_format", {}).get("type", "text") == "text":
        value["response_format"] = None
    for name in UNSUPPORTED:
        if value.get(name):
            raise RequestError(
                f"{name} is not supported here; leave it out", name, "unsupported_parameter"
            )
    return request


def refused_by_type(error: msgspec.ValidationError) -> RequestError:
    """Return the error for a request with fields of a wrong type, with OpenAI's code."""
    message = str(error).replace(" | null`", "`").replace("Object contains", "it has an")
    message = message.replace("Object missing required field", "it lacks the required field")
    named = re.search(r"field `([^`]*)`", message)
    placed = re.search(r"at `\$\.(\w+)", message)
    param = placed[1] if placed else named[1] if named else None
    code = "invalid_type" if ", got `" in message else "invalid_value"
    if named is not None:
        code = "unknown_parameter" if "unknown field" in message else "missing_required_parameter"
    if param is not None and len(param) > LONGEST_NAME:
        param = None
    return RequestError(f"the request cannot be read: {message}", param, code)


def sampling_of(request: RequestFields, defaults: Sampling) -> Sampling:
    """Return the sampling parameters of a request; `defaults` has those that it does not set.

    The seed is left out: it belongs to each reply, and a batch has replies of many seeds. Raises
    `RequestError`.
    """
    named = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "top_k": None if request.top_k is None else max(request.top_k, 0),
    }
    values: JsonObject = {name: value for name, value in named.items() if value is not None}
    if values.get("temperature", defaults.temperature) == 0:
        # Clients send them nevertheless. They never remove the best token, so they have no effect.
        values |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    try:
        return replace(defaults, **values)
    except UserError as error:
        param = str(error).partition(" ")[0]
        raise RequestError(str(error), param if param in named else None) from error


def requests_of(request: RequestFields, engine: Engine, name: str, longest: int) -> list[Request]:
    """Return the requests of the decode loop: all samples of each prompt, in order.

    `name` is the target's in messages, which must not contain a path; `longest` is the limit of a
    reply if the request sets none. Without a seed each request has different noise. Raises
    `RequestError` for a prompt that cannot be decoded.
    """
    limit, param = request.max_tokens, "prompt"
    if isinstance(request, ChatRequest):
        limit, param = request.max_completion_tokens or limit, "messages"
    # Counted first: a request may hold hundreds of thousands of prompts.
    count = len(listed(request.prompt)) if isinstance(request, CompletionRequest) else 1
    if (replies := count * request.n) > engine.queue:
        why = f"{replies} replies are requested, but at most {engine.queue} can wait"
        raise RequestError(why, "n" if count == 1 else "prompt")
    # `row_keys` takes 64 bits; 0 is the name of the only prompt of `Decoder.generate`.
    first = 0 if request.seed is not None else secrets.randbits(62)
    target, found = engine.target, []
    for number, prompt in enumerate(given_prompts(request)):
        check_length(prompt, engine, param)
        try:
            ids = encoded(prompt, request, target.tokenizer, name)
        except (RowError, UserError) as error:
            raise RequestError(f"the prompt cannot be encoded: {error}", param) from error
        room = target.max_positions - len(ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param)
        if room < 1:
            raise too_long(f"{len(ids)} tokens", engine, param)
        if not all(0 <= token < target.vocab_size for token in ids):
            last = target.vocab_size - 1
            why = f"a prompt contains a number that is not a token id of {name} (0 to {last})"
            raise RequestError(why, param)
        most = min(limit or longest, room)
        for sample in range(request.n):
            found.append(Request(ids, first + number, sample, most, request.seed))
    return found


def given_prompts(request: RequestFields) -> list[Conversation]:
    """Return the prompts of a request before encoding. Raises `RequestError`."""
    if isinstance(request, ChatRequest):
        if request.messages[-1].get("role") == "assistant":
            why = "the last message is the assistant's; this server begins each reply"
            raise RequestError(why, "messages")
        kwargs = request.chat_template_kwargs or {}
        try:  # a chat template from a client could run for ever
            check_template_kwargs(kwargs)
        except UserError as error:
            raise RequestError(str(error), "chat_template_kwargs") from error
        row = {"messages": request.messages, "chat_template_kwargs": kwargs}
        try:
            return [conversation_of({**row, "reasoning_effort": request.reasoning_effort})]
        except RowError as error:
            raise RequestError(str(error), "messages") from error
    assert isinstance(request, CompletionRequest)
    prompts = []
    for prompt in listed(request.prompt):
        if isinstance(prompt, str):
            prompts.append(Conversation(text=prompt, completion=""))
        elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            prompts.append(Conversation(token_ids=prompt))
        else:
            raise RequestError("a prompt is a text or a list of token ids", "prompt")
    return prompts


def listed(prompt: Any) -> list[Any]:
    """Return the prompts of a completion request as a list."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def check_length(prompt: Conversation, engine: Engine, param: str) -> None:
    """Raise `RequestError` for a text that cannot fit, before the time is spent to encode it."""
    texts = [joined(message.get("content", ""), "") for message in prompt.messages or []]
    texts += [prompt.text] if prompt.text is not None else []
    positions, length = engine.target.max_positions, sum(map(len, texts))
    if len(texts) > positions:
        raise too_long(f"{len(texts)} messages", engine, param)
    if length > positions * engine.longest_token:
        raise too_long(f"{length} characters", engine, param)


def encoded(prompt: Conversation, request: RequestFields, tokenizer: Any, name: str) -> list[int]:
    """Return the token ids of a prompt. Raises `RowError` and `UserError`."""
    if isinstance(request, CompletionRequest) and not request.add_special_tokens and prompt.text:
        return tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    return prompt_ids(prompt, tokenizer, name)


def too_long(length: str, engine: Engine, param: str) -> RequestError:

    room = engine.target.max_positions
    why = f"a prompt of {length} leaves no room in {room} positions; shorten it"
    return RequestError(why, param, "context_length_exceeded")
