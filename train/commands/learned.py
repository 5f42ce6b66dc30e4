"""Rows as training sees them, with what is learned marked, for `draftsmith doctor --chat`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal

from rich.text import Text

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.fingerprint import tokenizer_hash
from ...inference.conversations.formats import conversation_of
from ...inference.conversations.rows import Notes
from ...inference.conversations.sources import rows_of
from ...inference.settings import RowSource
from ...inference.targets.target import Target
from ..data.tables import check_tokens
from ..data.templates import Encoded, encode

MOST_ROWS = 3  # of a file
BEGIN, END = "[[", "]]"  # around what is learned, where there is no colour
PROBE: JsonObject = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
}
"""Row of two replies, by which a template is tried without data."""


@dataclass
class Run:
    """Tokens that are side by side and are all learned, or all not."""

    text: str
    learned: bool


@dataclass
class ShownSequence:
    """One of the sequences that a row becomes, as text."""

    tokens: int
    learned: int
    """Number of tokens that are learned."""
    runs: list[Run]

    @classmethod
    def of(cls, encoded: Encoded, tokenizer: Any) -> ShownSequence:
        """Return a sequence as text, special tokens included."""
        marked, runs = zip(encoded.token_ids, encoded.mask, strict=True), []
        for learned, group in groupby(marked, key=lambda pair: pair[1]):
            runs.append(Run(tokenizer.decode([token for token, _ in group]), learned))
        return cls(len(encoded.token_ids), sum(encoded.mask), runs)

    def drawn(self, color: bool) -> Text:
        """Return the text with what is learned in green, or in brackets without `color`.

        Line breaks that are learned get a sign, since neither shows them.
        """
        text = Text()
        for run in self.runs:
            if run.learned:
                seen = run.text.replace("\n", "\u21b5\n")
                text.append(seen if color else f"{BEGIN}{seen}{END}", style="green")
            else:
                text.append(run.text)
        return text


def first_rows(source: str | RowSource | Literal[True]) -> list[tuple[str, Any]]:
    """Return names and values of the first rows of a source; true stands for the probe.

    Raises `UserError` for a source that cannot be read or has no rows.
    """
    rows = [("probe", PROBE)] if source is True else [*islice(rows_of(source), MOST_ROWS)]
    if not rows:
        raise UserError(f"{source} holds no rows; give at least one row")
    return rows


def sequences_of(
    row: Any, target: Target, template_kwargs: JsonObject, notes: Notes | None = None
) -> list[ShownSequence]:
    """Return the sequences that training makes of a row.

    `template_kwargs` are arguments of the chat template for all rows; `notes` get what is said once
    about a source. Raises `RowError` for a row that is malformed or that the template cannot
    render, `UserError` for a target without one.
    """
    conversation = conversation_of(row)
    check_tokens(conversation, tokenizer_hash(target.tokenizer), target.vocab_size)
    encoded = encode(
        conversation, target.tokenizer, target.eos_ids, target.name, template_kwargs, notes
    )
    return [ShownSequence.of(one, target.tokenizer) for one in encoded]
