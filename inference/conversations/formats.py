"""Formats of conversations: a type for each format of a row, read into `Conversation`.

The formats are `messages`; ShareGPT `conversations`; `prompt` with `completion` or `response`
(plain text, or messages); `text`; OpenAI-style request logs (`request` or `body`, with `response`);
Spec-Bench `turns`; and the token-exact rows that `draftsmith data regenerate` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...heads.documents import Count, DocumentError, Token, convert, demand
from ...heads.files import JsonObject

ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
"""Roles of ShareGPT's speakers; the others have the names of roles."""
CUT_SHORT = ("length", "content_filter")
"""Reasons of a server for which a reply ends without an end token."""


class RowError(ValueError):
    """Error of one malformed row; the message says what is wrong with it."""


@dataclass
class Conversation:
    """Row in one form for all formats: messages, or plain text, or exact tokens."""

    messages: list[JsonObject] | None = None
    text: str | None = None
    """Plain text; if there is a `completion`, the part before it."""
    completion: str | None = None
    """Reply to `text`."""
    token_ids: list[int] | None = None
    response_spans: list[tuple[int, int]] = field(default_factory=list)
    """Spans [start, end) of `token_ids` that the target wrote."""
    tokenizer_hash: str | None = None
    """Hash of the tokenizer of `token_ids`, if the row has it."""
    tools: list[JsonObject] | None = None
    template_kwargs: JsonObject = field(default_factory=dict)
    """Arguments of the chat template for this row, such as enable_thinking."""
    later: list[str] = field(default_factory=list)
    """Further turns of the user; the replies between them are still to be written."""
    cut: bool = False
    """True if the last reply ended before its end token, at the limit of its length."""

    def with_arguments(self, template_kwargs: JsonObject) -> Conversation:
        """Return it with arguments of the chat template for all rows, of which its own ones win."""
        return replace(self, template_kwargs={**template_kwargs, **self.template_kwargs})

    def words(self) -> str:
        """Return the text of user and model, by which rows are compared for overlap.

        System prompts are left out, because they recur in every row.
        """
        if self.messages is None:
            return "\n".join(text for text in (self.text, self.completion) if text)
        texts = []
        for message in self.messages:
            content = message.get("content")
            if message.get("role") in ("user", "assistant") and content:
                texts.append(content if isinstance(content, str) else json.dumps(content))
        return "\n".join(texts)


class Message(Struct):
    """Message of a conversation. Other keys than these are left to the chat template."""

    role: str
    content: str | list[JsonObject] | None = None
    tool_calls: list[JsonObject] | None = None

    def __post_init__(self) -> None:
        demand(
            self.content is not None or bool(self.tool_calls),
            f"a message of role {self.role} has no content or tool calls",
        )


Messages = Annotated[list[Message], Meta(min_length=1)]


class ShareGptEntry(Struct, rename={"speaker": "from"}):
    """Entry of ShareGPT's `conversations`."""

    speaker: Literal[
        "human", "user", "gpt", "assistant", "system", "chatgpt", "bing", "bard", "tool"
    ]
    value: str


class LoggedChoice(Struct):
    """Answer of a server to a request."""

    message: Message
    finish_reason: str | None = None


class LoggedResponse(Struct):
    """Response to a request, with its answers; batch files have them below `body`."""

    choices: list[LoggedChoice] = []
    body: LoggedResponse | None = None

    def __post_init__(self) -> None:
        demand(bool(self.choices) or self.body is not None, "there is no choices[0].message")


class LoggedRequest(Struct):
    """Request to a server."""

    messages: Messages
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None


class Regenerated(Struct):
    """Note of `draftsmith data regenerate` about how it wrote a row."""

    tokenizer_hash: str | None = None


class ExactRow(Struct):
    """Row of exact tokens, with the spans of them that the target wrote."""

    token_ids: list[Token]
    response_spans: list[tuple[Count, Count]]
    messages: Messages | None = None
    text: str | None = None
    regenerated: Regenerated | None = None

    def __post_init__(self) -> None:
        # `Count` has made sure that no number is negative
        length, ordered = len(self.token_ids), sorted(self.response_spans)
        demand(
            all(start <= end <= length for start, end in ordered),
            "a response span lies outside token_ids",
        )
        demand(
            all(end <= start for (_, end), (start, _) in pairwise(ordered)),
            "two response spans overlap",
        )

    def conversation(self, row: JsonObject) -> Conversation:
        return Conversation(
            messages=None if self.messages is None else without_nulls(row["messages"]),
            text=self.text,
            token_ids=self.token_ids,
            response_spans=self.response_spans,
            tokenizer_hash=None if self.regenerated is None else self.regenerated.tokenizer_hash,
        )


class ChatRow(Struct):
    """Keys that a row of any chat format may have besides its messages."""

    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    finish_reason: str | None = None
    """Reason for which the last reply ends, as servers name it."""

    @property
    def cut(self) -> bool:
        return self.finish_reason in CUT_SHORT

    def of(self, messages: list[JsonObject], later: list[str] | None = None) -> Conversation:
        """Return the conversation of `messages` with this row's tools and template arguments."""
        return Conversation(
            messages=messages,
            tools=self.tools,
            template_kwargs=self.chat_template_kwargs or {},
            later=later or [],
            cut=self.cut,
        )


class MessagesRow(ChatRow, kw_only=True):
    """Row of messages as chat templates take them."""

    messages: Messages

    def conversation(self, row: JsonObject) -> Conversation:
        return self.of(without_nulls(row["messages"]))


class ShareGptRow(ChatRow, kw_only=True):
    """Row of turns with `from` and `value` (ShareGPT)."""

    conversations: Annotated[list[ShareGptEntry], Meta(min_length=1)]

    def conversation(self, row: JsonObject) -> Conversation:
        return self.of(
            [
                {"role": ROLES.get(turn.speaker, turn.speaker), "content": turn.value}
                for turn in self.conversations
            ]
        )


class LogRow(Struct):
    """Row of a request with its response, as servers and batch files log them."""

    request: LoggedRequest | None = None
    body: LoggedRequest | None = None
    response: LoggedResponse | str | None = None

    def conversation(self, row: JsonObject) -> Conversation:
        name = "request" if self.request is not None else "body"
        request = self.request or self.body
        assert request is not None
        # The messages come from the row itself, not from the types read: those have only the keys
        # that are checked, and a chat template may want others.
        messages, answer = without_nulls(row[name]["messages"]), row.get("response")
        cut = False
        if isinstance(answer, dict):
            # down through any number of `body`; the type has made sure that choices come at the end
            while not answer.get("choices"):
                answer = answer["body"]
            choice = answer["choices"][0]
            messages += without_nulls([choice["message"]])
            cut = choice.get("finish_reason") in CUT_SHORT
        elif answer:
            messages.append({"role": "assistant", "content": answer})
        kwargs = request.chat_template_kwargs or {}
        return Conversation(messages=messages, tools=request.tools, template_kwargs=kwargs, cut=cut)


class TurnsRow(ChatRow, kw_only=True):
    """Row of the user's turns, without replies (Spec-Bench)."""

    turns: Annotated[list[str], Meta(min_length=1)]

    def conversation(self, row: JsonObject) -> Conversation:
        return self.of([{"role": "user", "content": self.turns[0]}], self.turns[1:])


class PromptRow(ChatRow, kw_only=True):
    """Row of a prompt: plain text, messages, or the user's turns (MT-Bench).

    Plain text and messages may have a reply, under `completion` or `response`.
    """

    prompt: str | Annotated[list[str | Message], Meta(min_length=1)]
    completion: str | list[Message] | None = None
    response: str | list[Message] | None = None

    def __post_init__(self) -> None:
        texts = isinstance(self.prompt, str) or all(isinstance(item, str) for item in self.prompt)
        reply = self.completion if self.completion is not None else self.response
        demand(
            texts or not any(isinstance(item, str) for item in self.prompt),
            "prompt mixes texts and messages",
        )
        demand(
            not (texts and isinstance(reply, list)),
            "the reply to a text is a text; write the prompt as messages too",
        )

    def conversation(self, row: JsonObject) -> Conversation:
        prompt = self.prompt
        reply = row["completion"] if self.completion is not None else row.get("response")
        if isinstance(prompt, str):
            return Conversation(text=prompt, completion=reply or "", cut=self.cut)
        turns = [item for item in prompt if isinstance(item, str)]
        if turns:
            return self.of([{"role": "user", "content": turns[0]}], turns[1:])
        if isinstance(reply, str):
            reply = [{"role": "assistant", "content": reply}]
        return self.of(without_nulls(row["prompt"]) + without_nulls(reply or []))


class TextRow(Struct):
    """Row of plain text."""

    text: str
    finish_reason: str | None = None

    def conversation(self, row: JsonObject) -> Conversation:
        return Conversation(text=self.text, cut=self.finish_reason in CUT_SHORT)


FORMATS: JsonObject = {
    "token_ids": ExactRow,
    "messages": MessagesRow,
    "conversations": ShareGptRow,
    "request": LogRow,
    "body": LogRow,
    "turns": TurnsRow,
    "prompt": PromptRow,
    "text": TextRow,
}
"""Types of rows by key. The first of these keys that a row has decides, so their order matters: a
row of `token_ids` may have `messages` too."""


def conversation_of(row: Any) -> Conversation:
    """Return the conversation of a row in any of the formats.

    Raises `RowError`, also for a line that is not JSON, of which the row is the error itself.
    """
    if isinstance(row, RowError):
        raise row
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


def without_nulls(messages: list[JsonObject]) -> list[JsonObject]:
    """Return the messages without keys that are null, except `content`.

    A table (parquet) fills absent keys with null. Chat templates test `is defined`, which is true
    of a null.
    """
    # A message of tool calls has null content, which templates expect to be there.
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]
