"""Kinds of drafters (methods, and each version of EAGLE by itself), and which engines take one.

docs/checkpoint-formats.md#what-each-engine-reads
"""

from __future__ import annotations

from collections.abc import Iterable

from ..artifact import Artifact
from ..errors import UserError
from .engines import ENGINES
from .engines.engine import DrafterFacts, Recipe

DRAFTS = 3  # drafts of a round, if no other number is given
TITLES = {
    "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
    "medusa": "Medusa heads", "mtp": "an MTP layer",
    "draft_model": "a draft model",
}  # fmt: skip
INSIDE = (
    "engines read an MTP layer inside of its target's checkpoint; write it there with draftsmith "
    "mtp stitch"
)


def facts_of(artifact: Artifact) -> DrafterFacts:
    """Return the artifact's drafter as engines see it."""
    drafter, target = artifact.drafter, artifact.fingerprint
    return DrafterFacts(drafter.kind, drafter, target.model_type, target.vocab_size, target.numbers)


def titles(kinds: Iterable[str]) -> str:
    """Return the titles of kinds as a list in a sentence."""
    *first, last = (TITLES.get(kind, kind) for kind in kinds)
    return f"{', '.join(first)} or {last}" if first else last


def recipe_for(engine: str, artifact: Artifact) -> Recipe:
    """Return the recipe of this drafter for `engine`. Raises `UserError` with the reason."""
    facts = facts_of(artifact)
    if reason := refusal(engine, facts):
        raise UserError(reason)
    return ENGINES[engine].recipes[facts.kind]


def refusal(engine: str, facts: DrafterFacts) -> str | None:
    """Return why a drafter is not exported to `engine`; None if it is."""
    recipes = ENGINES[engine].recipes
    if facts.kind == "mtp":
        return INSIDE
    if facts.kind not in recipes:
        found = ", ".join(takers(facts))
        where = f"this one can be exported to {found}" if found else "no engine takes this one"
        return f"{engine} takes {titles(recipes)}, not {titles([facts.kind])}; {where}"
    reason = ENGINES[engine].obstacle(facts)
    return None if reason is None else f"{engine} cannot serve this drafter: {reason}"


def sentences(facts: DrafterFacts) -> list[str]:
    """Return what is said of the engines for a drafter: who takes it, who does not, remarks.

    Engines of which the same is said share a line. The reasons and remarks are those of an export
    and of its card.
    """
    if facts.kind == "mtp":
        return [INSIDE]
    said: dict[str, list[str]] = {}
    able = takers(facts)
    for name, engine in ENGINES.items():
        if facts.kind not in engine.recipes:
            continue
        if (reason := engine.obstacle(facts)) is not None:
            said.setdefault(f"not taken: {reason}", []).append(name)
            continue
        # Those that are the same for every drafter are for the export and its card.
        for remark in engine.recipes[facts.kind].remarks_for(facts):
            said.setdefault(remark, []).append(name)
    return [
        f"exports of {titles([facts.kind])}: {', '.join(able) or 'no engine takes this one'}",
        *(f"{', '.join(names)}: {text}" for text, names in said.items()),
    ]


def takers(facts: DrafterFacts) -> list[str]:
    """Return the names of the engines that can serve this drafter."""
    # Each is asked for an obstacle, because a kind that it takes may have a shape that it cannot
    # serve.
    return [
        name
        for name, engine in ENGINES.items()
        if facts.kind in engine.recipes and engine.obstacle(facts) is None
    ]
