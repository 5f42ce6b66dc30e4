"""Drafters without training: no drafts at all, and prompt lookup.

A lookup drafts the tokens that followed the text's end earlier in the text (Saxena,
prompt-lookup-decoding, 2023). The text is kept on the host, and chains of a few fixed lengths are
drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..base.tree_settings import positive
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from ..targets.causal_model import CausalModel
from .contract import Accepted, Prompts, StaticProposer


class PlainDecoding(StaticProposer):
    """Proposer without drafts."""

    name = "plain"
    max_drafted = 0
    traceable = True
    _shape = TreeShape.chain(0)

    def owner_of_rounds(self, target: CausalModel) -> CausalModel:
        return target  # there is nothing of its own in a round

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return DraftTree(root[:, None], self._shape)


def copy_from(text: list[int], place: int, length: int) -> list[int]:
    """Return `length` tokens of `text` from index `place` on.

    A copy that reaches the end of the text continues with what it has copied, as LZ77 does, so that
    the latest occurrence of a loop predicts as much of it as the first.
    """
    copied: list[int] = []
    for i in range(place, place + length):
        copied.append(text[i] if i < len(text) else copied[i - len(text)])
    return copied


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


class LookupProposer(StaticProposer):
    """Proposer of a chain that is looked up for each row, at most `length` tokens.

    It costs no forward pass. If nothing is found for any row, the round is plain decoding.
    """

    def __init__(self, length: int, new_index: Callable[[], Ngrams]) -> None:
        """Draft with an index for each row; `new_index` makes that of an empty text."""
        self.new_index = new_index
        self.max_drafted = self._length = positive("length", length)
        # Few lengths, so that few shapes are ever run or compiled: 0, 2, 4, 8, .. and `length`.
        self._sizes = sorted(
            {0, self._length, *(2**i for i in range(1, 12) if 2**i < self._length)}
        )
        self._rows: list[Ngrams | None] = []  # None: a row that idles

    def prefill(self, prompts: Prompts) -> None:
        self._rows = [self.new_index() for _ in prompts.tokens]
        self._extend(prompts.tokens)

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return self.chains(root, self.guesses())

    def guesses(self) -> list[list[int]]:
        """Return the tokens that are looked up for each row, none where nothing is found."""
        return [[] if row is None else row.guess(self._length) for row in self._rows]

    def chains(self, root: Tensor, guesses: list[list[int]]) -> DraftTree:
        """Return a chain for each row, with missing nodes where a row's guess is shorter."""
        longest = max(map(len, guesses))
        # There is always one: a guess has `length` tokens at most, and that is a size.
        size = min(size for size in self._sizes if size >= longest)
        if size == 0:
            return DraftTree(root[:, None], TreeShape.chain(0))
        padded = send([guess + [NO_NODE] * (size - len(guess)) for guess in guesses], root.device)
        tokens = torch.cat([root[:, None], padded], dim=1)
        return DraftTree(tokens, TreeShape.chain(size))

    def commit(self, accepted: Accepted) -> None:
        self._extend(accepted.tokens)

    def _extend(self, tokens: list[list[int]]) -> None:
        for row, new in zip(self._rows, tokens, strict=True):
            if row is not None:
                row.extend(new)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def stop(self, rows: list[int]) -> None:
        for row in rows:
            self._rows[row] = None

    def finish(self) -> None:
        self._rows = []


class NgramLookup(LookupProposer):
    """Proposer of the `length` tokens that followed the text's last tokens when they last occurred.

    The last `longest` tokens are looked up first, then fewer, down to `shortest`. Raises
    `UserError` for settings out of range.
    """

    name = kind = "ngram"

    def __init__(self, length: int = 8, longest: int = 3, shortest: int = 1) -> None:
        span = positive("shortest", shortest), positive("longest", longest)
        super().__init__(length, partial(Ngrams, *span))
        if shortest > longest:
            raise UserError(f"ngram: shortest ({shortest}) must not be above longest ({longest})")
