"""Text of a token stream, in pieces that are final as soon as they are shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

# Number of tokens that are decoded again, so that spaces and characters that are split over several
# tokens come out as in the whole text.
CONTEXT = 32
LONGEST_CHARACTER = 4  # bytes, and so the most tokens over which a character can be spread
INCOMPLETE = "\ufffd"
"""Character that tokenizers write for bytes that do not form a character, or not yet."""
BASE = "abcdef"  # text before a token whose own text is looked for


class StreamedText:
    """Pieces of text that never have to be taken back.

    The bytes of one character may be spread over several tokens, and the end of the text may become
    the beginning of a stop string, which is never shown: both are held back until they are decided.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        # the last tokens: decoding all of them every time would take quadratic time
        self._window: list[int] = []
        self._known = 0  # characters of the window's text that are in `_text` already
        self._undecided = 0  # tokens since the text last ended with a whole character
        self._text = ""
        self._shown = 0  # characters of `_text` that were returned

    def add(self, tokens: Sequence[int], last: bool = False, stopped: bool = True) -> str:
        """Return the text that has become final with `tokens`; with `last`, all that is left.

        A stop string is cut off only if it ended the text (`stopped`): where hidden tokens
        interrupt one, the text continues after it.
        """
        self._window.extend(tokens)
        self._undecided += len(tokens)
        decoded = self._tokenizer.decode(self._window)
        final = len(decoded)
        if not decoded.endswith(INCOMPLETE):
            self._undecided = 0
        elif not last:
            # The end may be an incomplete character, whose remaining bytes come with the next
            # tokens. A character of more tokens than it can have bytes never becomes one; only the
            # replacement characters at the very end may then begin another.
            held = final - len(decoded.rstrip(INCOMPLETE))
            if self._undecided >= LONGEST_CHARACTER:
                held = min(held, LONGEST_CHARACTER - 1)
            final -= held
        if final > self._known:
            self._text += decoded[self._known : final]
            self._known = final
        if len(self._window) > 2 * CONTEXT:
            self._forget(len(decoded) - self._known)
        return self._show(last, stopped)

    def _forget(self, held: int) -> None:
        """Keep the last tokens of the window; the last `held` characters are not in `_text`."""
        # The window should not begin within a character: some tokenizers then show a whole run of
        # bytes as replacement characters.
        for more in range(LONGEST_CHARACTER):
            window = self._window[-CONTEXT - more :]
            decoded = self._tokenizer.decode(window)
            if not decoded.startswith(INCOMPLETE):
                break
        self._window, self._known = window, len(decoded) - held

    def _show(self, last: bool, stopped: bool) -> str:
        """Return the final text after what was shown; with `last`, up to the end of the text."""
        end = len(self._text)
        stops = self._stops if stopped or not last else ()
        # the beginning of a stop string is held back, so none begins far before the shown end
        starts = [self._text.find(stop, max(self._shown - len(stop), 0)) for stop in stops]
        if found := [start for start in starts if start >= 0]:
            end = min(found)
        elif not last:
            end -= max((_overlap(self._text, stop) for stop in self._stops), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


class StopStrings:
    """Stop strings, searched for in the bytes of a text's last tokens.

    The result is that of transformers' `StopStringCriteria`, which builds a table of all tokens for
    each set of stop strings: 30 ms per character with 150,000 tokens.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop.encode(errors="surrogatepass") for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._bytes = _BYTES.setdefault(tokenizer, {}) if stops else {}

    def end_with(self, tokens: Sequence[int]) -> bool:
        """Return True if a stop string ends within the last of `tokens`."""
        if not self._stops:
            return False
        last = self._bytes_of(tokens[-1])
        pieces, needed = [last], self._longest - 1
        for token in reversed(tokens[-self._longest : -1]):
            piece = self._bytes_of(token)
            if needed <= 0 or not piece:
                break
            pieces.append(piece)
            needed -= len(piece)
        text = b"".join(reversed(pieces))
        # A match that ends before the last token ended the text there, or belongs to the prompt.
        before = len(text) - len(last) + 1
        found = (text.find(stop, max(before - len(stop), 0)) for stop in self._stops)
        return bool(last) and any(place >= 0 for place in found)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an unknown token."""
        if token not in self._bytes:
            self._bytes[token] = _bytes_of(self._tokenizer, token)
        return self._bytes[token]


_BYTES: WeakKeyDictionary[Any, dict[int, bytes]] = WeakKeyDictionary()
"""Bytes of the tokens that were looked up, by tokenizer."""


def _bytes_of(tokenizer: Any, token: int) -> bytes:
    # Models may have more rows than their tokenizer has tokens.
    name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if name is None:
        return b""
    # After other text, since a token at the beginning of a text may lose its space there.
    before = tokenizer.convert_ids_to_tokens(tokenizer(BASE, add_special_tokens=False)["input_ids"])
    _, there, text = tokenizer.convert_tokens_to_string([*before, name]).partition(BASE)
    if not there or INCOMPLETE in text:  # a part of a character: its name says which bytes
        if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):
            return bytes([int(found[1], 16)])
        if all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
    return text.encode()


def _letters() -> dict[str, int]:
    """Return the byte of each letter in which byte-level tokenizers write their tokens (GPT-2)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _letters()


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that transformers' `decode(skip_special_tokens=True)` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {number for number, token in added.items() if token.special}
    return frozenset(marked | {*tokenizer.all_special_ids})


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which the string `stop` may begin."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
