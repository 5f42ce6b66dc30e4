"""Shapes of drafts that several engines have, for `--like`."""

from __future__ import annotations

from typing import Any

from .engine import Settings


def chain(_: Any, settings: Settings) -> Settings:
    """Return the settings of a chain."""
    return {"length": settings["drafts"], "width": 1}


def block(proposer: Any, settings: Settings) -> Settings:
    """Return the settings of a block drafter: a chain, and a block of just as many slots.

    Slots of a block see each other. An engine that drafts less runs a shorter block, and the drafts
    of a shorter block are other ones than the first of a longer.
    """
    drafts = min(settings["drafts"], proposer.longest)
    return {"length": drafts, "width": 1, "slots": drafts + proposer.first_slot}


def lookup(_: Any, settings: Settings) -> Settings:
    """Return the settings of a lookup of n-grams."""
    return {"length": settings["drafts"]}
