"""Choice of a row's drafts: those of a lookup, or those of a trained drafter.

Whatever is drafted, the text shows later how many tokens a lookup would have had right, so that
every lookup is counted, used or not. A drafter's tree is counted where it was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .lookup import copy_from
from .ngram import Ngrams

LONGEST_MATCH = 16
"""Tokens of a match that are counted: longer matches are as good."""
MARGIN = 1.15
"""Least ratio of a lookup's tokens to those of a round with a tree: trained drafters copy too, so
that they draft better than on average where the text repeats, which is where there is a lookup."""
PRIOR_ROUNDS = 3
"""Rounds that the held-out tokens of a drafter count for."""
LATELY = 8
"""Rounds over which the later ones weigh most: each new one has at least a share of 1 / LATELY."""


@dataclass
class Mean:
    """Running mean of the tokens of a round, the latest rounds first."""

    value: float
    """Infinite before the first round, where nothing is known."""
    rounds: int = 0
    """Rounds that the value counts for."""

    def add(self, tokens: int) -> None:
        self.rounds += 1
        if self.rounds == 1:
            self.value = float(tokens)
        else:
            self.value += (tokens - self.value) / min(self.rounds, LATELY)


def first_of_lookups() -> list[Mean]:
    """Return the means of lookups after a match of 1, 2 to 3, 4 to 7, 8 to 15, 16 tokens and more.

    Nothing is known of a text yet, so that a copy is taken to go on for half as long as it has
    lasted, like anything whose end is not known. That counts for one round.
    """
    return [Mean(1 + 2**kind / 2, 1) for kind in range(LONGEST_MATCH.bit_length())]


@dataclass
class Open:
    """Looked-up chain of which the text has not shown yet how much is right."""

    kind: int
    chain: list[int]
    right: int = 0

    def compare(self, tokens: list[int]) -> int | None:
        """Compare the chain with the tokens that follow; return its right tokens once known."""
        for token in tokens:
            if self.chain[self.right] != token:
                return self.right
            self.right += 1
            if self.right == len(self.chain):
                return self.right
        return None


@dataclass
class BetterSource:
    """Text of one row, and which drafts are better at its end.

    There is a lookup where the last `shortest` tokens occurred before; its match is what the
    text's end has in common with the latest such place.
    """

    shortest: int
    prior: float | None = None
    """Tokens of a round with a tree on held-out texts; None where they are not known: a row's first
    round then has a tree, which is counted."""
    lookups: list[Mean] = field(default_factory=first_of_lookups)
    _open: list[Open] = field(default_factory=list)
    _drafted: bool | None = None
    """True after a round with a tree, False after one with a lookup, None before the first."""

    def __post_init__(self) -> None:
        self.trees = Mean(math.inf) if self.prior is None else Mean(self.prior, PRIOR_ROUNDS)
        self._index = Ngrams(self.shortest, self.shortest)

    def extend(self, tokens: list[int]) -> None:
        """Append the tokens of a round, or at first the prompt, to the text."""
        if self._drafted:
            self.trees.add(len(tokens))
        remaining = []
        for chain in self._open:
            right = chain.compare(tokens)
            if right is None:
                remaining.append(chain)
            else:
                self.lookups[chain.kind].add(right + 1)
        self._open = remaining
        self._index.extend(tokens)

    def guess(self, length: int) -> list[int]:
        """Return the `length` tokens of a lookup if it is the better source, else none."""
        self._drafted = True
        place = self._index.place()
        if place is None:
            return []
        kind = self.match(place).bit_length() - 1
        chain = copy_from(self._index.text, place, length)
        self._open.append(Open(kind, chain))
        if self.lookups[kind].value <= MARGIN * self.trees.value:
            return []
        self._drafted = False
        return chain

    def match(self, place: int) -> int:
        """Return the tokens before `place` that are those at the text's end."""
        text, most = self._index.text, min(place, LONGEST_MATCH)
        for same in range(self.shortest, most):
            if text[place - 1 - same] != text[-1 - same]:
                return same
        return most
