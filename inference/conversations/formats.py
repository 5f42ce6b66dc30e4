"""Conversations as people store them: each format of a row as a type, read into one shape.

Formats: `messages`; ShareGPT `conversations`; `prompt` with `completion` or `response` (plain text,
or messages); `text`; OpenAI-style request logs (`request` or `body`, with `response`); Spec-Bench
`turns`; and the token-exact rows that `draftsmith data regenerate` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...heads.documents import Count, DocumentError, Token, convert, demand

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
ROLES |= {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool"}


class RowError(ValueError):
    """Why one row is malformed."""


@dataclass
class Conversation:
    """One row: messages, or plain text, or exact tokens."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    """Plain text; with `completion`, the part before it."""
    completion: str | None = None
    token_ids: list[int] | None = None
    response_spans: list[tuple[int, int]] = field(default_factory=list)
    """Spans [start, end) of `token_ids` that the target wrote."""
    tokenizer_hash: str | None = None
    """The hash of the tokenizer of `token_ids`, if the row has it."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row, such as enable_thinking."""
    later: list[str] = field(default_factory=list)
    """The user's next turns; the replies between them are still to be written."""

    def words(self) -> str:
        """The text of people and model that is compared for overlap. System prompts are left out:
        they recur in every row."""
        if self.messages is not None:
            spoken = [
                m.get("content") for m in self.messages if m.get("role") in ("user", "assistant")
            ]
            return "\n".join(
                content if isinstance(content, str) else json.dumps(content)
                for content in spoken
                if content
            )
        return "\n".join(part for part in (self.text, self.completion) if part)


class Message(Struct):
    """The keys of a message that are read here; the others are for the chat template."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        demand(
            self.content is not None or bool(self.tool_calls),
            f"a message of role {self.role} has no content or tool calls",
        )


Messages = Annotated[list[Message], Meta(min_length=1)]


class Turn(Struct, rename={"speaker": "from"}):
    """One of ShareGPT's `conversations`."""

    speaker: Literal[
        "human", "user", "gpt", "assistant", "system", "chatgpt", "bing", "bard", "tool"
    ]
    value: str


class Choice(Struct):
    """One answer of a server."""

    message: Message


class Response(Struct):
    """The answer to a request; batch files have it below `body`."""

    choices: list[Choice] = []
    body: Response | None = None

    def __post_init__(self) -> None:
        demand(bool(self.choices) or self.body is not None, "there is no choices[0].message")


class Request(Struct):
    """What a server was asked."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Regenerated(Struct):
    """How `draftsmith data regenerate` wrote a row."""

    tokenizer_hash: str | None = None


class ExactRow(Struct):
    """Tokens, and the spans of them that the target wrote."""

    token_ids: list[Token]
    response_spans: list[tuple[Count, Count]]
    messages: Messages | None = None
    text: str | None = None
    regenerated: Regenerated | None = None

    def __post_init__(self) -> None:
        length, ordered = len(self.token_ids), sorted(self.response_spans)
        demand(
            all(start <= end <= length for start, end in ordered),
            "a response span lies outside token_ids",
        )
        demand(
            all(end <= start for (_, end), (start, _) in pairwise(ordered)),
            "two response spans overlap",
        )

    def conversation(self, row: dict[str, Any]) -> Conversation:
        return Conversation(
            messages=None if self.messages is None else without_nulls(row["messages"]),
            text=self.text,
            token_ids=self.token_ids,
            response_spans=self.response_spans,
            tokenizer_hash=None if self.regenerated is None else self.regenerated.tokenizer_hash,
        )


class ChatRow(Struct):
    """What a row of any chat format may say besides its messages."""

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def of(self, messages: list[dict[str, Any]], later: list[str] | None = None) -> Conversation:
        kwargs = self.chat_template_kwargs or {}
        return Conversation(
            messages=messages, tools=self.tools, template_kwargs=kwargs, later=later or []
        )


class MessagesRow(ChatRow, kw_only=True):
    """Messages as chat templates take them."""

    messages: Messages

    def conversation(self, row: dict[str, Any]) -> Conversation:
        return self.of(without_nulls(row["messages"]))


class ShareGptRow(ChatRow, kw_only=True):
    """Turns with `from` and `value`."""

    conversations: Annotated[list[Turn], Meta(min_length=1)]

    def conversation(self, row: dict[str, Any]) -> Conversation:
        return self.of(
            [{"role": ROLES[turn.speaker], "content": turn.value} for turn in self.conversations]
        )


class LogRow(Struct):
    """A request with its answer, as servers and batch files log them."""

    request: Request | None = None
    body: Request | None = None
    response: Response | str | None = None

    def conversation(self, row: dict[str, Any]) -> Conversation:
        name = "request" if self.request is not None else "body"
        asked = self.request or self.body
        assert asked is not None
        messages, answer = without_nulls(row[name]["messages"]), row.get("response")
        if isinstance(answer, dict):
            while not answer.get("choices"):
                answer = answer["body"]
            messages += without_nulls([answer["choices"][0]["message"]])
        elif answer:
            messages.append({"role": "assistant", "content": answer})
        return Conversation(
            messages=messages, tools=asked.tools, template_kwargs=asked.chat_template_kwargs or {}
        )


class TurnsRow(ChatRow, kw_only=True):
    """What the user says turn by turn (Spec-Bench)."""

    turns: Annotated[list[str], Meta(min_length=1)]

    def conversation(self, row: dict[str, Any]) -> Conversation:
        return self.of([{"role": "user", "content": self.turns[0]}], self.turns[1:])


class PromptRow(ChatRow, kw_only=True):
    """A prompt: plain text, messages, or what the user says turn by turn (MT-Bench); and the reply
    to the first two."""

    prompt: str | Annotated[list[str | Message], Meta(min_length=1)]
    completion: str | list[Message] | None = None
    response: str | list[Message] | None = None

    def __post_init__(self) -> None:
        texts = isinstance(self.prompt, str) or all(isinstance(part, str) for part in self.prompt)
        reply = self.completion if self.completion is not None else self.response
        demand(
            texts or not any(isinstance(part, str) for part in self.prompt),
            "prompt mixes texts and messages",
        )
        demand(
            not (texts and isinstance(reply, list)),
            "the reply to a text is a text; write the prompt as messages too",
        )

    def conversation(self, row: dict[str, Any]) -> Conversation:
        prompt = self.prompt
        reply = row["completion"] if self.completion is not None else row.get("response")
        if isinstance(prompt, str):
            return Conversation(text=prompt, completion=reply or "")
        turns = [part for part in prompt if isinstance(part, str)]
        if turns:
            return self.of([{"role": "user", "content": turns[0]}], turns[1:])
        after = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply or []
        return self.of(without_nulls(row["prompt"]) + without_nulls(after))


class TextRow(Struct):
    """Plain text."""

    text: str

    def conversation(self, row: dict[str, Any]) -> Conversation:
        return Conversation(text=self.text)


FORMATS: dict[str, Any] = {
    "token_ids": ExactRow,
    "messages": MessagesRow,
    "conversations": ShareGptRow,
    "request": LogRow,
    "body": LogRow,
    "turns": TurnsRow,
    "prompt": PromptRow,
    "text": TextRow,
}
"""The type of a row by the first of these keys that it has."""


def conversation_of(row: Any) -> Conversation:
    """Read one row in any of the formats; raises `RowError` with the reason."""
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    for key, kind in FORMATS.items():
        if row.get(key) is not None:
            try:
                return convert(row, kind).conversation(row)
            except DocumentError as error:
                raise RowError(str(error)) from error
    raise RowError(
        "none of messages, conversations, request, prompt, turns, text, token_ids is there"
    )


def without_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without absent keys, which tables fill with null: templates test `is defined`,
    and a null is defined."""
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]
