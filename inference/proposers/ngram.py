"""Prompt lookup: drafts of the tokens that followed the text's last n-gram earlier in the text.

Saxena, prompt-lookup-decoding, 2023.
"""

from __future__ import annotations

from functools import partial

from ...heads.errors import UserError
from ..tree_settings import positive
from .lookup import LookupProposer, copy_from


class Ngrams:
    """Text with the index after the latest earlier occurrence of each of its n-grams.

    n-grams have `shortest` to `longest` tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        # The longest first, and `shortest` among them: 3, 2, 1 for longest 3 and shortest 1.
        self._sizes = range(longest, shortest - 1, -1)
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # The n-grams that end at the old end are entered only now that a token follows them.
            # Earlier, the text's end would be found as its own earlier occurrence.
            end = len(self.text)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self.text[end - size : end])] = end
            self.text.append(token)

    def place(self) -> int | None:
        """Return the index of the token after the longest n-gram at the end, None for none."""
        for size in self._sizes:
            if size > len(self.text):
                continue
            start = self._after.get(tuple(self.text[-size:]))
            if start is not None:
                return start
        return None

    def guess(self, length: int) -> list[int]:
        """Return `length` tokens that followed the longest n-gram at the end; none if none did."""
        start = self.place()
        return [] if start is None else copy_from(self.text, start, length)


class NgramLookup(LookupProposer):
    """Proposer of the `length` tokens that followed the text's last tokens when they last occurred.

    The last `longest` tokens are looked up first, then fewer, down to `shortest`. Raises
    `UserError` for settings out of range.
    """

    name = "ngram"

    def __init__(self, length: int = 8, longest: int = 3, shortest: int = 1) -> None:
        span = positive("shortest", shortest), positive("longest", longest)
        super().__init__(length, partial(Ngrams, *span))
        if shortest > longest:
            raise UserError(f"ngram: shortest ({shortest}) must not be above longest ({longest})")
