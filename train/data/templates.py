"""Chat templates: from a conversation to tokens and their loss mask.

The mask is true at what the assistant wrote, the end token included. Each turn of the assistant is
taken from the rendering in which it is the last, as the server saw it: what the rendering through
the turn has after that up to the turn with the generation prompt. Where a template does not
continue its own generation prompt, its marks (`{% generation %}`) say where the turn begins. A turn
after which a template rewrites earlier ones (it removes their reasoning, for example) begins a
sequence of its own.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ...heads.errors import first_line
from ...heads.files import JsonObject
from ...inference.conversations.formats import Conversation, RowError
from ...inference.conversations.rows import template_of

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its reasoning, by the names that servers and templates use."""
REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"  # in the content of a message


Span = tuple[int, int, str]
"""Start and end of a turn in a rendered text, in characters, and the content of its message."""


@dataclass
class Encoded:
    """Tokens of a document with their loss mask, of the same length."""

    token_ids: list[int]
    mask: list[bool]
    """True where the target wrote."""


def encode(
    conversation: Conversation,
    tokenizer: Any,
    eos_ids: frozenset[int],
    target_name: str,
    template_kwargs: JsonObject,
) -> list[Encoded]:
    """Return the conversation as one or more sequences; none if there is no reply.

    `template_kwargs` are arguments of the chat template for all rows; those of the conversation
    win. Raises `RowError` for a row that the template cannot render, `UserError` for a target
    without a template.
    """
    if (token_ids := conversation.token_ids) is not None:
        mask = [False] * len(token_ids)
        for start, end in conversation.response_spans:
            mask[start:end] = [True] * (end - start)
        return [Encoded(token_ids, mask)]
    if conversation.messages is None:
        return [_plain_text(conversation, tokenizer)]
    template_of(tokenizer, target_name)
    given = conversation.with_arguments(template_kwargs).template_kwargs
    kwargs = {**given, "tools": conversation.tools}
    try:
        rendering = _Rendering(conversation.messages, tokenizer, kwargs)
        return _by_turns(rendering, eos_ids, conversation.cut)
    except RowError:
        raise
    # A template is a program of somebody else's and may raise anything.
    except Exception as error:
        raise RowError(f"the chat template cannot render it: {first_line(error)}") from error


def has_marks(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template marks what the assistant wrote."""
    # A tokenizer may have several templates by name, which are a table.
    return isinstance(tokenizer.chat_template, str) and bool(MARKS.search(tokenizer.chat_template))


def _plain_text(conversation: Conversation, tokenizer: Any) -> Encoded:
    """Return a plain text, all of which is learned, or a prompt with its completion, which is.

    Both end with the end token, if the tokenizer has one and the text was not cut short.
    """
    ids = list(tokenizer(conversation.text)["input_ids"])
    ended = tokenizer.eos_token_id is not None and not conversation.cut
    end = [tokenizer.eos_token_id] if ended else []
    if conversation.completion is None:
        return Encoded(ids + end, [True] * len(ids + end))
    # Without special tokens: a beginning token comes before the prompt, if there is one.
    tail = [*tokenizer(conversation.completion, add_special_tokens=False)["input_ids"], *end]
    return Encoded(ids + tail, [False] * len(ids) + [True] * len(tail))


@dataclass
class _Rendering:
    """Messages with the chat template that renders them."""

    messages: list[JsonObject]
    tokenizer: Any
    kwargs: JsonObject
    """Arguments of the chat template."""

    def text(self, count: int, for_reply: bool) -> str:
        """Return the first `count` messages as text, with the generation prompt if `for_reply`."""
        return self.tokenizer.apply_chat_template(
            self.messages[:count], tokenize=False, add_generation_prompt=for_reply, **self.kwargs
        )

    def marked_start(self, turn: int, prompt: str, full: str) -> int | None:
        """Return where in `full` a turn begins by the template's marks; None if they do not tell.

        `turn` is the index of its message, `full` the text through it, `prompt` the text up to it
        with the generation prompt. What both have of the assistant's header is no part of the turn,
        even where it is marked.
        """
        before = self.text(turn, False)
        # Marks of rewritten messages could be taken for those of the turn.
        if not full.startswith(before):
            return None
        rendered = self.tokenizer.apply_chat_template(
            self.messages[: turn + 1],
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
            **self.kwargs,
        )
        mask, offsets = rendered["assistant_masks"], rendered["offset_mapping"]
        marked = [first for on, (first, _) in zip(mask, offsets, strict=True) if on]
        start = next((first for first in marked if first >= len(before)), None)
        if start is None:
            return None
        header = self._shared(prompt.removeprefix(before), full[len(before) :])
        return max(start, len(before) + header)

    def _shared(self, header: str, turn: str) -> int:
        """Return how many characters of the assistant's header `turn` begins with."""
        shared = header[: _common(header, turn)]
        if shared == header:
            return len(header)
        # Of a header that goes on otherwise (it opens the reasoning, for example), whole parts: a
        # reply may begin with the same sign as the rest of it.
        parts = "|".join(re.escape(part) for part in ("\n", *self.tokenizer.all_special_tokens))
        return max((found.end() for found in re.finditer(parts, shared)), default=0)


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common from their beginning on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _by_turns(rendering: _Rendering, eos_ids: frozenset[int], cut: bool) -> list[Encoded]:
    """Return the sequences of a conversation, found by rendering it turn by turn.

    `cut`: the last reply has no end. Raises `RowError` for a turn of which neither prefixes nor
    marks tell where it begins, and for one without its reasoning.
    """
    sequences: list[tuple[str, list[Span]]] = []
    marked = has_marks(rendering.tokenizer)
    for i, message in enumerate(rendering.messages):
        # A greeting that is before everything answers no prompt.
        if message["role"] != "assistant" or i == 0:
            continue
        prompt, full = rendering.text(i, True), rendering.text(i + 1, False)
        # The prompt ends with the mark of the assistant's role, so the span is the turn alone.
        start = len(prompt) if full.startswith(prompt) else None
        if start is None and marked:
            start = rendering.marked_start(i, prompt, full)
        written = full[_common(prompt, full) if start is None else start :]
        if any(part not in _words(written) for part in _reasoning_of(message)):
            raise RowError(
                "the chat template leaves out the reasoning of a reply, which would be learned as "
                "if the target wrote it without; rows of draftsmith data regenerate are exact"
            )
        if start is None:
            raise RowError("the chat template does not continue its own generation prompt")
        span = (start, len(full), _content_of(message))
        if sequences and start >= len(sequences[-1][0]) and full.startswith(sequences[-1][0]):
            # Its spans stay where they are.
            sequences[-1] = (full, [*sequences[-1][1], span])
        else:
            sequences.append((full, [span]))
    encoded = []
    for number, (text, spans) in enumerate(sequences, 1):
        last_cut = cut and number == len(sequences)
        encoded.append(_mask_spans(text, spans, rendering.tokenizer, eos_ids, last_cut))
    return encoded


def _reasoning_of(message: JsonObject) -> list[str]:
    """Return the words of a message's reasoning, in a key of its own or first in its content."""
    parts = [message.get(key) for key in REASONING_KEYS]
    head, ends, _ = _content_of(message).partition(REASONING_ENDS)
    # Whoever prompts with the first mark gets replies that have only the second.
    if ends and (REASONING_BEGINS not in head or head.lstrip().startswith(REASONING_BEGINS)):
        parts.append(head.split(REASONING_BEGINS)[-1])
    return [_words(part) for part in parts if isinstance(part, str)]


def _words(text: str) -> str:
    """Return a text with single spaces for all white space, which templates may change."""
    return " ".join(text.split())


def _content_of(message: JsonObject) -> str:
    """Return the content of a message as text; the empty text where it is none."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _mask_spans(
    text: str, spans: list[Span], tokenizer: Any, eos_ids: frozenset[int], cut: bool
) -> Encoded:
    """Return the tokens of a rendered text, with the mask true where the target wrote.

    `cut`: the last of the turns `spans` has no end.
    """
    # The template has written all special tokens into the text already.
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    special = set(tokenizer.all_special_ids) | eos_ids
    mask = [False] * len(ids)
    for number, (start, end, content) in enumerate(spans, 1):
        # A token without characters (first == past) belongs to no span.
        inside = [i for i, (first, past) in enumerate(offsets) if start <= first < min(end, past)]
        tokens = [(ids[i], text[slice(*offsets[i])]) for i in inside]
        last_cut = cut and number == len(spans)
        written = _written(tokens, content.strip(), eos_ids, special, last_cut)
        for i in inside[:written]:
            mask[i] = True
    return Encoded(ids, mask)


def _written(
    tokens: list[tuple[int, str]],
    content: str,
    eos_ids: frozenset[int],
    special: set[int],
    cut: bool,
) -> int:
    """Return how many of a turn's tokens (id and text) the target wrote, from the first on.

    Up to its end token, without it if the turn was `cut` short. Templates may add a line break
    after the end token, or the end token of texts; the target does not write those. An end token
    with more of the message's `content` after it is part of the reply.
    """
    # The end token of a turn need not be one that ends generation.
    for ends in (eos_ids, special):
        end = max((i for i, (token, _) in enumerate(tokens) if token in ends), default=None)
        rest = "" if end is None else "".join(text for _, text in tokens[end + 1 :]).strip()
        if end is None or (rest and content.endswith(rest)):
            continue
        # Of several at the end, the first.
        while ends is eos_ids and (before := _end_before(tokens, end, ends)) is not None:
            end = before
        return end if cut else end + 1
    body = len(tokens)
    while cut and body and not tokens[body - 1][1].strip():
        body -= 1  # a line break of the template's
    return body


def _end_before(tokens: list[tuple[int, str]], end: int, ends: Set[int]) -> int | None:
    """Return the end token before that at `end`, if there is only white space between them."""
    place = end - 1
    while place >= 0 and tokens[place][0] not in ends and not tokens[place][1].strip():
        place -= 1
    return place if place >= 0 and tokens[place][0] in ends else None
