"""The choice of a few rows among many: drawn by hash, evenly over their groups.

The first rows of a source are no sample of it: files are sorted by category, and sources stand one
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

Group = tuple[str, ...]
"""Names of a row's source and category, the larger first."""


def unit_of(row: Any, conversation: Conversation, source: str = "") -> str:
    """Return the name of the row's unit: its `id` within the `source`, else its prompt.

    The ids that `data regenerate` gives to rows without any are places in a file; its rows belong
    together by their prompts.
    """
    given = row.get("id", row.get("question_id"))
    if given is None or "regenerated" in row:
        return prompt_of(conversation)
    return json.dumps([source, str(given)])


def prompt_of(conversation: Conversation) -> str:
    """Return what stands before the first reply, system prompts left out, as one text.

    It is the same for all turns and parts of a conversation, and for several replies to a prompt.
    """
    if conversation.messages is None:
        if conversation.token_ids is None:
            return conversation.text or ""
        spans = conversation.response_spans
        return str(conversation.token_ids[: min((start for start, _ in spans), default=None)])
    said: list[Any] = []
    for message in conversation.messages:
        if message["role"] == "assistant" and said:
            break
        if message["role"] not in ("system", "assistant"):
            said.append(message.get("content"))
    return json.dumps(said, ensure_ascii=False)


def number_of(unit: str) -> int:
    """Return the number by which a unit is known and drawn: 63 bits of its name's SHA-256."""
    return int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8]) >> 1


def in_turns(groups: Sequence[Group], units: Sequence[int]) -> list[int]:
    """Return the indices of all rows in the order in which they are drawn.

    Sources take turns, within a source its categories, and within a category its units, in the
    order of their numbers. A unit's second row comes after the first rows of all units of its
    category. `groups[i]` and `units[i]` are those of row i.
    """
    seen: Counter[tuple[Group, int]] = Counter()
    ordered: dict[Group, list[tuple[int, int, int]]] = {}
    for index, (group, unit) in enumerate(zip(groups, units, strict=True)):
        ordered.setdefault(group, []).append((seen[group, unit], unit, index))
        seen[group, unit] += 1
    by_group = {group: [index for *_, index in sorted(rows)] for group, rows in ordered.items()}
    return _merged(by_group)


def _merged(by_group: dict[Group, list[int]]) -> list[int]:
    """Return the rows of all groups, one of each in turn: by the first name, then by the next."""
    if list(by_group) == [()]:
        return by_group[()]
    inner: dict[str, dict[Group, list[int]]] = {}
    for (first, *rest), rows in sorted(by_group.items()):
        inner.setdefault(first, {})[tuple(rest)] = rows
    merged = []
    for of_turn in zip_longest(*map(_merged, inner.values())):
        merged += [index for index in of_turn if index is not None]
    return merged


def described(groups: Sequence[Group]) -> str:
    """Return how many rows there are of each group, such as `11 chat, 11 code, 10 math`."""
    counts = Counter("/".join(name for name in group if name) for group in groups)
    return ", ".join(
        f"{count} {name or 'without category'}" for name, count in sorted(counts.items())
    )
