"""Prompt lookup: what followed the last n tokens when they stood in the text before (Saxena,
prompt-lookup-decoding, 2023)."""

from __future__ import annotations

from ...heads.errors import UserError
from ..proposer import positive
from .lookup import LookupProposer, copy_from


class _Ngrams:
    """A text with the place after the latest earlier occurrence of each of its n-grams."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # The n-grams that end at the old end become findable only now that something follows
            # them.
            end = len(self._text)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._text[end - size : end])] = end
            self._text.append(token)

    def guess(self, length: int) -> list[int]:
        for size in self._sizes:
            if (
                size <= len(self._text)
                and (place := self._after.get(tuple(self._text[-size:]))) is not None
            ):
                return copy_from(self._text, place, length)
        return []


class NgramLookup(LookupProposer):
    """Drafts `length` tokens from the latest place where the last `longest` .. `shortest` tokens
    stood before."""

    name = "ngram"

    def __init__(self, length: int = 8, longest: int = 3, shortest: int = 1) -> None:
        super().__init__(length)
        self._span = positive("shortest", shortest), positive("longest", longest)
        if shortest > longest:
            raise UserError(f"ngram: shortest ({shortest}) must not be above longest ({longest})")

    def new_index(self) -> _Ngrams:
        return _Ngrams(*self._span)
