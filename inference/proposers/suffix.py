"""Suffix lookup: drafts of the tokens that followed the longest end of the text earlier in it.

An online suffix automaton (Blumer et al., 1985) over prompt and reply, as in SAM decoding (arXiv
2411.10666), finds an end of any length in amortised constant time for each token.
"""

from __future__ import annotations

from functools import partial

from ..tree_settings import positive
from .lookup import LookupProposer, copy_from


class SuffixAutomaton:
    """Smallest automaton that accepts every substring of a growing text.

    State s stands for the substrings of lengths `_length[_link[s]] + 1 .. _length[s]` that end at
    the same positions of the text; `_first_end[s]` is the first of these, as the index of the token
    after the substring. `_next[s]` are the transitions from s by token. `_link[s]` is the state of
    the longest end of these substrings that has further end positions. State 0 is the empty one.

    Besides the text's own state `_last`, the automaton tracks the state of the longest end of the
    text that occurs earlier in it, and the length of this end; `shortest` is the least length from
    which `guess` drafts.
    """

    def __init__(self, shortest: int = 1) -> None:
        self._shortest = shortest
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        self._last = 0
        # state and length of the longest end of the text that occurs earlier in it
        self._state, self._matched = 0, 0

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # Before the token is added: afterwards the automaton accepts the whole text, and the
            # longest match would be the text itself.
            self._follow(token)
            self._add(token)
            self._text.append(token)

    def _follow(self, token: int) -> None:
        """Extend the longest earlier match by a token, shortening it until the token fits."""
        # The linked state stands for shorter ends of the match, which occur more often; the longest
        # of them is tried. State 0, the empty end, is where shortening stops.
        while self._state and token not in self._next[self._state]:
            self._state = self._link[self._state]
            self._matched = self._length[self._state]
        if token in self._next[self._state]:
            self._state = self._next[self._state][token]
            self._matched += 1

    def _new(self, length: int, first_end: int) -> int:
        """Add a state without transitions, and return it."""
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._first_end.append(first_end)
        return len(self._next) - 1

    def _add(self, token: int) -> None:
        """Add the token that follows the text to the automaton."""
        new = self._new(len(self._text) + 1, len(self._text) + 1)
        # From the whole text to its ever shorter ends: those that this token has not followed
        # before get a transition by it.
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        # -1: no end of the text was followed by the token before, and the link stays the root's
        if state != -1:
            linked = self._next[state][token]
            # A state that also stands for longer substrings than the one found cannot be linked to:
            # only the shorter ones end here too.
            if self._length[state] + 1 != self._length[linked]:
                linked = self._split(state, token, linked)
            self._link[new] = linked
        self._last = new

    def _split(self, state: int, token: int, below: int) -> int:
        """Split the state `below`, which `token` leads to from `state`, and return the new state.

        The new state stands for the substrings of `below` that are ends of those of `state`
        followed by `token`. They have gained an end position that the longer ones have not.
        """
        # The first end position is that of `below`: shorter substrings end wherever longer ones do.
        copy = self._new(self._length[state] + 1, self._first_end[below])
        self._next[copy] = dict(self._next[below])
        self._link[copy] = self._link[below]
        self._link[below] = copy
        # Shorter ends of the text lead to `below` by the same token, until one leads elsewhere.
        # From there on all do, since their continuations end at more positions.
        while state != -1 and self._next[state].get(token) == below:
            self._next[state][token] = copy
            state = self._link[state]
        # the earlier match may be one of the substrings that have moved
        if self._state == below and self._matched <= self._length[copy]:
            self._state = copy
        return copy

    def longest_match(self) -> tuple[int, int]:
        """Return the length of the longest end of the text that occurs earlier in it.

        Also returns the index of the token after its first occurrence.
        """
        return self._matched, self._first_end[self._state]

    def guess(self, length: int) -> list[int]:
        """Return `length` tokens that followed the longest match; none if it is too short."""
        # Example: the text 1 2 3 1 2 ends with 1 2, which ended before index 2 the first time. From
        # there 3 1 2 is copied, and what was copied goes on with 3.
        matched, start = self.longest_match()
        return copy_from(self._text, start, length) if matched >= self._shortest else []


class SuffixLookup(LookupProposer):
    """Proposer of the `length` tokens that followed the text's longest repeated end at first.

    The end has to have at least `shortest` tokens. Raises `UserError` for settings out of range.
    """

    name = "suffix"

    def __init__(self, length: int = 8, shortest: int = 1) -> None:
        super().__init__(length, partial(SuffixAutomaton, positive("shortest", shortest)))
