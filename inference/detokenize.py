"""Text of tokens as soon as it is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# tokens that are decoded again, so that spaces and characters split over tokens come out as in the
# whole text
CONTEXT = 32


class StreamedText:
    """Pieces of text that never have to be taken back.

    The bytes of one character may be spread over several tokens, and what looks like the beginning
    of a stop string may become one: both are held back until they are decided. A stop string itself
    is never shown.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        # the last tokens: decoding all of them every time would take quadratic time
        self._window: list[int] = []
        self._known = ""  # what the window's first tokens decode to
        self._text = ""
        self._shown = 0

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that has become final with `tokens`; with `last`, all that is left."""
        self._window.extend(tokens)
        decoded = self._tokenizer.decode(self._window)
        if last or not decoded.endswith("\ufffd"):
            self._text += decoded[len(self._known) :]
            self._known = decoded
            if len(self._window) > 2 * CONTEXT:
                self._window = self._window[-CONTEXT:]
                self._known = self._tokenizer.decode(self._window)
        return self._show(last)

    def _show(self, last: bool) -> str:
        end = len(self._text)
        found = [
            place
            for stop in self._stops
            if (place := self._text.find(stop, max(self._shown - len(stop), 0))) >= 0
        ]
        if found:
            end = min(found)
        elif not last:
            end -= max((_overlap(self._text, stop) for stop in self._stops), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string may begin with."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
