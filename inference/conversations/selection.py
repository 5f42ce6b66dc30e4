"""The choice of a few rows among many: drawn by hash, evenly over their groups.

The first rows of a source are no sample of it: files are sorted by category, and sources come one
after the other. A row's *unit* is its conversation or prompt: rows of one unit are correlated, so
that they stay together in a split, and are one observation in an interval.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from .formats import Conversation

CategoryPath = tuple[str, ...]
"""Names of a row's source and category, the larger first."""


class Units:
    """Rows that belong together: those with an equal id in one source, or with an equal prompt.

    All rows are added before the first is looked up.
    """

    def __init__(self) -> None:
        # The key that each key leads to; the smallest of a unit leads to itself.
        self._towards: dict[int, int] = {}

    def add(self, row: Any, conversation: Conversation, source: str = "") -> None:
        """Add a row of a source."""
        roots = [self._root(key) for key in _keys(row, conversation, source)]
        for root in roots:
            self._towards[root] = min(roots)

    def of(self, row: Any, conversation: Conversation, source: str = "") -> int:
        """Return the number of the unit of a row that was added, whatever the order of adding."""
        return self._root(_keys(row, conversation, source)[0])

    def _root(self, key: int) -> int:
        self._towards.setdefault(key, key)
        while (following := self._towards[key]) != key:
            # Each step halves the way for those who come later.
            self._towards[key] = self._towards[following]
            key = following
        return key


def _keys(row: Any, conversation: Conversation, source: str) -> list[int]:
    """Return the numbers of a row's prompt and of its id within the source, if it has one.

    The ids that `data regenerate` gives to rows without any are places in a file and do not count.
    """
    keys = [hash_number(prompt_text(conversation))]
    given = _given_id(row)
    if given not in (None, ""):
        keys.append(hash_number(json.dumps([source, str(given)])))
    return keys


def _given_id(row: Any) -> Any:
    """Return the id of a row; None if it has none but a place in a file."""
    return None if "regenerated" in row else row.get("id", row.get("question_id"))


def prompt_text(conversation: Conversation) -> str:
    """Return what is before the first reply to a user, as one text.

    It is the same for all turns and parts of a conversation, and for several replies to a prompt.
    """
    if conversation.messages is None:
        if conversation.token_ids is None:
            return conversation.text or ""
        spans = conversation.response_spans
        return str(conversation.token_ids[: min((start for start, _ in spans), default=None)])
    said: list[Any] = []
    asked = False
    for message in conversation.messages:
        if message["role"] != "assistant":
            said.append(message.get("content"))
            asked = asked or message["role"] != "system"
        elif asked:
            break
    return json.dumps(said, ensure_ascii=False)


def hash_number(name: str) -> int:
    """Return the number by which something is known and drawn: 63 bits of its name's SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def balanced_order(groups: Sequence[CategoryPath], units: Sequence[int]) -> list[int]:
    """Return the indices of all rows in the order in which they are drawn.

    Sources take turns, within a source its categories, and within a category its units, in the
    order of their numbers. A unit's second row comes after the first rows of all units of its
    category. `groups[i]` and `units[i]` are those of row i.
    """
    seen: Counter[tuple[CategoryPath, int]] = Counter()
    ordered: dict[CategoryPath, list[tuple[int, int, int]]] = {}
    for index, (group, unit) in enumerate(zip(groups, units, strict=True)):
        ordered.setdefault(group, []).append((seen[group, unit], unit, index))
        seen[group, unit] += 1
    lists = {group: [index for *_, index in sorted(rows)] for group, rows in ordered.items()}
    while any(lists):  # until the groups have no names left, of which the last goes first
        inner: dict[CategoryPath, list[list[int]]] = {}
        # Not in the order of the alphabet: of more groups than rows to draw, any may be left out.
        for group in sorted(lists, key=lambda group: [hash_number(name) for name in group]):
            inner.setdefault(group[:-1], []).append(lists[group])
        lists = {
            group: [index for turn in zip_longest(*rows) for index in turn if index is not None]
            for group, rows in inner.items()
        }
    return lists.get((), [])


def describe_groups(groups: Sequence[CategoryPath]) -> str:
    """Return how many rows there are of each group, such as `11 chat, 11 code, 10 math`."""
    counts = Counter("/".join(name for name in group if name) for group in groups)
    return ", ".join(
        f"{count} {name or 'without category'}" for name, count in sorted(counts.items())
    )
