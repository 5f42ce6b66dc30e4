"""Encoding of a conversation as tokens with a loss mask.

The mask is true at the assistant's text, the end token included. Each of its turns is taken from
the rendering in which it is the last one, as the server saw it: the part after the rendering of the
earlier turns with the generation prompt. If a template rewrites earlier turns (removes their
reasoning, for example), a new sequence begins.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ...heads.files import JsonObject
from ...inference.conversations.formats import Conversation
from ...inference.conversations.messages import RowError
from ...inference.conversations.rendering import AssistantTurn, Rendering
from ...inference.conversations.rows import SourceNotes
from ...inference.conversations.templates import (
    beginning,
    endless,
    plain_ids,
    refuse_rendered,
)

MARKED = (
    "the plain text holds special tokens, as a rendered text does, and all of it is learned; write "
    "conversations as messages"
)


@dataclass
class Encoded:
    """Tokens of a document with their loss mask, of the same length."""

    token_ids: list[int]
    mask: list[bool]
    """True at tokens of the target."""


@dataclass
class RenderedSequence:
    """Rendered text with the turns in it that are learned."""

    text: str
    turns: list[AssistantTurn] = field(default_factory=list)


def encode(
    conversation: Conversation,
    tokenizer: Any,
    eos_ids: frozenset[int],
    target_name: str,
    template_kwargs: JsonObject,
    notes: SourceNotes | None = None,
) -> list[Encoded]:
    """Return the sequences of a conversation, an empty list without replies.

    `template_kwargs` are arguments of the chat template for all rows; those of the conversation
    win. `notes` collect the remarks about a source. Raises `RowError` for a row that the template
    cannot render or of which it leaves out a text, `UserError` for a target without a template.
    """
    notes = notes or SourceNotes()
    notes.add_unread_keys(conversation.unread)
    if (token_ids := conversation.token_ids) is not None:
        mask = [False] * len(token_ids)
        for start, end in conversation.response_spans:
            mask[start:end] = [True] * (end - start)
        return [Encoded(token_ids, mask)]
    if conversation.messages is None:
        return [_plain_text(conversation, tokenizer, eos_ids, notes)]
    given = conversation.with_arguments(template_kwargs)
    if given.end_token is not None and given.end_token not in eos_ids:
        given.cut = True  # it ended with the client's stop token
    rendering = Rendering(given, tokenizer, target_name, notes)
    if why := endless(tokenizer, target_name, eos_ids, given.template_kwargs):
        notes.add_remark(why)
    sequences: list[RenderedSequence] = []
    for turn in rendering.turns():
        if turn.index in conversation.not_learned:
            continue
        last = sequences[-1] if sequences else None
        # The spans of a text stay where they are when it continues.
        if last is None or turn.start < len(last.text) or not turn.text.startswith(last.text):
            if last is not None:
                rendering.note_rewritten()
            sequences.append(last := RenderedSequence(""))
        last.text = turn.text
        last.turns.append(turn)
    special = rendering.template.special_ids
    encoded = [_masked(sequence, tokenizer, eos_ids, special) for sequence in sequences]
    last = len(conversation.messages) - 1
    if sequences and conversation.end_token in eos_ids and sequences[-1].turns[-1].index == last:
        assert conversation.end_token is not None
        encoded[-1] = _end_with(conversation.end_token, encoded[-1], eos_ids)
    return encoded


def _plain_text(
    conversation: Conversation, tokenizer: Any, eos_ids: frozenset[int], notes: SourceNotes
) -> Encoded:
    """Return a plain text, all of which is learned, or a prompt with its completion.

    Both end with the end token, if the tokenizer has one and the text was not cut short. Raises
    `RowError` for a text that a chat template has rendered.
    """
    ids = plain_ids(tokenizer, conversation.text or "")
    learned = not conversation.learns_nothing()
    begin = len(beginning(tokenizer))
    if conversation.completion is None:
        refuse_rendered(conversation.text or "", tokenizer)
        if not {*tokenizer.all_special_ids}.isdisjoint(ids[begin:-1]) and tokenizer.chat_template:
            notes.add_remark(MARKED)
    # Without special tokens, since a beginning token would come before the prompt.
    tail = []
    if conversation.completion is not None:
        tail = [*tokenizer(conversation.completion, add_special_tokens=False)["input_ids"]]
    end = tokenizer.eos_token_id
    if eos_ids and end not in eos_ids:
        end = min(eos_ids)  # what ends the target's generation
    written = ids + tail
    ended = bool(written) and (written[-1] in eos_ids or written[-1] == end)
    if end is not None and not (conversation.cut or ended):
        tail.append(end)
    whole = conversation.completion is None and learned
    mask = [whole and place >= begin for place in range(len(ids))]
    return Encoded(ids + tail, mask + [learned] * len(tail))


def _masked(
    sequence: RenderedSequence, tokenizer: Any, eos_ids: frozenset[int], special: frozenset[int]
) -> Encoded:
    """Return the tokens of a rendered text with their mask.

    `special` are tokens that may end a turn although they do not end generation.
    """
    ids, offsets = _tokens(sequence, tokenizer)
    starts = [start for start, _ in offsets]
    mask = [False] * len(ids)
    for turn in sequence.turns:
        first, past = bisect_left(starts, turn.start), bisect_left(starts, len(turn.text))
        said = bisect_left(starts, turn.texts_end)
        closing, ended = _closing(ids[said:past], eos_ids, special)
        if closing is None:
            rest = [sequence.text[slice(*offsets[i])] for i in range(said, past)]
            closing = max((i + 1 for i, text in enumerate(rest) if text.strip()), default=0)
        # If a template does not end a turn, the next turn's first token may be its end token.
        if not ended and not turn.cut and said + closing == past:
            if past == len(ids) and turn.following:
                ids += tokenizer(turn.following, add_special_tokens=False)["input_ids"][:1]
                offsets.append((len(sequence.text), len(sequence.text) + 1))
                mask.append(False)
            closing += past < len(ids) and ids[past] in eos_ids
        # A token without characters before a turn is not a part of it; within a turn it is white
        # space of a tokenizer that trims its offsets.
        while first < said + closing and offsets[first][0] == offsets[first][1]:
            first += 1
        mask[first : said + closing] = [True] * (said + closing - first)
    # A server neither reads nor writes the template's text after the last end token.
    past = max((i + 1 for i, on in enumerate(mask) if on), default=len(mask))
    return Encoded(ids[:past], mask[:past])


def _closing(
    rest: list[int], eos_ids: frozenset[int], special: frozenset[int]
) -> tuple[int | None, bool]:
    """Return the number of tokens of the target after a reply's last text, and whether it ended.

    They are those up to the end token, after which templates may add a line break or the end token
    of texts. The number is None without an end token.
    """
    for i, token in enumerate(rest):
        if token in eos_ids:
            return i + 1, True
    # The end token of a turn may be one that does not end generation.
    for i, token in reversed([*enumerate(rest)]):
        if token in special:
            return i + 1, True
    return None, False


def _end_with(token: int, encoded: Encoded, eos_ids: frozenset[int]) -> Encoded:
    """Return the sequence with the end token of the server after its last reply."""
    last = len(encoded.mask) - 1
    written = max((i for i, on in enumerate(encoded.mask) if on), default=last)
    if encoded.mask[written] and encoded.token_ids[written] in eos_ids:
        written -= 1
    ids, mask = encoded.token_ids[: written + 1], encoded.mask[: written + 1]
    return Encoded([*ids, token], [*mask, True])


def _tokens(sequence: RenderedSequence, tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a rendered text, each with its start and end in characters.

    Without offsets of the tokenizer the text between the borders of turns is encoded piece by
    piece, and each token has the start and end of its piece. Raises `RowError` if a token crosses a
    border.
    """
    # All special tokens are in the text already.
    text = sequence.text
    if tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["input_ids"]), encoding["offset_mapping"]
    borders = {border for t in sequence.turns for border in (t.start, t.texts_end, len(t.text))}
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for start, end in pairwise(sorted({0, len(text), *borders})):
        piece = list(tokenizer(text[start:end], add_special_tokens=False)["input_ids"])
        ids += piece
        offsets += [(start, end)] * len(piece)
    if ids != list(tokenizer(text, add_special_tokens=False)["input_ids"]):
        raise RowError(
            "the target's tokenizer gives no character offsets, and a token crosses the border of "
            "a turn; rows of draftsmith data regenerate are exact"
        )
    return ids, offsets


def cut_replies(cut: int, replies: int) -> str:
    """Return a warning if a limit of tokens cut more than half of the replies, else ""."""
    if 2 * cut <= replies:
        return ""
    return (
        f"{cut} of {replies} replies were cut before their end, and no end token will be learned "
        "from them; raise --max-new-tokens and write them again"
    )
