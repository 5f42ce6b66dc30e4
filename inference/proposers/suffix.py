"""Suffix lookup: what followed the longest end of the text that stood in it before, of any length.

An online suffix automaton (Blumer et al., 1985) over prompt and reply, as in SAM decoding (arXiv
2411.10666): amortised constant time a token, no window to choose.
"""

from __future__ import annotations

from ..proposer import positive
from .lookup import LookupProposer, copy_from


class SuffixAutomaton:
    """The smallest automaton that reads every substring of a growing text.

    State s stands for substrings of lengths `_length[_link[s]] + 1 .. _length[s]` that end at the
    same places; `_first_end[s]` is the first of these places (index of the token after the
    substring).
    """

    def __init__(self, shortest: int = 1) -> None:
        self._shortest = shortest
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        self._last = 0
        self._state, self._matched = 0, 0  # the longest end of the text that stands earlier in it

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # before the token is added, so that a match is an earlier occurrence
            self._follow(token)
            self._add(token)
            self._text.append(token)

    def _follow(self, token: int) -> None:
        while self._state and token not in self._next[self._state]:
            self._state = self._link[self._state]
            self._matched = self._length[self._state]
        if token in self._next[self._state]:
            self._state = self._next[self._state][token]
            self._matched += 1

    def _new(self, length: int, first_end: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._first_end.append(first_end)
        return len(self._next) - 1

    def _add(self, token: int) -> None:
        new = self._new(len(self._text) + 1, len(self._text) + 1)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != -1:
            below = self._next[state][token]
            if self._length[state] + 1 != self._length[below]:
                below = self._split(state, token, below)
            self._link[new] = below
        self._last = new

    def _split(self, state: int, token: int, below: int) -> int:
        """Separate the substrings of `below` that end in `state`'s and `token`: they have gained a
        place that the rest have not."""
        copy = self._new(self._length[state] + 1, self._first_end[below])
        self._next[copy] = dict(self._next[below])
        self._link[copy] = self._link[below]
        self._link[below] = copy
        while state != -1 and self._next[state].get(token) == below:
            self._next[state][token] = copy
            state = self._link[state]
        if self._state == below and self._matched <= self._length[copy]:
            self._state = copy
        return copy

    def longest_match(self) -> tuple[int, int]:
        """Length of the longest end of the text that stands earlier in it, and the place after its
        first occurrence."""
        return self._matched, self._first_end[self._state]

    def guess(self, length: int) -> list[int]:
        matched, place = self.longest_match()
        return copy_from(self._text, place, length) if matched >= self._shortest else []


class SuffixLookup(LookupProposer):
    """Drafts `length` tokens from the first place where the longest matching end of the text stood,
    if it has `shortest` tokens."""

    name = "suffix"

    def __init__(self, length: int = 8, shortest: int = 1) -> None:
        super().__init__(length)
        self._shortest = positive("shortest", shortest)

    def new_index(self) -> SuffixAutomaton:
        return SuffixAutomaton(self._shortest)
