"""A target's chat template: the forms of messages that it accepts, found by trial, and its texts.

Plain text is tokenized here too. A tokenizer may add beginning and end tokens to every text. A
prompt gets the beginning only, once; the end belongs to what is learned, and is added there.

Servers adapt a request to the template before they render it: they join text parts for a template
that expects a text, parse the arguments of calls for one that expects an object, and give a
developer's message the system role where the template does not know its own. `ChatTemplate` does
the same, after one trial of each property.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError

from ...heads.errors import UserError
from ...heads.files import JsonObject
from .messages import REASONING_KEYS, RowError, joined, parsed, reasoning_of

log = logging.getLogger(__name__)

NOTATION = re.compile(r"""['"]text['"]\s*:|\\+["']qz|\{'qz""")
"""Signs that a value was written in the notation of Python or JSON, not as its text."""
ASKED: JsonObject = {"role": "user", "content": "qzasked"}
WORD = re.compile(r"\w+")
MOST_KNOWN = 256  # templates that are cached for each tokenizer, by their arguments
Names = list[tuple[str, str]]
"""Names of messages and of their contents in a row."""


def check_template_kwargs(
    template_kwargs: JsonObject, error: type[UserError | RowError] = UserError
) -> None:
    """Raise an `error` for arguments that are not variables of chat templates."""
    if not template_kwargs:
        return
    from transformers import PreTrainedTokenizerBase

    call = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    if wrong := sorted({"messages", *call.parameters} & template_kwargs.keys()):
        raise error(f"chat_template_kwargs: {wrong[0]} is not a variable of a chat template")


def endless(tokenizer: Any, name: str, eos_ids: frozenset[int], kwargs: JsonObject) -> str:
    """Return why replies to messages would not end where the chat template ends them.

    `eos_ids` are the tokens that end the target's generation. Empty if they end there, and for a
    target without a template; the other arguments are those of `ChatTemplate.of`.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    end_ids = ChatTemplate.of(tokenizer, name, kwargs).end_ids
    if not end_ids or eos_ids & {*end_ids}:
        return ""
    return (
        f"the chat template ends a reply with {''.join(tokenizer.convert_ids_to_tokens(end_ids))}, "
        f"which does not end generation (eos_token_id is {sorted(eos_ids)}): replies run on after "
        f"the end of their turn; add {end_ids[0]} to eos_token_id in the target's "
        "generation_config.json"
    )


class ChatTemplate:
    """A target's chat template with its arguments. `of` returns the one of a tokenizer."""

    def __init__(self, tokenizer: Any, kwargs: JsonObject) -> None:
        """`kwargs` are the template's variables."""
        self._tokenizer, self._kwargs = tokenizer, kwargs
        source = tokenizer.chat_template
        sources = source.values() if isinstance(source, dict) else [source]
        self._words = {word for one in sources for word in WORD.findall(str(one))}
        self._contents: dict[str, tuple[bool, bool]] = {}
        self.special_ids = frozenset(tokenizer.all_special_ids)

    @classmethod
    def of(cls, tokenizer: Any, name: str, kwargs: JsonObject) -> ChatTemplate:
        """Return the template of `tokenizer`, the same one for equal `kwargs`.

        `name` is the target's name in messages. Raises `UserError` for a target without a chat
        template, and `RowError` for arguments that are not variables of templates.
        """
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise UserError(
                f"target {name} has no chat template, but the data is chat-shaped; use plain "
                "`text` or `prompt`, or a target with one"
            )
        check_template_kwargs(kwargs, RowError)
        known = _KNOWN.setdefault(tokenizer, {})
        text = source if isinstance(source, str) else json.dumps(source)
        key = (text, json.dumps(kwargs, sort_keys=True, default=str) if kwargs else "")
        if key not in known:
            if len(known) == MOST_KNOWN:  # the date, for example, may differ from row to row
                del known[next(iter(known))]
            known[key] = cls(tokenizer, kwargs)
        return known[key]

    def text(
        self, messages: list[JsonObject], tools: list[JsonObject] | None, for_reply: bool
    ) -> str:
        """Return messages as text, with the generation prompt if `for_reply`.

        Raises whatever exception the template raises.
        """
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=for_reply, **self._kwargs
        )

    def reads(self, key: str) -> bool:
        """Return True if the source of the template contains the name of a message's key."""
        return key in self._words

    def prepared(self, messages: list[JsonObject]) -> list[JsonObject]:
        """Return messages in their normal form as this template takes them, as new tables."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: JsonObject) -> JsonObject:
        message = dict(message)
        if message["role"] == "developer" and not self.reads("developer"):
            message["role"] = "system"
        role, content = message["role"], message.get("content")
        if content:
            message["content"] = self._as_taken(role, content)
        if "tool_calls" in message:
            self._prepare_calls(message)
        elif content is None:
            message["content"] = ""
        key, reasoning = reasoning_of(message)
        if reasoning and key != self._reasoning_key and self._reasoning_key:
            message[self._reasoning_key] = message.pop(key)
        return message

    def _prepare_calls(self, message: JsonObject) -> None:
        as_object, with_content = self._call_form
        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            arguments = function["arguments"]
            if as_object and isinstance(arguments, str):
                function["arguments"] = _as_object(arguments)
            elif not as_object and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": function})
        message["tool_calls"] = calls
        if message.get("content") in (None, "", []):
            message.pop("content", None)
            if with_content:
                message["content"] = ""

    def _tried(
        self, messages: list[JsonObject], tools: list[JsonObject] | None = None, reply: bool = False
    ) -> str:
        """Return messages of a trial as text; the empty text if the template refuses them."""
        try:
            return self.text(messages, tools, reply)
        # A template is third-party code and may raise anything.
        except Exception:  # noqa: BLE001
            return ""

    def _trial_of(self, role: str, content: Any) -> str:
        """Return a short conversation as text in which a message of `role` has `content`."""
        message = {"role": role, "content": content}
        if role == "assistant":
            return self._tried([ASKED, message])
        if role in ("system", "developer"):
            return self._tried([message, ASKED])
        if role == "tool":
            call: JsonObject = {"role": "assistant", "tool_calls": [_trial_call()]}
            self._prepare_calls(call)
            return self._tried([ASKED, call, {**message, "tool_call_id": "qzcall123"}])
        return self._tried([message])

    def _as_taken(self, role: str, content: str | list[JsonObject]) -> str | list[JsonObject]:
        """Return a content in the form, text or parts, that the template accepts for a role."""
        if role not in self._contents:
            self._contents[role] = self._contents_of(role)
        takes_text, takes_parts = self._contents[role]
        if isinstance(content, list) and not takes_parts:
            content = joined(content, "")
        if isinstance(content, str) and not takes_text:
            return [{"type": "text", "text": content}]
        return content

    def _contents_of(self, role: str) -> tuple[bool, bool]:
        """Return whether the content of a message may be a text, and whether text parts."""
        parts = [{"type": "text", "text": word} for word in ("qzfirst", "qzsecond")]
        text = self._trial_of(role, parts)
        first, second = text.find("qzfirst"), text.find("qzsecond")
        noted = bool(NOTATION.search(text))
        as_text = "qzword" in self._trial_of(role, "qzword")
        return as_text or noted or first < 0, not noted and -1 < first < second

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """True if arguments of calls may be an object, and True if a call needs a content.

        An object is tried first, because servers parse arguments before they render them.
        """
        for as_object in (True, False):
            for with_content in (True, False):
                arguments: Any = {"qzkey": "qzvalue"}
                call = _trial_call(arguments if as_object else json.dumps(arguments))
                message: JsonObject = {"role": "assistant", "tool_calls": [call]}
                if with_content:
                    message["content"] = ""
                text = self._tried([ASKED, message])
                if "qzkey" in text and "qzvalue" in text and not NOTATION.search(text):
                    return as_object, with_content
        return True, True

    @cached_property
    def _reasoning_key(self) -> str:
        """Key of a message's reasoning that the template renders; empty if it renders none."""
        for key in REASONING_KEYS:
            message = {"role": "assistant", "content": "qzreply", key: "qzthought"}
            if "qzthought" in self._tried([ASKED, message]):
                return key
        return ""

    @cached_property
    def empty_reasoning(self) -> str:
        """The block, without white space, that the template writes for a reply without reasoning.

        Empty if it writes none. The block equals what encloses the reasoning of other replies; any
        other text before a reply (the name of a channel, for example) is the target's.
        """
        prompt = self._tried([ASKED], reply=True)
        bare = self._turn_of(prompt, {"content": "qzreply"})
        before, found, _ = bare.partition("qzreply")
        if not found or not before.strip():
            return ""
        thought = {self._reasoning_key or "reasoning_content": "qzthought", "content": "qzreply"}
        turn = self._turn_of(prompt, thought)
        around = without_space(turn.partition("qzreply")[0].replace("qzthought", "", 1))
        return around if "qzthought" in turn and without_space(before) == around else ""

    @cached_property
    def header(self) -> str:
        """The generation prompt; empty if the template rewrites the messages to add it."""
        before, prompt = self._tried([ASKED]), self._tried([ASKED], reply=True)
        return prompt[len(before) :] if before and prompt.startswith(before) else ""

    @cached_property
    def end_ids(self) -> list[int]:
        """Special tokens that the template writes after a reply."""
        turn = self._turn_of(self._tried([ASKED], reply=True), {"content": "qzreply"})
        ids = self._tokenizer(turn.partition("qzreply")[2], add_special_tokens=False)["input_ids"]
        return [token for token in ids if token in self.special_ids]

    def _turn_of(self, prompt: str, message: JsonObject) -> str:
        """Return the text that a reply adds to `prompt`; empty if the template rewrites it."""
        full = self._tried([ASKED, {"role": "assistant", **message}])
        return full[len(prompt) :] if full.startswith(prompt) else ""

    def refusal(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject] | None,
        for_reply: bool,
        names: Names,
        error: Exception,
    ) -> RowError:
        """Return the error for messages that the template cannot render, with the field's name.

        `error` is the template's exception. Its message is quoted if the template raised it, but
        not that of a library.
        """
        # `raise_exception` raises this very type; jinja's own errors are subclasses of it.
        reason = f": {str(error).strip()}" if type(error) is TemplateError else ""
        reason = " ".join(reason.split())[:200]
        if tools and self._tried(messages, None, for_reply):
            return RowError(f"tools: the chat template cannot render them{reason}")
        # the message up to which the conversation cannot be rendered, but can without it
        count = len(messages)
        while count > 1 and not self._tried(messages[: count - 1], tools):
            count -= 1
        field = names[count - 1][0]
        return RowError(f"{field}: the chat template cannot render it{reason}")


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, str], ChatTemplate]] = WeakKeyDictionary()
"""Templates by tokenizer, and by source and arguments: each is tried once."""
_BEGINNINGS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def without_space(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())


def _trial_call(arguments: Any = None) -> JsonObject:
    # nine letters and digits, which some templates demand of an id
    function = {"name": "qzname", "arguments": {} if arguments is None else arguments}
    return {"id": "qzcall123", "type": "function", "function": function}


def _as_object(arguments: str) -> JsonObject | str:
    """Return the object that a JSON text holds, or the text itself if it holds another value."""
    try:
        value = parsed(arguments)
    except RowError:
        return arguments
    return value if isinstance(value, dict) else arguments


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, with the tokenizer's beginning tokens once and no end tokens."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin = beginning(tokenizer)
    return ids if not begin or ids[: len(begin)] == begin else begin + ids


def beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer adds before every text."""
    if tokenizer not in _BEGINNINGS:
        bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        whole = list(tokenizer("a")["input_ids"])
        places = range(len(whole) - len(bare) + 1)
        start = next((i for i in places if whole[i : i + len(bare)] == bare), 0)
        _BEGINNINGS[tokenizer] = whole[:start]
    return _BEGINNINGS[tokenizer]


def refuse_rendered(text: str, tokenizer: Any) -> None:
    """Raise `RowError` for plain text that is a rendered conversation with a reply.

    Its prompts would be learned as if the target had written them. It is recognised by the
    generation prompt, if that has a special token.
    """
    if not getattr(tokenizer, "chat_template", None):
        return
    header = ChatTemplate.of(tokenizer, "", {}).header
    # A generation prompt may open the reasoning, which a text need not have.
    role = header.partition("<think>")[0].rstrip()
    if role not in text or not any(token in role for token in tokenizer.all_special_tokens):
        return
    if text.rpartition(role)[2].strip() not in ("", header[len(role) :].strip()):
        raise RowError(
            "the text is already rendered by a chat template; write its turns as messages"
        )


def warn_of_plain_text(plain: int, tokenizer: Any, path: str) -> None:
    """Warn if a chat model is given `plain` rows of a file without its chat template.

    It may answer them with an empty reply.
    """
    if plain and getattr(tokenizer, "chat_template", None):
        log.warning(
            "%s: %d rows are plain text, which the target is given as it is, without its chat "
            "template; for questions to a chat model write "
            '{"messages": [{"role": "user", "content": "..."}]}',
            path,
            plain,
        )
