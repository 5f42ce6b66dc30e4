"""Kinds of drafters: how a proposer is made, and which settings a user may give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...heads.errors import UserError
from ..base.tree_settings import LOOKUP_SETTINGS, Ranks, TreeSettings
from .contract import Proposer

Setting = int | float | str | Sequence[Ranks] | None
"""Value of a drafter's setting; only a `shape` of a tree is a sequence."""
Settings = dict[str, Setting]


@dataclass(frozen=True)
class Kind:
    """Kind of drafter: how its proposer is made, and which settings a user may give."""

    make: Callable[..., Proposer]
    """Class or function of the proposer. It takes `settings` (a `TreeSettings`) if `tree` is not
    empty, and the settings `own` by their names; of a trained drafter, its `Artifact` first."""
    tree: tuple[str, ...] = ()
    """Fields of `TreeSettings` that it follows."""
    own: tuple[str, ...] = ()
    """Further settings."""
    chains: bool = False
    """True if it drafts chains where no width is given."""
    lookups: bool = False
    """True if lookups may replace its drafts: its state depends on what was accepted alone."""
    trained: bool = True
    """True if it is made of an artifact."""

    def arguments(self, drafter: str, settings: Settings) -> dict[str, object]:
        """Return the arguments of `make` for a user's settings. Raises `UserError` for others."""
        if unknown := sorted(settings.keys() - set(self.known)):
            raise UserError(
                f"drafter {drafter} has no setting {unknown[0]!r}; there are: "
                f"{', '.join(self.known) or 'no settings'}"
            )
        arguments: dict[str, object] = dict(settings)
        if self.tree:
            tree: dict[str, Any] = {
                name: arguments.pop(name) for name in self.tree if name in arguments
            }
            arguments["settings"] = TreeSettings(**tree)
        return arguments

    @property
    def known(self) -> list[str]:
        """Names of all settings that a user may give."""
        known = [*self.tree, *self.own]
        known += ["dtype"] if self.trained else []
        known += LOOKUP_SETTINGS if self.lookups else []
        # Plain decoding, which has no settings, has one name in all tables.
        return [*known, "name"] if known else []
