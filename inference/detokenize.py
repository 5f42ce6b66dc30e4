"""Text of a token stream, in pieces that are final as soon as they are shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

# Number of tokens that are decoded again, so that spaces and characters that are split over several
# tokens come out as in the whole text.
CONTEXT = 32


class StreamedText:
    """Pieces of text that never have to be taken back.

    The bytes of one character may be spread over several tokens, and the end of the text may become
    the beginning of a stop string: both are held back until they are decided. A stop string itself
    is never shown.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        # the last tokens: decoding all of them every time would take quadratic time
        self._window: list[int] = []
        self._known = ""  # text of the window's first tokens, which is in `_text` already
        self._text = ""
        self._shown = 0  # characters of `_text` that were returned

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Return the text that has become final with `tokens`; with `last`, all that is left."""
        self._window.extend(tokens)
        decoded = self._tokenizer.decode(self._window)
        # The replacement character at the end stands for an incomplete character: its remaining
        # bytes may come with the next token.
        if last or not decoded.endswith("\ufffd"):
            self._text += decoded[len(self._known) :]
            self._known = decoded
            if len(self._window) > 2 * CONTEXT:
                self._window = self._window[-CONTEXT:]
                self._known = self._tokenizer.decode(self._window)
        return self._show(last)

    def pieces(
        self, tokens: Sequence[int], accepted: int, hidden: Collection[int], last: bool = False
    ) -> list[tuple[str, bool]]:
        """Return the text that became final with each token of a round, and whether it was drafted.

        The first `accepted` tokens are drafts, those behind them the target's own. Tokens in
        `hidden` are no text. Tokens with which no text became final are left out; with `last`, the
        last one brings all that is left.
        """
        found = []
        for place, token in enumerate(tokens):
            ends = last and place == len(tokens) - 1
            if piece := self.add([] if token in hidden else [token], ends):
                found.append((piece, place < accepted))
        return found

    def _show(self, last: bool) -> str:
        """Return the final text behind what was shown; with `last`, up to the end of the text."""
        end = len(self._text)
        stop_starts = []
        for stop in self._stops:
            # the beginning of a stop string is held back, so none begins far before the shown end
            start = self._text.find(stop, max(self._shown - len(stop), 0))
            if start >= 0:
                stop_starts.append(start)
        if stop_starts:
            end = min(stop_starts)
        elif not last:
            end -= max((_overlap(self._text, stop) for stop in self._stops), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which the string `stop` may begin."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
