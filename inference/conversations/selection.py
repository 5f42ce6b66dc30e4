"""Selection of a few rows from many: drawn by hash, evenly over their categories.

The first rows are not a representative sample, because files are sorted by category. A row's *unit*
is its conversation or prompt: rows of one unit are correlated, so they stay together in a split and
count as one observation in an interval.
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
"""Source and category of a row, the outer name first."""


class Units:
    """Rows that belong together: those with an equal id in one source, or with an equal prompt.

    All rows are added before the first is looked up.
    """

    def __init__(self) -> None:
        # A union-find forest; the root of a unit is its smallest key.
        self._parents: dict[int, int] = {}

    def add(self, row: Any, conversation: Conversation, source: str = "") -> None:
        """Add a row of a source."""
        roots = [self._root(key) for key in _keys(row, conversation, source)]
        for root in roots:
            self._parents[root] = min(roots)

    def of(self, row: Any, conversation: Conversation, source: str = "") -> int:
        """Return the number of a row's unit, which does not depend on the order of adding."""
        return self._root(_keys(row, conversation, source)[0])

    def _root(self, key: int) -> int:
        self._parents.setdefault(key, key)
        while (parent := self._parents[key]) != key:
            self._parents[key] = self._parents[parent]  # path halving
            key = parent
        return key


def _keys(row: Any, conversation: Conversation, source: str) -> list[int]:
    """Return the numbers of a row's prompt and of its id within the source, if it has one.

    The ids that `data regenerate` writes are ignored, since they may be places in a file.
    """
    keys = [hash_number(prompt_text(conversation))]
    row_id = None if "regenerated" in row else row.get("id", row.get("question_id"))
    if row_id not in (None, ""):
        keys.append(hash_number(json.dumps([source, str(row_id)])))
    return keys


def prompt_text(conversation: Conversation) -> str:
    """Return everything before the first reply to a user, as one text.

    It is the same for all turns and parts of a conversation, and for several replies to a prompt.
    """
    if conversation.messages is None:
        if conversation.token_ids is None:
            return conversation.text or ""
        spans = conversation.response_spans
        return str(conversation.token_ids[: min((start for start, _ in spans), default=None)])
    contents: list[Any] = []
    asked = False
    for message in conversation.messages:
        if message["role"] != "assistant":
            contents.append(message.get("content"))
            asked = asked or message["role"] != "system"
        elif asked:
            break
    return json.dumps(contents, ensure_ascii=False)


def hash_number(name: str) -> int:
    """Return 63 bits of the SHA-256 of `name`, by which rows and groups are drawn."""
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
    while any(lists):  # merge groups by the last name of their paths until one group is left
        inner: dict[CategoryPath, list[list[int]]] = {}
        # By hash, not alphabetically: with more groups than rows to draw, any may be left out.
        for group in sorted(lists, key=lambda group: [hash_number(name) for name in group]):
            inner.setdefault(group[:-1], []).append(lists[group])
        lists = {
            group: [index for turn in zip_longest(*rows) for index in turn if index is not None]
            for group, rows in inner.items()
        }
    return lists.get((), [])


def describe_groups(groups: Sequence[CategoryPath]) -> str:
    """Return the number of rows in each group, such as `11 chat, 11 code, 10 math`."""
    counts = Counter("/".join(name for name in group if name) for group in groups)
    return ", ".join(
        f"{count} {name or 'without category'}" for name, count in sorted(counts.items())
    )
