"""Chat templates: from a conversation to tokens and their loss mask.

The mask is true at what the assistant wrote, the end token included. Where the chat template marks
the assistant's text (`{% generation %}`), the marks decide. Otherwise the template is rendered up
to each assistant turn and through it, and the text in between is that turn. A template that
rewrites earlier turns (it removes their reasoning, for example) cannot show several turns in one
rendering; each such turn becomes a sequence of its own, as the server saw it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...heads.errors import first_line
from ...heads.files import JsonObject
from ...inference.conversations.formats import Conversation, RowError
from ...inference.conversations.rows import template_of


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
    """Return the conversation as one or more sequences.

    `template_kwargs` are arguments of the chat template for all rows; those of the conversation
    win. Raises `RowError` for a row that the template cannot render, `UserError` for a target
    without a template.
    """
    if conversation.token_ids is not None:
        return [_from_spans(conversation.token_ids, conversation.response_spans)]
    if conversation.messages is None:
        return [_plain_text(conversation, tokenizer)]
    template = template_of(tokenizer, target_name)
    kwargs = {**template_kwargs, **conversation.template_kwargs, "tools": conversation.tools}
    try:
        if "{% generation" in template or "{%- generation" in template:
            return [_by_marks(conversation.messages, tokenizer, eos_ids, kwargs)]
        return _by_prefixes(conversation.messages, tokenizer, eos_ids, kwargs)
    except RowError:
        raise
    # A template is a program of somebody else's and may raise anything.
    except Exception as error:
        raise RowError(f"the chat template cannot render it: {first_line(error)}") from error


def _from_spans(token_ids: list[int], spans: list[tuple[int, int]]) -> Encoded:
    """Return exact tokens with the mask true in the spans [start, end)."""
    mask = [False] * len(token_ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return Encoded(token_ids, mask)


def _plain_text(conversation: Conversation, tokenizer: Any) -> Encoded:
    """Return a plain text, all of which is learned, or a prompt with its completion, which is.

    Both end with the end token, if the tokenizer has one.
    """
    ids = list(tokenizer(conversation.text)["input_ids"])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if conversation.completion is None:
        return Encoded(ids + end, [True] * len(ids + end))
    # Without special tokens: a beginning token stands before the prompt, if there is one.
    tail = [*tokenizer(conversation.completion, add_special_tokens=False)["input_ids"], *end]
    return Encoded(ids + tail, [False] * len(ids) + [True] * len(tail))


def _by_marks(
    messages: list[dict],
    tokenizer: Any,
    eos_ids: frozenset[int],
    kwargs: JsonObject,
) -> Encoded:
    """Return a conversation with the mask that the template's own marks give."""
    rendered = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    ids, mask = list(rendered["input_ids"]), [bool(m) for m in rendered["assistant_masks"]]
    # Some templates close the mark just before the end token, which the target writes too.
    for i in range(1, len(ids)):
        if mask[i - 1] and not mask[i] and ids[i] in eos_ids and ids[i - 1] not in eos_ids:
            mask[i] = True
    return Encoded(ids, mask)


def _by_prefixes(
    messages: list[dict],
    tokenizer: Any,
    eos_ids: frozenset[int],
    kwargs: JsonObject,
) -> list[Encoded]:
    """Return the sequences of a conversation, found by rendering it turn by turn.

    A turn joins the sequence before it if its prompt begins with that sequence's text, and begins a
    new one if the template has rewritten what came before. Raises `RowError` for a template whose
    rendering of a reply does not begin with its own generation prompt.
    """

    def render(count: int, for_reply: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=for_reply, **kwargs
        )

    sequences: list[tuple[str, list[tuple[int, int]]]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, full = render(i, True), render(i + 1, False)
        if not full.startswith(prompt):
            raise RowError("the chat template does not continue its own generation prompt")
        # The prompt ends with the mark of the assistant's role, so the span is the turn alone.
        span = (len(prompt), len(full))
        if sequences and prompt.startswith(sequences[-1][0]):
            # `full` begins with `prompt`, and that with the sequence so far: its spans stay where
            # they are.
            sequences[-1] = (full, [*sequences[-1][1], span])
        else:
            sequences.append((full, [span]))
    return [_mask_spans(text, spans, tokenizer, eos_ids) for text, spans in sequences]


def _mask_spans(
    text: str,
    spans: list[tuple[int, int]],
    tokenizer: Any,
    eos_ids: frozenset[int],
) -> Encoded:
    """Return the tokens of a rendered text, with the mask true in each span up to its end token.

    `spans` are [start, end) in characters. Templates may add a line break after the end token; the
    target does not write that.
    """
    # The template has written all special tokens into the text already.
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    special = set(tokenizer.all_special_ids) | eos_ids
    mask = [False] * len(ids)
    for start, end in spans:
        # A token without characters (first == past) belongs to no span.
        inside = []
        for i, (first, past) in enumerate(offsets):
            if start <= first < end and past > first:
                inside.append(i)
        last_end = max((i for i in inside if ids[i] in eos_ids), default=None)
        if last_end is None:  # the end token of a turn need not be the one that ends generation
            last_end = max((i for i in inside if ids[i] in special), default=None)
        # `is None`: an end token may be token 0. Without any, all of the span was written.
        for i in inside:
            mask[i] = last_end is None or i <= last_end
    return Encoded(ids, mask)
