"""Conversations as people store them, read into one shape. Used for prompts to decode and for rows to learn from.

Formats: `messages`; ShareGPT `conversations`; `prompt` with `completion` or `response` (plain text, or messages); `text`;
OpenAI-style request logs (`request` or `body`, with `response`); Spec-Bench `turns`; and the token-exact rows that
`draftsmith data regenerate` writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..heads.errors import UserError
from ..heads.files import no_constant
from .settings import BadRows

log = logging.getLogger(__name__)

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_ROLES |= {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool"}


class RowError(ValueError):
    """Why one row is malformed."""


class LeftOut:
    """The malformed rows of a source: the first one ends the command, or each is left out and named."""

    NAMED = 20

    def __init__(self, source: str, bad_rows: BadRows, option: str = "--bad-rows") -> None:
        """`option`: what the user writes to leave rows out."""
        self._source, self._bad_rows, self._option = source, bad_rows, option
        self.count = 0
        self.first = ""

    def add(self, name: str, error: RowError) -> None:
        """Raise `UserError`, or count the row."""
        if self._bad_rows == "stop":
            remedy = f"mend or remove it, or leave out such rows with {self._option} skip"
            raise UserError(f"{self._source}: row {name}: {error}; {remedy}")
        self.count += 1
        self.first = self.first or f"{name} ({error})"
        if self.count <= self.NAMED:
            log.warning("%s: row %s is left out: %s", self._source, name, error)
        elif self.count == self.NAMED + 1:
            log.warning("%s: more rows are left out, which are not named", self._source)


@dataclass
class Conversation:
    """One row: messages, or plain text, or exact tokens."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    """Plain text; with `completion`, the part before it."""
    completion: str | None = None
    token_ids: list[int] | None = None
    response_spans: list[tuple[int, int]] = field(default_factory=list)
    """Where in `token_ids` the target wrote: [start, end)."""
    tokenizer_hash: str | None = None
    """Of the tokenizer that `token_ids` belong to, where the row says so."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What this row asks of the chat template, such as enable_thinking."""

    def words(self) -> str:
        """What people and model said, without system prompts (they recur in every row): the text compared for overlap."""
        if self.messages is not None:
            spoken = [m.get("content") for m in self.messages if m.get("role") in ("user", "assistant")]
            return "\n".join(content if isinstance(content, str) else json.dumps(content) for content in spoken if content)
        return "\n".join(part for part in (self.text, self.completion) if part)


def conversation_of(row: Any) -> Conversation:
    """Read one row in any of the formats; raises `RowError` with the reason."""
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    if row.get("token_ids") is not None:
        return _exact(row)
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise RowError("chat_template_kwargs must be an object")
    tools = row.get("tools")
    if row.get("messages") is not None:
        return Conversation(messages=_messages(row["messages"]), tools=tools, template_kwargs=kwargs)
    if row.get("conversations") is not None:
        return Conversation(messages=_sharegpt(row["conversations"]), tools=tools, template_kwargs=kwargs)
    if (request := row.get("request") or row.get("body")) is not None:
        return _request_log(request, row.get("response"))
    if turns := turns_of(row):
        return Conversation(messages=[{"role": "user", "content": turns[0]}])
    if row.get("prompt") is not None:
        return _prompt_and_completion(row, kwargs)
    if isinstance(row.get("text"), str):
        return Conversation(text=row["text"])
    raise RowError("none of messages, conversations, request, prompt, turns, text, token_ids is there")


def turns_of(row: dict[str, Any]) -> list[str]:
    """What the user says turn by turn: `turns` (Spec-Bench), or a `prompt` that is a list of texts (MT-Bench); else nothing."""
    prompt, turns = row.get("prompt"), row.get("turns")
    if turns is None and isinstance(prompt, list) and prompt and all(isinstance(turn, str) for turn in prompt):
        return prompt
    if turns is not None and (not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns)):
        raise RowError("turns must be a list of texts")
    return turns or []


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError("messages must be a list with at least one message")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("a message must be an object with a role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise RowError(f"a message of role {message['role']} has neither content nor tool calls")
        # Tables fill absent keys with null; templates test `is defined`, so nulls must not reach them.
        messages.append({key: v for key, v in message.items() if v is not None or key == "content"})
    return messages


def _sharegpt(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError("conversations must be a list with at least one turn")
    messages = []
    for turn in value:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or turn.get("from") not in SHAREGPT_ROLES:
            raise RowError("a turn must have a text as value and human, gpt, system or tool as from")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _request_log(request: Any, response: Any) -> Conversation:
    """One request with its answer, as servers and batch files log them."""
    if not isinstance(request, dict) or "messages" not in request:
        raise RowError("the request has no messages")
    messages = _messages(request["messages"])
    if isinstance(response, dict):
        response = response.get("body", response)
        choices = response.get("choices") if isinstance(response, dict) else None
        if not choices or not isinstance(choices[0], dict) or "message" not in choices[0]:
            raise RowError("the response has no choices[0].message")
        messages = messages + _messages([choices[0]["message"]])
    kwargs = request.get("chat_template_kwargs") or {}
    return Conversation(messages=messages, tools=request.get("tools"), template_kwargs=kwargs)


def _prompt_and_completion(row: dict[str, Any], kwargs: dict[str, Any]) -> Conversation:
    prompt, completion = row["prompt"], row.get("completion", row.get("response"))
    if isinstance(prompt, list):
        after = _messages(completion) if isinstance(completion, list) else []
        if isinstance(completion, str):
            after = [{"role": "assistant", "content": completion}]
        return Conversation(messages=_messages(prompt) + after, tools=row.get("tools"), template_kwargs=kwargs)
    if not isinstance(prompt, str) or not isinstance(completion, str | None):
        raise RowError("prompt and completion must be texts or lists of messages")
    return Conversation(text=prompt, completion=completion or "")


def _exact(row: dict[str, Any]) -> Conversation:
    ids, spans = row["token_ids"], row.get("response_spans")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise RowError("token_ids must be a list of integers, none below 0")
    if not isinstance(spans, list) or not all(isinstance(s, list | tuple) and [type(n) for n in s] == [int, int] for s in spans):
        raise RowError("response_spans must be a list of [start, end] pairs")
    if not all(0 <= start <= end <= len(ids) for start, end in spans):
        raise RowError("a response span lies outside token_ids")
    ordered = sorted(spans)
    if any(start < end for (_, end), (start, _) in pairwise(ordered)):
        raise RowError("two response spans overlap")
    messages = _messages(row["messages"]) if row.get("messages") is not None else None
    written_with = (row.get("regenerated") or {}).get("tokenizer_hash")
    spans = [(start, end) for start, end in spans]
    return Conversation(messages=messages, text=row.get("text"), token_ids=ids, response_spans=spans, tokenizer_hash=written_with)


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(name of the row, its value) for every row of a JSON or JSONL file; the value of a broken line is a `RowError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}; check the path") from error
    if path.suffix == ".json":
        try:
            rows = parsed(text)
        except RowError as error:
            raise UserError(f"{path} is {error}; for one object a line, name it .jsonl") from error
        if not isinstance(rows, list):
            raise UserError(f"{path} must hold a list of rows")
        yield from ((f"{path.name}:{i}", row) for i, row in enumerate(rows, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}:{number}", parsed(line)
            except RowError as error:
                yield f"{path.name}:{number}", error


def parsed(text: str) -> Any:
    """A JSON value of numbers that are finite and texts that can be written as UTF-8. Raises `RowError`."""
    try:
        value = json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from error
    except RecursionError as error:
        raise RowError("nested too deeply to be read") from error
    except ValueError as error:  # such as an integer of more digits than Python converts
        raise RowError(f"not to be read: {str(error).partition(';')[0]}") from error
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("not text: it holds one half of a surrogate pair") from error
    return value


def warn_of_plain_text(plain: int, tokenizer: Any, path: str) -> None:
    """Say so where `plain` rows of a file are given to a chat model without its template: it may answer them with nothing."""
    if plain and getattr(tokenizer, "chat_template", None):
        log.warning(
            "%s: %d rows are plain text, which the target is given as it is, without its chat template; for questions to a chat "
            'model write {"messages": [{"role": "user", "content": "..."}]}',
            path,
            plain,
        )


def template_of(tokenizer: Any, name: str) -> str:
    """The tokenizer's chat template; `UserError` where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"target {name} has no chat template, but the data is chat-shaped; use plain `text` or `prompt`, or a target with one"
        )
    return tokenizer.chat_template


def prompt_ids(conversation: Conversation, tokenizer: Any, name: str) -> list[int]:
    """Token ids that the target is given: everything before the last assistant message, rendered for generation."""
    if conversation.token_ids is not None:
        first = min((start for start, _ in conversation.response_spans), default=len(conversation.token_ids))
        return conversation.token_ids[:first]
    if conversation.messages is None:
        return tokenizer(conversation.text)["input_ids"]
    template_of(tokenizer, name)
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowError("there is no message before the assistant's")
    try:
        return tokenizer.apply_chat_template(
            messages, tools=conversation.tools, add_generation_prompt=True, return_dict=True, **conversation.template_kwargs
        )["input_ids"]
    except Exception as error:
        raise RowError(f"the chat template cannot render it: {str(error).splitlines()[0]}") from error
