"""Choice of a row's drafts: those of a lookup, or those of a trained drafter.

Whatever is drafted, the text shows later how many tokens a lookup would have had right, so that
every lookup is counted, used or not. A drafter's tree is counted where it was used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ngram import Ngrams, copy_from

LONGEST_MATCH = 16
"""Tokens of a match that are counted: longer matches are as good."""
FIRST_OF_TREES = 2.5
"""Tokens of a round with a tree before any was seen, as the drafter in scripts/smollm2 has on
validation replies."""
FIRST_OF_LOOKUPS = (1.5, 2.6, 4.0, 5.9, 7.5)
"""The same of a lookup after a match of 1, 2 to 3, 4 to 7, 8 to 15, 16 and more tokens, as in the
replies of SmolLM2-135M (scripts/smollm2)."""
MARGIN = 1.15
"""Least ratio of a lookup's tokens to those of a round with a tree: trained drafters copy too, and
draft better than on average where the text repeats (EXPERIMENTS.md, 2026-11-29)."""
WORTH = 3
"""Rounds that a first value counts for."""
LATELY = 8
"""Rounds over which the later ones weigh most: each new one has at least a share of 1 / LATELY."""


@dataclass
class Mean:
    """Running mean of the tokens of a round, the latest rounds first."""

    value: float
    rounds: int = WORTH

    def add(self, tokens: int) -> None:
        self.rounds += 1
        self.value += (tokens - self.value) / min(self.rounds, LATELY)


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
    trees: Mean = field(default_factory=lambda: Mean(FIRST_OF_TREES))
    lookups: list[Mean] = field(default_factory=lambda: [Mean(x) for x in FIRST_OF_LOOKUPS])
    _open: list[Open] = field(default_factory=list)
    _drafted: bool | None = None
    """True after a round with a tree, False after one with a lookup, None before the first."""

    def __post_init__(self) -> None:
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
