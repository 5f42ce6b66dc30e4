"""Formats of conversations: each format of a row is read into a `Conversation`.

The formats are `messages`, ShareGPT `conversations` (of `from` and `value`, or of `role` and
`content`), questions with answers, preferences, `prompt` with `completion` or `response`, `text`,
request logs (`request` or `body`, with `response`), `turns`, and rows of tokens. docs/data.md has
the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from msgspec import Struct

from ...heads.documents import Count, DocumentError, Token, convert, demand
from ...heads.files import JsonObject
from .messages import (
    LEARN_KEYS,
    TYPE_NAMES,
    ReadMessages,
    RowError,
    expect,
    joined,
    tools_of,
    without_nulls,
)

CUT_SHORT = (
    "length", "content_filter", "abort", "max_tokens", "max_output_tokens", "model_length",
    "stop_sequence", "error",
)  # fmt: skip
"""Reasons of servers for which a reply ends without an end token."""
ENDED = ("", "stop", "eos", "end_turn", "tool_use", "tool_calls", "pause_turn", "refusal")
"""Values of `stop_reason` for a reply that ended by itself; other texts are a stop string."""
SYSTEM_KEYS = ("system", "system_prompt")
ANSWER_KEYS = ("answer", "response", "output")
IGNORED = {
    "id", "question_id", "prompt_id", "conversation_id", "custom_id", "uuid", "category", "part",
    "last_part", "regenerated",
}  # fmt: skip
"""Keys of a row that do not affect what is learned."""
END_KEYS = ("finish_reason", "stop_reason", "matched_stop")
PLAIN_KEYS = (*LEARN_KEYS, *END_KEYS)
CHAT_KEYS = (
    *PLAIN_KEYS, *SYSTEM_KEYS, "tools", "functions", "chat_template_kwargs", "reasoning_effort"
)  # fmt: skip
"""Keys that a row of any chat format may have besides its messages."""
EXACT_KEYS = (
    "response_spans", "finish_reasons", "stop_reason", "messages", "text", "tools",
    "chat_template_kwargs",
)  # fmt: skip


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
    """True if the last reply ended before its end token: at a limit, or at a stop string."""
    end_token: int | None = None
    """Token that ended the last reply, where a server names it."""
    paths: list[tuple[str, str]] = field(default_factory=list)
    """Names of each message and of its content in the row; as of `messages` where it is empty."""
    not_learned: frozenset[int] = frozenset()
    """Indices of the replies that are context only, as the row says."""
    unread: frozenset[str] = frozenset()
    """Keys of the row that are not read."""

    def with_arguments(self, template_kwargs: JsonObject) -> Conversation:
        """Return it with further arguments of the chat template; its own take precedence."""
        return replace(self, template_kwargs={**template_kwargs, **self.template_kwargs})

    def path(self, index: int) -> tuple[str, str]:
        """Return the names of a message and of its content in the row."""
        if index < len(self.paths):
            return self.paths[index]
        return f"messages[{index}]", f"messages[{index}].content"

    def learns_nothing(self) -> bool:
        """Return True if the row excludes all of its replies from training.

        In plain text, index 0 stands for all of it.
        """
        replies = {i for i, m in enumerate(self.messages or []) if m["role"] == "assistant"}
        return bool(self.not_learned) and replies <= self.not_learned

    def words(self) -> str:
        """Return the text of user and model, by which rows are compared for overlap.

        System prompts are left out, because they recur in every row.
        """
        if self.messages is None:
            return "\n".join(text for text in (self.text, self.completion) if text)
        return "\n".join(
            joined(message["content"], "")
            for message in self.messages
            if message.get("role") in ("user", "assistant") and message.get("content")
        )


class Regenerated(Struct):
    """Note of `draftsmith data regenerate` about how it wrote a row."""

    tokenizer_hash: str | None = None


class ExactRow(Struct):
    """Row of exact tokens, with the spans of them that the target wrote."""

    token_ids: list[Token]
    response_spans: list[tuple[Count, Count]]
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


def _exact(row: JsonObject, _key: str) -> Conversation:
    exact = convert(row, ExactRow)
    read = ReadMessages()
    if row.get("messages") is not None:
        read.add_all(row["messages"], "messages")
    return Conversation(
        messages=read.messages or None,
        text=exact.text,
        token_ids=exact.token_ids,
        response_spans=exact.response_spans,
        tokenizer_hash=None if exact.regenerated is None else exact.regenerated.tokenizer_hash,
    )


def _messages(row: JsonObject, key: str) -> Conversation:
    read = ReadMessages()
    read.add_all(row[key], key)
    return _chat(row, read)


def _log(row: JsonObject, name: str) -> Conversation:
    """Read a request with its response, as servers and batch files log them."""
    request, response = expect(row[name], dict, name), row.get("response")
    if "messages" not in request and isinstance(request.get("prompt"), str):
        choice, _ = _choice(response, "text")
        return _plain(row, request["prompt"], choice["text"] if choice else "", choice or {})
    read = ReadMessages()
    read.add_all(request.get("messages"), f"{name}.messages")
    choice, path = None, ""
    if isinstance(response, str):
        if response:
            read.add_text("assistant", response, "response")
    else:
        choice, path = _choice(response, "message")
        if choice is not None:
            read.add({"role": "assistant"} | expect(choice["message"], dict, path), path)
    return _chat(row, read, request, name, choice or {})


def _choice(response: Any, key: str) -> tuple[JsonObject | None, str]:
    """Return the first choice of a response, and the name of its field `key`; None without one.

    Batch files have the response under `body`. A message of Anthropic's protocol is one choice.
    Raises `RowError`.
    """
    if response is None:
        return None, ""
    path, response = "response", expect(response, dict, "response")
    while not response.get("choices") and isinstance(response.get("body"), dict):
        path, response = f"{path}.body", response["body"]
    if response.get("role") == "assistant" and key == "message":
        return {"message": {"content": response.get("content")}, **response}, path
    choices = expect(response.get("choices") or [], list, f"{path}.choices")
    if not choices or not isinstance(choices[0], dict) or choices[0].get(key) is None:
        raise RowError(f"{path}: choices[0].{key} is missing; leave the response out if it failed")
    return choices[0], f"{path}.choices[0].{key}"


def _turns(row: JsonObject, key: str) -> Conversation:
    """Read a user's turns without replies (Spec-Bench, MT-Bench)."""
    turns = expect(row[key], list, key)
    if not turns:
        raise RowError(f"{key} is empty; give at least one turn")
    for number, turn in enumerate(turns):
        expect(turn, str, f"{key}[{number}]")
    read = ReadMessages()
    read.add_text("user", turns[0], f"{key}[0]")
    return replace(_chat(row, read), later=turns[1:])


def _prompt(row: JsonObject, key: str) -> Conversation:
    """Read a prompt with its reply: plain text, messages, or the user's turns (MT-Bench)."""
    prompt = row[key]
    keys = [name for name in ("completion", "response", "chosen") if row.get(name) is not None]
    reply = row[keys[0]] if keys else None
    if isinstance(prompt, str) and not isinstance(reply, list):
        for name in (*SYSTEM_KEYS, "tools"):
            if row.get(name):
                raise RowError(f"{name} does not go with a prompt of plain text; write messages")
        return _plain(row, prompt, "" if reply is None else expect(reply, str, keys[0]))
    if isinstance(prompt, str) and keys[0] != "chosen":
        raise RowError("the reply to a text is a text; write the prompt as messages too")
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        return _turns(row, key)
    read = ReadMessages()
    if isinstance(prompt, str):
        read.add_text("user", prompt, "prompt")
    else:
        read.add_all(expect(prompt, list, "prompt"), "prompt")
    if isinstance(reply, str):
        read.add_text("assistant", reply, keys[0])
    elif reply is not None:
        replies = ReadMessages()
        replies.add_all(reply, keys[0])
        if replies.messages[: len(read.messages)] == read.messages:
            read = replies  # preferences repeat the prompt
        else:
            read.not_learned |= {len(read.messages) + index for index in replies.not_learned}
            read.messages += replies.messages
            read.paths += replies.paths
    return _chat(row, read)


def _question(row: JsonObject, key: str) -> Conversation:
    """Read a question with its answer (GSM8K, Alpaca)."""
    read = ReadMessages()
    for number, turn in enumerate(row.get("history") or []):
        path = f"history[{number}]"
        for role, text in zip(("user", "assistant"), expect(turn, list, path), strict=False):
            read.add_text(role, expect(text, str, path), path)
    question = expect(row[key], str, key)
    more = next((name for name in ("input", "context") if row.get(name)), None)
    if more is not None:
        # One message of two fields. Each of them is searched for in the rendering.
        question = f"{question}\n{expect(row[more], str, more)}"
    read.add_text("user", question, key)
    answer = next((name for name in ANSWER_KEYS if row.get(name) is not None), None)
    if answer is not None:
        read.add_text("assistant", expect(row[answer], str, answer), answer)
    return _chat(row, read)


def _text(row: JsonObject, key: str) -> Conversation:
    return _plain(row, expect(row[key], str, key))


def _plain(
    row: JsonObject, text: str, completion: str | None = None, ending: JsonObject | None = None
) -> Conversation:
    """Return a conversation of plain text; `ending`, or else `row`, has the reason of its end."""
    cut, end = _end_of(row if ending is None else ending)
    not_learned = frozenset(_not_learned(row, 1))
    return Conversation(
        text=text, completion=completion, cut=cut, end_token=end, not_learned=not_learned
    )


ABOUT_QUESTIONS = (*CHAT_KEYS, *ANSWER_KEYS, "input", "context", "history")
FORMATS: dict[str, tuple[Callable[[JsonObject, str], Conversation], tuple[str, ...]]] = {
    "token_ids": (_exact, EXACT_KEYS),
    "messages": (_messages, CHAT_KEYS),
    "conversations": (_messages, CHAT_KEYS),
    "conversation": (_messages, CHAT_KEYS),
    "request": (_log, ("response", *LEARN_KEYS)),
    "body": (_log, ("response", *LEARN_KEYS)),
    "turns": (_turns, CHAT_KEYS),
    "prompt": (_prompt, ("completion", "response", "chosen", *CHAT_KEYS)),
    "question": (_question, ABOUT_QUESTIONS),
    "instruction": (_question, ABOUT_QUESTIONS),
    "query": (_question, ABOUT_QUESTIONS),
    "chosen": (_messages, CHAT_KEYS),
    "text": (_text, PLAIN_KEYS),
}
"""Readers of rows by key, with the other keys that each reads. The first of these keys that a row
has decides, so their order matters: a row of `token_ids` may have `messages` too."""


def conversation_of(row: Any) -> Conversation:
    """Return the conversation of a row in any of the formats.

    Raises `RowError`, also for a line that is not JSON, of which the row is the error itself.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, not {TYPE_NAMES.get(type(row), 'this')}")
    for key, (read, others) in FORMATS.items():
        if row.get(key) is None:
            continue
        try:
            found = read(row, key)
        except DocumentError as error:
            raise RowError(str(error)) from error
        unread = {
            name
            for name, value in row.items()
            if value is not None and name != key and name not in others and name not in IGNORED
        }
        # A weight of 2, or the loss of another model, does not say what is learned.
        unread |= {
            name
            for name in LEARN_KEYS
            if not isinstance(row.get(name), list) and row.get(name) not in (None, 0, 1)
        }
        return replace(found, unread=frozenset(unread))
    keys = [*FORMATS][1:] + [*FORMATS][:1]  # that of tokens last
    raise RowError(
        f"none of the keys {', '.join(keys)} is present; rename the key that holds the text "
        "(docs/data.md#logs-in-other-shapes)"
    )


def _chat(
    row: JsonObject,
    read: ReadMessages,
    holder: JsonObject | None = None,
    within: str = "",
    ending: JsonObject | None = None,
) -> Conversation:
    """Return the conversation of the messages `read`, with the other fields of a chat row.

    The tools and arguments are in `holder`, which is the field `within`, and the reason of the
    reply's end in `ending`; both default to the row itself. Raises `RowError`.
    """
    holder, prefix = holder or row, f"{within}." if within else ""
    # Done before a separate system prompt is inserted: lists have an item for each given message.
    read.not_learned |= _not_learned(row, len(read.messages))
    for key in SYSTEM_KEYS:
        if holder.get(key) is not None:
            read.put_system(holder[key], f"{prefix}{key}")
    tools = None
    for key in ("tools", "functions"):
        if holder.get(key) not in (None, ""):
            tools = tools_of(holder[key], f"{prefix}{key}")
    kwargs = expect(holder.get("chat_template_kwargs") or {}, dict, f"{prefix}chat_template_kwargs")
    kwargs = without_nulls(kwargs)
    if isinstance(effort := holder.get("reasoning_effort"), str):
        kwargs.setdefault("reasoning_effort", effort)
    cut, end = _end_of(row if ending is None else ending)
    return Conversation(
        messages=read.messages,
        tools=tools,
        template_kwargs=kwargs,
        cut=cut,
        end_token=end,
        paths=read.paths,
        not_learned=frozenset(read.not_learned),
    )


def _not_learned(row: JsonObject, messages: int) -> set[int]:
    """Return the indices of the messages that keys of the row exclude from training.

    Raises `RowError`.
    """
    found: set[int] = set()
    for key in LEARN_KEYS:
        value = row.get(key)
        if isinstance(value, list):
            if len(value) != messages or any(on not in (0, 1) for on in value):
                raise RowError(f"{key} must have a 0 or a 1 for each of the messages")
            found |= {index for index, on in enumerate(value) if not on}
        elif value == 0:
            found |= {*range(messages)}
    return found


def _end_of(holder: JsonObject) -> tuple[bool, int | None]:
    """Return True if a reply was cut before its end token, and the token that ended it, if known.

    `holder` has a server's reason: vLLM's `stop_reason` and SGLang's `matched_stop` are a stop
    string or the id of a token. Raises `RowError`.
    """
    cut = holder.get("finish_reason") in CUT_SHORT
    for key in ("stop_reason", "matched_stop"):
        match holder.get(key):
            case str(reason):
                cut = cut or reason not in ENDED
            case bool() | float() | list() | dict():
                raise RowError(f"{key} must be a text or the id of a token")
            case int(token):
                return cut, token
    return cut, None
