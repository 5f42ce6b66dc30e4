"""Base of the drafters that look up in the text so far how it may go on.

They keep the text on the host and draft chains of a few fixed lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..proposer import Accepted, Prompts, Proposer
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from ..tree_settings import positive


class Index(Protocol):
    """Text of one request, in a form in which its end can be found earlier in it."""

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""

    def guess(self, length: int) -> list[int]:
        """Return at most `length` tokens that followed the text's own end earlier in it."""
        ...


class NoText:
    """Index of a row that idles."""

    def extend(self, tokens: list[int]) -> None: ...

    def guess(self, length: int) -> list[int]:
        return []


def copy_from(text: list[int], place: int, length: int) -> list[int]:
    """Return `length` tokens of `text` from index `place` on.

    A copy that reaches the end of the text goes on with what it has copied, as LZ77 does, so that
    the latest occurrence of a loop predicts as much of it as the first.
    """
    copied: list[int] = []
    for i in range(place, place + length):
        copied.append(text[i] if i < len(text) else copied[i - len(text)])
    return copied


class LookupProposer(Proposer):
    """Proposer of a chain that is looked up for each row, at most `length` tokens.

    It costs no forward pass. If nothing is found for any row, the round is plain decoding.
    """

    def __init__(self, length: int, new_index: Callable[[], Index]) -> None:
        """Draft with an index for each row; `new_index` makes that of an empty text."""
        self.new_index = new_index
        self.max_drafted = self._length = positive("length", length)
        # Few lengths, so that few shapes are ever run or compiled: 0, 2, 4, 8, .. and `length`.
        self._sizes = sorted(
            {0, self._length, *(2**i for i in range(1, 12) if 2**i < self._length)}
        )
        self._rows: list[Index] = []

    def prefill(self, prompts: Prompts) -> None:
        self._rows = [self.new_index() for _ in prompts.tokens]
        for row, tokens in zip(self._rows, prompts.tokens, strict=True):
            row.extend(tokens)

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return self.chains(root, self.guesses())

    def guesses(self) -> list[list[int]]:
        """Return the tokens that are looked up for each row, none where nothing is found."""
        return [row.guess(self._length) for row in self._rows]

    def chains(self, root: Tensor, guesses: list[list[int]]) -> DraftTree:
        """Return a chain for each row, with missing nodes where a row's guess is shorter."""
        longest = max(map(len, guesses))
        # There is always one: a guess has `length` tokens at most, and that is a size.
        size = min(size for size in self._sizes if size >= longest)
        # The text is all that these drafts depend on: they are never `informed` of the noise.
        if size == 0:
            return DraftTree(root[:, None], TreeShape.chain(0), informed=False)
        padded = send([guess + [NO_NODE] * (size - len(guess)) for guess in guesses], root.device)
        tokens = torch.cat([root[:, None], padded], dim=1)
        return DraftTree(tokens, TreeShape.chain(size), informed=False)

    def commit(self, accepted: Accepted) -> None:
        for row, tokens in zip(self._rows, accepted.tokens, strict=True):
            row.extend(tokens)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def stop(self, rows: list[int]) -> None:
        for row in rows:
            self._rows[row] = NoText()

    def finish(self) -> None:
        self._rows = []
