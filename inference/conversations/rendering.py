"""Conversations as the target's chat template renders them, checked against their rows.

Training, `data regenerate`, evaluation, the server and the Python API all use `Rendering`, so that
they refuse the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...heads.files import JsonObject
from .formats import Conversation
from .messages import IGNORED, REASONING_KEYS, RowError, reasoning_of
from .row_texts import (
    REASONING_BEGINS,
    REASONING_ENDS,
    Passage,
    RowText,
    TextGroup,
    count_occurrences,
    missing_text_error,
    split_reasoning,
    texts_of_message,
    texts_of_tools,
)
from .rows import SourceNotes
from .templates import ChatTemplate, plain_ids, refuse_rendered

READ = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS, *IGNORED}
"""Keys of a message that are never reported as ignored."""
REWRITTEN = "the chat template leaves out the reasoning of earlier turns, as in decoding"


@dataclass
class AssistantTurn:
    """A reply in the rendering of the conversation that ends with it."""

    index: int
    """Index of its message."""
    full: str
    """The conversation up to the end of the turn, as the template writes it."""
    text: str
    """`full` without the empty block that the template writes before a reply without reasoning,
    and without what follows a cut: the target wrote neither."""
    start: int
    """Position in characters at which the target's own text begins."""
    texts_end: int
    """End of the last text of the message."""
    cut: bool
    following: str = ""
    """Text that the template writes after the turn if the conversation continues."""


class Rendering:
    """A conversation of messages with the chat template that renders it."""

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Any,
        name: str,
        notes: SourceNotes | None = None,
    ) -> None:
        """`name` is the target's name in messages; `notes` collects remarks about a source.

        Raises `UserError` for a target without a chat template, and `RowError`.
        """
        assert conversation.messages is not None
        self._conversation = conversation
        self._notes = notes or SourceNotes()
        self.template = ChatTemplate.of(tokenizer, name, conversation.template_kwargs)
        self._messages = self.template.prepared(conversation.messages)
        self._names = [conversation.path(index) for index in range(len(self._messages))]

    def prompt(self) -> str:
        """Return what is before the last reply as text, with the generation prompt.

        Raises `RowError` for a conversation that the template cannot render, or of which it leaves
        out or changes a text.
        """
        count = len(self._messages)
        while count and self._messages[count - 1]["role"] == "assistant":
            count -= 1
        if not count:
            raise RowError("no message comes before the assistant's")
        text = self._text(count, True)
        passage, tools = Passage(text, 0), texts_of_tools(self._conversation.tools)
        if self._missing(passage, 0, count) or passage.place(tools, anywhere=True):
            # A template may move a text, such as the system prompt to the last question. So each
            # text is searched for in the prompt in which its message is the last one.
            self._messages, self._names = self._messages[:count], self._names[:count]
            for _ in self.turns():
                pass
        return text

    def turns(self) -> Iterator[AssistantTurn]:
        """Yield the turns of the assistant that answer a message. Raises the errors of `prompt`.

        Messages after the last of them are checked too.
        """
        turn, asked = None, 0
        for index, message in enumerate(self._messages):
            # A greeting before all other messages does not answer a prompt.
            if message["role"] != "assistant" or index == 0:
                continue
            prompt = self._text(index, True)
            self._check_asked(asked, index, turn, prompt)
            if turn is not None:
                yield turn
            turn, asked = self._turn(index, prompt), index + 1
        if asked < len(self._messages):
            self._check_asked(asked, len(self._messages), turn, self._text(None, True))
        if turn is not None:
            yield turn

    def _text(self, count: int | None, for_reply: bool) -> str:
        """Return the first `count` messages as text. Raises `RowError`."""
        messages, tools = self._messages[:count], self._conversation.tools
        try:
            return self.template.text(messages, tools, for_reply)
        # A template is third-party code and may raise anything.
        except Exception as error:
            raise self.template.refusal(
                messages, tools, for_reply, self._names[:count], error
            ) from error

    def _texts_of(self, index: int) -> list[Any]:
        """Return the texts of a message, with its calls in the form that the template accepts."""
        assert self._conversation.messages is not None
        message = self._conversation.messages[index]
        if "tool_calls" in message:
            message = {**message, "tool_calls": self._messages[index]["tool_calls"]}
        return texts_of_message(message, *self._names[index])

    def _missing(self, passage: Passage, first: int, past: int) -> RowText | None:
        """Locate the texts of the messages from `first` to `past`; return one that is missing.

        Reasoning is ignored: templates drop that of earlier turns, and of a greeting.
        """
        for index in range(first, past):
            for group in self._texts_of(index):
                if not group.reasoning and (row_text := passage.place(group)) is not None:
                    return row_text
            self._note_unread(index, passage.text)
        return None

    def _check_asked(self, first: int, past: int, turn: AssistantTurn | None, prompt: str) -> None:
        """Raise `RowError` unless `prompt` holds the messages from `first` to `past`.

        Also sets `following` of `turn`, the reply before them.
        """
        before = "" if turn is None else turn.full
        passage = Passage(prompt, common(before, prompt))
        if turn is not None and passage.start == len(before):
            turn.following = prompt[len(before) :]
        if (row_text := self._missing(passage, first, past)) is not None:
            raise missing_text_error(row_text)
        if first == 0:
            passage.start = 0
            tools = texts_of_tools(self._conversation.tools)
            if (row_text := passage.place(tools, anywhere=True)) is not None:
                raise missing_text_error(row_text)

    def _turn(self, index: int, prompt: str) -> AssistantTurn:
        """Return the turn of a message, which answers `prompt`. Raises `RowError`."""
        message = self._messages[index]
        last = index == len(self._messages) - 1
        cut, opened = last and self._conversation.cut, prompt.rstrip().endswith(REASONING_BEGINS)
        unfinished = last and _ends_in_reasoning(message, opened and cut)
        cut = cut or unfinished
        content = message.get("content") or ""
        if unfinished and isinstance(content, str) and content:
            # As the server saw it: a template would put a block without reasoning before it.
            content = content.lstrip().removeprefix(REASONING_BEGINS) if opened else content
            full, start = prompt + content.lstrip("\n" if opened else ""), len(prompt)
        else:
            full, start = self._full(index, prompt)
        written, begin = full, common(prompt, full) if start is None else start
        groups = self._texts_of(index)
        if not any(group.reasoning for group in groups) and REASONING_ENDS not in content:
            blocks = (self.template.empty_reasoning, REASONING_BEGINS + REASONING_ENDS)
            after = max(after_block(full, begin, block) for block in blocks)
            # The template wrote it, not the target. If the prompt opens the reasoning, the reply
            # still comes after the end of it, which is context.
            written, begin = (full, after) if opened else (full[:begin] + full[after:], begin)
        passage = Passage(written, begin)
        _place_all(passage, groups)
        if start is None:
            remedy = "rows of draftsmith data regenerate are exact"
            if opened and not any(group.reasoning for group in groups):
                remedy = (
                    "it opens the reasoning: give the reply's in reasoning_content, or turn it off "
                    "with chat_template_kwargs"
                )
            raise RowError(
                f"{self._names[index][0]}: the chat template does not continue its own generation "
                f"prompt; {remedy}"
            )
        self._note_unread(index, full)
        end = passage.end
        if cut and groups:
            end += len(_trailing_space(groups[-1], written[end:]))
        return AssistantTurn(index, full, written[:end] if cut else written, begin, end, cut)

    def _full(self, index: int, prompt: str) -> tuple[str, int | None]:
        """Return the conversation up to the reply to `prompt`, and the position of that reply.

        The position is None if the rendering does not show it.
        """
        full = self._text(index + 1, False)
        # The prompt ends with the marker of the assistant's role, so the rest is the turn alone.
        start = len(prompt) if full.startswith(prompt) else None
        if start is None and (tail := self._tail(index, prompt, full)):
            return prompt + tail, len(prompt)
        return full, start

    def _tail(self, index: int, prompt: str, full: str) -> str:
        """Return a reply whose rendering rewrites what is before it; empty if it is not found.

        Harmony drops the reasoning before a call once a last reply is there, so that `full` does
        not begin with `prompt`, which is what the server saw. The reply begins after the last
        generation prompt before the place where another reply would differ.
        """
        before = self._text(index, False)
        header = prompt[len(before) :] if prompt.startswith(before) else ""
        other = {"role": "assistant", "content": "qzreply"}
        try:
            tools = self._conversation.tools
            full_of_other = self.template.text([*self._messages[:index], other], tools, False)
        except Exception:  # noqa: BLE001
            return ""
        past = common(full, full_of_other)
        start = full.rfind(header, 0, past) if header.strip() else -1
        # Before the header of an earlier reply the message that is answered would be missing.
        asked = [row_text for group in self._texts_of(index - 1) for row_text in group.texts]
        last = asked[-1] if asked else None
        if start < 0 or not isinstance(last, RowText):
            return ""
        found = 0 < count_occurrences(last, prompt) <= count_occurrences(last, full[:start])
        return full[start + len(header) :] if found else ""

    def _note_unread(self, index: int, text: str) -> None:
        """Note the keys of a message that the template ignores, by its rendering `text`."""
        message = self._messages[index]
        for key in message.keys() - READ:
            value = message[key]
            if value not in text if isinstance(value, str) else not self.template.reads(key):
                self._notes.add_unread_keys([f"{key} of messages of the {message['role']}"])

    def note_rewritten(self) -> None:
        """Note that the template leaves out reasoning of earlier turns, if these have some."""
        for message in self._messages[:-1]:
            content = message.get("content")
            thought = split_reasoning(content)[0] if isinstance(content, str) else ""
            if reasoning_of(message)[0] or thought.strip():
                self._notes.add_remark(REWRITTEN)
                return


def prompt_ids(
    conversation: Conversation, tokenizer: Any, name: str, notes: SourceNotes | None = None
) -> list[int]:
    """Return the token ids of the prompt of a conversation: everything before its last reply.

    Messages are rendered by the chat template, up to the beginning of a reply; exact tokens are
    taken up to the first span that the target wrote. `name` is the target's name in messages;
    `notes` collects remarks about a source. Raises `UserError` for messages if the target has no
    chat template, and `RowError`.
    """
    if notes is not None:
        notes.add_unread_keys(conversation.unread)
    if conversation.token_ids is not None:
        first = min(
            (start for start, _ in conversation.response_spans), default=len(conversation.token_ids)
        )
        return conversation.token_ids[:first]
    if conversation.messages is None:
        if conversation.completion is None:
            refuse_rendered(conversation.text or "", tokenizer)
        return plain_ids(tokenizer, conversation.text or "")
    text = Rendering(conversation, tokenizer, name, notes).prompt()
    # The template has written all special tokens into the text already.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def common(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def after_block(text: str, start: int, block: str) -> int:
    """Return the position in `text` after a `block` and the white space around it.

    `block` is without white space. Returns `start` if the block does not follow there.
    """
    spaced = r"\s*".join(["", *map(re.escape, block), ""])
    found = re.compile(spaced).match(text, start) if block else None
    return found.end() if found else start


def _ends_in_reasoning(message: JsonObject, opened: bool) -> bool:
    """Return True if a reply has reasoning and nothing after it.

    `opened`: the prompt opens the reasoning, and the reply was cut.
    """
    content = message.get("content") or ""
    if message.get("tool_calls") or not isinstance(content, str):
        return False
    if REASONING_ENDS in content:
        return False
    reasoning, (thought, rest) = reasoning_of(message)[0], split_reasoning(content)
    if opened and not reasoning:
        return bool(content.strip())
    return not rest.strip() and bool(thought.strip() or reasoning)


def _place_all(passage: Passage, groups: list[TextGroup]) -> None:
    """Find all texts of a reply. Raises `RowError` for the first one that is missing."""
    for group in groups:
        # Some templates write the calls of a reply before its content.
        if passage.place(group) is None or (row_text := passage.place(group, True)) is None:
            continue
        if group.reasoning:
            raise RowError(
                f"{row_text.field}: the chat template leaves out the reasoning of a reply, which "
                "would be learned as if the target wrote it without; rows of draftsmith data "
                "regenerate are exact"
            )
        raise missing_text_error(row_text)


def _trailing_space(group: TextGroup, rest: str) -> str:
    """Return the white space at the end of the last text of a group, if `rest` begins with it."""
    last = group.texts[-1]
    text = last.text if isinstance(last, RowText) else ""
    space = text[len(text.rstrip()) :]
    return space if rest.startswith(space) else ""
