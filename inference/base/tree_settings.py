"""Settings of draft trees that all drafters share: length, width and number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...heads.errors import UserError

MOST = 1024  # bound of the drafted nodes of a round, and of every setting that makes them more

Ranks = tuple[int, ...]
"""Node of a tree by the ranks on its path: (0, 2) is the third-best child of the best child."""


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Size and form of the draft tree.

    None leaves a setting to the drafter: the value of its calibration, or else its own default.
    """

    length: int | None = None
    """Levels of the tree; drafts of a chain."""
    width: int | None = None
    """Children of a node at most; 1 makes a chain."""
    nodes: int | None = None
    """Drafted nodes of a tree, without the root."""
    shape: Sequence[Ranks] | None = None
    """Rank tuples as in `tree_plan.shape_of_ranks`; they fix the tree for every rule and text."""

    def or_else(self, **defaults: Any) -> TreeSettings:
        """Return these settings with `defaults` for those that are None."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


TREE_SETTINGS = tuple(field.name for field in fields(TreeSettings))

LOOKUP_SETTINGS = ("lookup", "lookup_length")
"""Settings of a lookup with a trained drafter (`proposers.with_lookup`)."""


def positive(name: str, value: Any, least: int = 1) -> int:
    """Return `value`; `UserError` unless it is a whole number from `least` to `MOST`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > MOST:
        raise UserError(
            f"{name} can be {MOST} at most, not {value}: every drafted token is verified"
        )
    return value
