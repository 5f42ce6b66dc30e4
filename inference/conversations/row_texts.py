"""Texts of a row, and the search for each of them in what the chat template rendered.

A template is a program: it may leave out a message of an unknown role, a call, or the tools without
raising an error. So each text of a row is searched for in the rendering, once and in order, without
regard to white space and the template's escaping. A missing text is an error that names its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...heads.files import JsonObject
from .messages import RowError, reasoning_of

SHOWN = 40  # characters of a text in a message
SWITCHES = re.compile(r"/(?:no_?think|think|system_override)\b")
"""Switches in a text that templates obey and remove (SmolLM3, Qwen3)."""
REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"  # in the content of a message
Span = tuple[int, int]
Occurrences = Callable[[str, str, int], Iterator[Span]]


@dataclass(frozen=True)
class RowText:
    """Text in a row."""

    field: str
    """Its name in the row, such as messages[0].content."""
    text: str
    scalar: bool = False
    """True for a number or Boolean, which must not be part of a longer word."""
    exact: bool = False
    """True for a text that must appear verbatim, such as arguments that are given as text."""


@dataclass
class TextGroup:
    """Texts to find in order; those of an inner list may come in any order."""

    texts: list[RowText | list[RowText]] = field(default_factory=list)
    reasoning: bool = False


@dataclass
class Passage:
    """Rendered text in which the texts of a row are located, from `start` on."""

    text: str
    start: int
    taken: list[Span] = field(default_factory=list)

    def place(self, group: TextGroup, anywhere: bool = False) -> RowText | None:
        """Locate the texts of a group after those found before, or with `anywhere` between them.

        Whole words are preferred to parts of words, unless a later text is then missing. Returns
        None, or the first missing text, in which case no text of the group is placed.
        """
        missed = self._place(group, anywhere, True)
        return None if missed is None else self._place(group, anywhere, False)

    def _place(self, group: TextGroup, anywhere: bool, whole: bool) -> RowText | None:
        before, after = len(self.taken), self.start if anywhere else self.end
        for texts in group.texts:
            unordered = texts if isinstance(texts, list) else [texts]
            # Most templates keep the order of arguments too. After the last one nothing is taken.
            first, last, here = after, after, len(self.taken)
            for row_text in unordered:
                taken = self.taken if anywhere else self.taken[here:]
                span = None
                for occurrences in (_occurrences, _loose_occurrences):
                    for begin in dict.fromkeys((last, first)):
                        blocked = taken if anywhere or begin < last else []
                        span = span or self._find(row_text, occurrences, begin, blocked, whole)
                if span is None:
                    del self.taken[before:]
                    return row_text
                self.taken.append(span)
                last = max(last, span[1])
            after = last
        return None

    def _find(
        self,
        row_text: RowText,
        occurrences: Occurrences,
        after: int,
        taken: list[Span],
        whole: bool,
    ) -> Span | None:
        """Return the first place of a text from `after` on that overlaps no span in `taken`."""
        if occurrences is _loose_occurrences and (row_text.exact or row_text.scalar):
            return None
        for spelling in _spellings(row_text):
            other = None
            for span in occurrences(self.text, spelling, after):
                if any(span[0] < end and start < span[1] for start, end in taken):
                    continue
                if not (whole or row_text.scalar) or _stands_alone(self.text, *span):
                    return span
                other = other or span
            if other is not None and not row_text.scalar:
                return other
        return None

    @property
    def end(self) -> int:
        """End of the last text that was found, else `start`."""
        return max((end for _, end in self.taken), default=self.start)


def texts_of_message(message: JsonObject, name: str, content_name: str) -> list[TextGroup]:
    """Return the texts of a message in its normal form: reasoning, content and calls.

    `name` and `content_name` are the names of the message and of its content in the row.
    """
    groups = []
    key, reasoning = reasoning_of(message)
    content = message.get("content") or ""
    if reasoning:
        groups.append(TextGroup([RowText(f"{name}.{key}", reasoning)], reasoning=True))
    elif message["role"] == "assistant" and isinstance(content, str):
        thought, content = split_reasoning(content)
        if thought.strip():
            groups.append(TextGroup([RowText(content_name, thought)], reasoning=True))
    if isinstance(content, str):
        texts = [RowText(content_name, content)]
    else:
        texts = [RowText(f"{content_name}[{i}]", part["text"]) for i, part in enumerate(content)]
    groups.append(TextGroup([row_text for row_text in texts if row_text.text.strip()]))
    calls: list[RowText | list[RowText]] = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, path = call["function"], f"{name}.tool_calls[{number}].function"
        calls.append(RowText(f"{path}.name", function["name"]))
        arguments, path = function["arguments"], f"{path}.arguments"
        kept = isinstance(arguments, str)
        calls.append(
            [RowText(path, arguments, exact=True)] if kept else [*_leaves(arguments, path)]
        )
    groups.append(TextGroup(calls))
    return [group for group in groups if group.texts]


def texts_of_tools(tools: list[JsonObject] | None) -> TextGroup:
    """Return the names and descriptions of tools."""
    texts: list[RowText | list[RowText]] = []
    for number, tool in enumerate(tools or ()):
        function = tool["function"]
        texts.append(
            [
                RowText(f"tools[{number}].function.{key}", function[key])
                for key in ("name", "description")
                if isinstance(function.get(key), str) and function[key].strip()
            ]
        )
    return TextGroup(texts)


def split_reasoning(content: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a reply's content, and the rest.

    If a reply ends within its reasoning, all of its content is reasoning.
    """
    head, ends, rest = content.partition(REASONING_ENDS)
    # If the prompt contains the opening mark, the reply has only the closing one.
    if REASONING_BEGINS in head and not head.lstrip().startswith(REASONING_BEGINS):
        return "", content
    if not ends:
        begun = head.lstrip().startswith(REASONING_BEGINS)
        return (head.lstrip().removeprefix(REASONING_BEGINS), "") if begun else ("", content)
    return head.split(REASONING_BEGINS)[-1], rest


def count_occurrences(row_text: RowText, text: str) -> int:
    """Return how often a text occurs in a rendered text, in the first spelling that occurs."""
    escaped = json.dumps(row_text.text.strip(), ensure_ascii=False)[1:-1]
    return next(filter(None, map(text.count, (*_spellings(row_text), escaped))), 0)


def missing_text_error(row_text: RowText) -> RowError:
    """Return the error for a text that the template leaves out."""
    text = " ".join(row_text.text.split())
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
    return RowError(f"{row_text.field}: the chat template leaves out or changes {shown!r}")


def _leaves(value: Any, path: str) -> Iterator[RowText]:
    """Yield the keys and values of a call's arguments."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.strip():
                yield RowText(f"{path}.{key}", key)
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    elif isinstance(value, str):
        if value.strip():
            yield RowText(path, value)
    elif value is not None:
        yield RowText(path, json.dumps(value), scalar=True)


def _spellings(row_text: RowText) -> Iterator[str]:
    """Yield the ways in which templates write a text: verbatim, or as JSON in ASCII."""
    text = row_text.text.strip()
    yield text
    if row_text.scalar:
        yield {"true": "True", "false": "False"}.get(text, text)
    if row_text.scalar or row_text.exact:
        return
    for other in (json.dumps(text)[1:-1], SWITCHES.sub("", text).strip()):
        if other and other != text:
            yield other


def _occurrences(text: str, spelling: str, after: int) -> Iterator[Span]:
    """Yield the places of a spelling from `after` on."""
    found = text.find(spelling, after)
    while found >= 0:
        yield found, found + len(spelling)
        found = text.find(spelling, found + 1)


SPACE = r"(?:\s|\\[nrtf])+"  # literal or escaped
ESCAPES = {
    "'": r"(?:\\?'|&#39;|&#x27;|&apos;)", '"': r'(?:\\?"|&quot;|&#34;)', "\\": r"\\{1,2}",
    "&": "&(?:amp;)?", "<": "(?:<|&lt;|\\\\u003c)", ">": "(?:>|&gt;|\\\\u003e)",
}  # fmt: skip
"""Patterns of characters that JSON, Python, XML or templates escape."""


def _loose_occurrences(text: str, spelling: str, after: int) -> Iterator[Span]:
    """Yield the places of a spelling with other white space or escaped characters."""
    words = ("".join(ESCAPES.get(c) or re.escape(c) for c in word) for word in spelling.split())
    for match in re.compile(SPACE.join(words)).finditer(text, after):
        yield match.span()


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return True if a span neither begins nor ends within a word."""
    before = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    after = end < len(text) and text[end].isalnum() and text[end - 1].isalnum()
    return not (before or after)
