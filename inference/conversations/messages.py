"""Normal form of messages, into which servers bring a request before they render it.

A message is `{"role", "content"}`, and may have `tool_calls` in OpenAI's form. Nulls are dropped at
every depth, because a table (parquet) fills absent keys with them; an empty `tool_calls` is dropped
too. What depends on the target's template (`developer`, parts, the form of arguments) is in
`templates`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...heads.files import JsonObject, no_constant


class RowError(ValueError):
    """Error of one malformed row; the message says what is wrong with it."""


SPEAKERS = {
    "human": "user",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
SPEAKERS |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
SPEAKERS |= {name: name for name in ("user", "assistant", "system", "developer", "tool")}
"""Roles of the speakers of ShareGPT and LlamaFactory."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of a part whose `text` is read."""
LEARN_KEYS = ("weight", "train", "training", "loss", "loss_mask")
"""Keys of a message that say whether a reply is learned, as axolotl, OpenAI, TRL and LlamaFactory
name them: 0 or false for a reply that is context only."""
IGNORED = ("id", "index", "object", "created", "timestamp", "type")
"""Keys of a message that do not affect its text and are not reported as ignored."""
TYPE_NAMES = {
    str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip


@dataclass
class ReadMessages:
    """Messages in their normal form, their names in the row, and the replies not to learn."""

    messages: list[JsonObject] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)
    """Names of each message and of its content in the row: messages[0], messages[0].content."""
    not_learned: set[int] = field(default_factory=set)
    """Indices of replies that are context only, as the row says."""

    def add(self, value: Any, path: str) -> None:
        """Append the message `value`. Raises `RowError` that begins with the field's name."""
        message, content = without_nulls(expect(value, dict, path)), f"{path}.content"
        if "role" not in message and "from" in message:
            message, content = _of_speaker(message, path), f"{path}.value"
        message["role"] = role = expect(message.get("role"), str, f"{path}.role")
        if not _learned(message, path) and role == "assistant":
            self.not_learned.add(len(self.messages))
        self.messages.append(plain_message(message, path))
        self.paths.append((path, content))

    def add_all(self, values: Any, path: str) -> None:
        """Append the messages of a list, or of its JSON text. Raises `RowError`."""
        values = expect(from_json(values, path), list, path)
        if not values:
            raise RowError(f"{path} is empty; give at least one message")
        for number, value in enumerate(values):
            self.add(value, f"{path}[{number}]")

    def add_text(self, role: str, text: str, path: str) -> None:
        """Append a message of `role` whose text is the field `path` itself."""
        self.messages.append({"role": role, "content": text})
        self.paths.append((path, path))

    def put_system(self, value: Any, path: str) -> None:
        """Put the system prompt of a separate field before the messages.

        Raises `RowError` for a row with another system prompt in its messages.
        """
        text = joined(value, path)
        if not text.strip():
            return
        first = self.messages[0]
        if first["role"] in ("system", "developer"):
            if joined(first.get("content", ""), "").strip() == text.strip():
                return
            raise RowError(
                f"{path} and {self.paths[0][1]} are two system prompts; keep the one that is served"
            )
        self.messages.insert(0, {"role": "system", "content": text})
        self.paths.insert(0, (path, path))
        self.not_learned = {index + 1 for index in self.not_learned}


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys that are null, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def plain_message(message: JsonObject, path: str) -> JsonObject:
    """Return a message without nulls in its normal form, as a new table. Raises `RowError`."""
    # Clients write empty values for what a message does not have.
    message = {key: v for key, v in message.items() if key == "content" or not _empty(key, v)}
    if message.get("role") == "function":
        message["role"] = "tool"
    if "function_call" in message:
        call = message.pop("function_call")
        message.setdefault("tool_calls", [call])
    if "tool_calls" in message:
        calls = expect(from_json(message["tool_calls"], f"{path}.tool_calls"), list, path)
        message["tool_calls"] = [
            _plain_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
        if not calls:
            del message["tool_calls"]
    if "content" in message:
        message["content"] = _plain_content(message, path)
    elif "tool_calls" not in message and not reasoning_of(message)[0]:
        raise RowError(f"{path}: a message of role {message['role']} has no content or tool calls")
    return message


REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its reasoning, by the names that servers and templates use."""


def _empty(key: str, value: Any) -> bool:
    if isinstance(value, str):
        return key in (*REASONING_KEYS, "tool_calls", "function_call") and not value.strip()
    return value in ([], {})


def reasoning_of(message: JsonObject) -> tuple[str, str]:
    """Return the key and the text of a message's reasoning; two empty texts if it has none."""
    for key in REASONING_KEYS:
        if isinstance(text := message.get(key), str) and text.strip():
            return key, text
    return "", ""


def tools_of(value: Any, path: str) -> list[JsonObject] | None:
    """Return tools in OpenAI's form; None for an empty list.

    `value` may be JSON text, and its tools bare functions, as in LlamaFactory and Anthropic's API.
    Raises `RowError`.
    """
    tools = expect(from_json(value, path), list, path)
    return [_plain_tool(tool, f"{path}[{number}]") for number, tool in enumerate(tools)] or None


def joined(content: Any, path: str) -> str:
    """Return a content in text parts as one text, joined by line breaks as in vLLM and llama.cpp.

    Raises `RowError` for anything else.
    """
    if isinstance(content, str):
        return content
    parts = [_text_part(part, f"{path}[{i}]") for i, part in enumerate(expect(content, list, path))]
    return "\n".join(part["text"] for part in parts)


def expect(value: Any, kind: type, path: str) -> Any:
    """Return `value`. Raises `RowError` unless it is of type `kind`."""
    if not isinstance(value, kind):
        if value is None:
            raise RowError(f"{path} is missing; it must be {TYPE_NAMES[kind]}")
        named = TYPE_NAMES.get(type(value), type(value).__name__)
        raise RowError(f"{path} must be {TYPE_NAMES[kind]}, not {named}")
    return value


def check_text(value: Any) -> None:
    """Raise `RowError` for a value of JSON with a text that cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowError("not text: it holds one half of a surrogate pair") from error


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises `RowError`.

    Numbers must be finite, and texts must be encodable as UTF-8.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not valid JSON: {str(error).partition(';')[0]}") from error
    # Only an escape such as \ud83d can bring half of a surrogate pair into a text, so other rows
    # need not be checked.
    if "\\u" in text:
        check_text(value)
    return value


def from_json(value: Any, path: str) -> Any:
    """Return a value that may be given as its JSON text. Raises `RowError` for another text."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value)
    except RowError as error:
        raise RowError(f"{path} is a text that is not JSON; write it as JSON") from error


def _of_speaker(message: JsonObject, path: str) -> JsonObject:
    """Return a turn of `from` and `value` as a message."""
    speaker, value = message.pop("from"), message.pop("value", None)
    if speaker not in SPEAKERS:
        raise RowError(
            f"{path}.from is {speaker!r}, not one of {', '.join(SPEAKERS)}; rename it to gpt if "
            "it is the model"
        )
    message["role"] = SPEAKERS[speaker]
    if speaker != "function_call":
        return message | {"content": expect(value, str, f"{path}.value")}
    calls = from_json(value, f"{path}.value")
    return message | {"tool_calls": calls if isinstance(calls, list) else [calls]}


def _learned(message: JsonObject, path: str) -> bool:
    """Remove the keys in `LEARN_KEYS`; return True if the reply is learned. Raises `RowError`."""
    learned = True
    for key in LEARN_KEYS:
        if key in message:
            value = message.pop(key)
            if value not in (0, 1):  # false and true equal them
                raise RowError(f"{path}.{key} is {value!r}; write 0 or 1, or false or true")
            learned = learned and bool(value)
    return learned


def _plain_content(message: JsonObject, path: str) -> str | list[JsonObject]:
    """Return the content of a message as a text or as text parts.

    Separate parts with thoughts become the message's reasoning.
    """
    content, path = message["content"], f"{path}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        named = TYPE_NAMES.get(type(content), type(content).__name__)
        raise RowError(f"{path} must be a text or a list of parts, not {named}")
    parts, thoughts = [], []
    for number, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        else:
            parts.append(_text_part(part, f"{path}[{number}]"))
    if thoughts and not reasoning_of(message)[0]:
        message["reasoning_content"] = "\n".join(thoughts)
    return parts


def _text_part(part: Any, path: str) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = expect(part, dict, path).get("type")
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise RowError(f"{path} is of type {kind}; only texts are read, not images, audio or others")


def _plain_call(call: Any, path: str) -> JsonObject:
    """Return a tool call in OpenAI's form, whose arguments are an object or a text."""
    call = expect(call, dict, path)
    function = expect(call.get("function", call), dict, f"{path}.function")
    expect(function.get("name"), str, f"{path}.function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    if not isinstance(arguments, dict | str):
        raise RowError(f"{path}.function.arguments must be an object or its JSON text")
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **plain} if "id" in call else plain


def _plain_tool(tool: Any, path: str) -> JsonObject:
    tool = without_nulls(expect(tool, dict, path))
    if "function" in tool:
        expect(expect(tool["function"], dict, f"{path}.function").get("name"), str, f"{path}.name")
        return tool if "type" in tool else {"type": "function", **tool}
    expect(tool.get("name"), str, f"{path}.name")
    if "input_schema" in tool:
        tool["parameters"] = tool.pop("input_schema")
    tool.pop("type", None)
    return {"type": "function", "function": tool}
