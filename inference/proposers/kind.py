"""Kinds of drafters: where a proposer is made, and which settings a user may give."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...heads.artifact import own_method
from ...heads.errors import UserError
from ..base.tree_settings import LOOKUP_SETTINGS, TreeSettings

MADE_OF_ARTIFACT = "make_proposer"


@dataclass(frozen=True)
class Kind:
    """Kind of drafter: where its proposer is made, and which settings a user may give."""

    module: str
    """Module in `proposers/`."""
    make: str = MADE_OF_ARTIFACT
    """Class or function there. It takes `settings` (a `TreeSettings`) if `tree` is not empty, and
    the settings `own` by their names. In place of it a method of another package, `module`, has
    a `proposer_class`."""
    tree: tuple[str, ...] = ()
    """Fields of `TreeSettings` that it follows."""
    own: tuple[str, ...] = ()
    """Further settings."""
    chains: bool = False
    """True if it drafts chains where no width is given."""
    lookups: bool = False
    """True if lookups may stand in for its drafts: its state depends on what was accepted alone."""
    needs_target: bool = False
    """True if `make` takes the target too, as the last of its arguments without a name."""

    def split(self, drafter: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `make` for a user's settings. Raises `UserError` for others."""
        if unknown := sorted(settings.keys() - set(self.known)):
            raise UserError(
                f"drafter {drafter} has no setting {unknown[0]!r}; there are: "
                f"{', '.join(self.known) or 'no settings'}"
            )
        arguments = {name: value for name, value in settings.items() if name not in self.tree}
        if self.tree:
            tree = {name: value for name, value in settings.items() if name in self.tree}
            arguments["settings"] = TreeSettings(**tree)
        return arguments

    @property
    def known(self) -> list[str]:
        """Names of all settings that a user may give."""
        known = [*self.tree, *self.own]
        known += ["dtype"] if self.trained else []
        known += LOOKUP_SETTINGS if self.lookups else []
        known += ["name"] if self.make != "PlainDecoding" else []
        return known

    @property
    def trained(self) -> bool:
        """True if it is made of an artifact."""
        return self.make == MADE_OF_ARTIFACT

    @property
    def maker(self) -> Callable[..., Any]:
        """The class or function itself."""
        if (own := own_method(self.module)) is not None:
            return own.proposer_class
        return getattr(importlib.import_module(f".{self.module}", __package__), self.make)
