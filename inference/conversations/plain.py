"""Plain text as tokens: special tokens come from one place.

A tokenizer may add beginning and end tokens to every text. A prompt has the beginning alone, once;
an end belongs to what is learned, and is added there.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from .templates import ChatTemplate

log = logging.getLogger(__name__)

_BEGINNINGS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, with the beginning that the tokenizer adds to texts.

    A text that has it already gets no second one; an end that the tokenizer adds is left out.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin = beginning(tokenizer)
    return ids if not begin or ids[: len(begin)] == begin else begin + ids


def beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer adds before every text; none if it adds none.

    It is tried once for each tokenizer.
    """
    if (known := _BEGINNINGS.get(tokenizer)) is None:
        known = _BEGINNINGS[tokenizer] = _tried_beginning(tokenizer)
    return known


def _tried_beginning(tokenizer: Any) -> list[int]:
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def reply_starts(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return where replies begin in a text that the tokenizer's chat template has rendered.

    They are found by the generation prompt, if it has a special token; none without a template. The
    last may be the end of the text, which a reply would follow.
    """
    if not getattr(tokenizer, "chat_template", None):
        return []
    template = ChatTemplate.of(tokenizer, "", {})
    # A generation prompt may open the reasoning, which a text need not have.
    header = template.header.partition("<think>")[0].rstrip()
    mark = list(tokenizer(header, add_special_tokens=False)["input_ids"]) if header else []
    if not template.special_ids & {*mark}:
        return []
    line = list(tokenizer(template.header[len(header) :], add_special_tokens=False)["input_ids"])
    starts = []
    for place in range(len(ids) - len(mark) + 1):
        if ids[place] == mark[0] and ids[place : place + len(mark)] == mark:
            start = place + len(mark)
            # the line break after the role is not the target's
            starts.append(start + len(line) if line and ids[start:][: len(line)] == line else start)
    return starts


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


def prompt_of_text(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens that a plain text is as a prompt.

    Of a text that a chat template has rendered, they end where its last reply begins.
    """
    ids = plain_ids(tokenizer, text)
    starts = reply_starts(tokenizer, ids)
    return ids[: starts[-1]] if starts else ids
