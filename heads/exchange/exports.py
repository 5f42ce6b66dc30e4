"""Which engines take a drafter, and how: the recipes of `engines` for one drafter.

docs/checkpoint-formats.md#what-each-engine-reads
"""

from __future__ import annotations

from ..artifact import Artifact
from ..errors import UserError
from .engines import ENGINES
from .engines.engine import DrafterFacts, Recipe
from .kinds import TITLES, facts_of, titles

DRAFTS = 3  # drafts of a round, if no other number is given


def recipe_for(engine: str, artifact: Artifact) -> Recipe:
    """Return the recipe of this drafter for `engine`.

    Raises `UserError` with the reason, and with the engines that take it, if `engine` cannot.
    """
    facts, recipes = facts_of(artifact), ENGINES[engine].recipes
    if facts.kind not in recipes:
        where = ", ".join(takers(facts)) or "none of the engines"
        raise UserError(
            f"{engine} takes {titles(recipes)}, not {TITLES[facts.kind]}; this one can be exported "
            f"to {where}"
        )
    if reason := ENGINES[engine].obstacle(facts):
        raise UserError(f"{engine} cannot serve this drafter: {reason}")
    return recipes[facts.kind]


def takers(facts: DrafterFacts) -> list[str]:
    """Return the names of the engines that can serve this drafter."""
    # Each is asked for an obstacle, because a kind that it takes may have a shape that it cannot
    # serve.
    return [
        name
        for name, engine in ENGINES.items()
        if facts.kind in engine.recipes and engine.obstacle(facts) is None
    ]


def also_read_by(engine: str, artifact: Artifact) -> list[str]:
    """Return the names of the other engines that read the very same files."""
    facts = facts_of(artifact)
    layouts = {name: ENGINES[name].recipes[facts.kind].layout_for(facts) for name in takers(facts)}
    return [name for name in layouts if name != engine and layouts[name] is layouts[engine]]
