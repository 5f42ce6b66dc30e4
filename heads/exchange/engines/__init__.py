"""Serving engines: one file for each, which is found by being here.

A file holds what draftsmith knows of its engine as `ENGINE`: how a drafter is exported to it and
what it cannot express, how `--like` imitates it, and how `--server` measures it. Engines take
drafters by their kind: the method, or a version of it. Facts are from the source code of vLLM 0.32
and 0.33, SGLang 0.5, TensorRT-LLM's PyTorch backend, llama.cpp b10434 and TGI of 2026, which is
more complete than their documentation. No file imports torch: the command line reads the names of
the engines before it does anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from ...errors import UserError
from .engine import DrafterFacts, Recipe, ServingEngine

if TYPE_CHECKING:
    from ...artifact import Artifact

_found = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
_engines: list[ServingEngine] = [file.ENGINE for file in _found if hasattr(file, "ENGINE")]

ENGINES = {engine.name: engine for engine in sorted(_engines, key=lambda e: (e.place, e.name))}
"""All engines by name, in the order in which they are listed."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]
    """Names of the engines, as `draftsmith export --to` takes them."""

DRAFTS = 3  # drafts of a round, if no other number is given
TITLES = {
    "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
    "medusa": "Medusa heads", "mtp": "an MTP layer",
    "draft_model": "a draft model",
}  # fmt: skip


def drafter_facts(artifact: Artifact) -> DrafterFacts:
    """Return the artifact's drafter as engines see it."""
    drafter, target = artifact.drafter, artifact.fingerprint
    return DrafterFacts(drafter, target.model_type, target.vocab_size, target.numbers)


def titles(kinds: Iterable[str]) -> str:
    """Return the titles of kinds as a list in a sentence."""
    *first, last = (TITLES.get(kind, kind) for kind in kinds)
    return f"{', '.join(first)} or {last}" if first else last


def recipe_for(engine: str, artifact: Artifact) -> Recipe:
    """Return the recipe of this drafter for `engine`. Raises `UserError` with the reason."""
    facts = drafter_facts(artifact)
    if reason := refusal(engine, facts):
        raise UserError(reason)
    return ENGINES[engine].recipes[facts.kind]


def refusal(engine: str, facts: DrafterFacts) -> str | None:
    """Return why a drafter is not exported to `engine`; None if it is."""
    recipes = ENGINES[engine].recipes
    if facts.drafter.not_exported:
        return facts.drafter.not_exported
    if facts.kind not in recipes:
        found = ", ".join(compatible_engines(facts))
        where = f"this one can be exported to {found}" if found else "no engine takes this one"
        return f"{engine} takes {titles(recipes)}, not {titles([facts.kind])}; {where}"
    reason = ENGINES[engine].obstacle(facts)
    return None if reason is None else f"{engine} cannot serve this drafter: {reason}"


def engine_remarks(facts: DrafterFacts) -> list[str]:
    """Return lines about the engines for a drafter: which take it, which do not and why, remarks.

    Engines with the same remark share a line. The reasons and remarks are those of an export
    and of its card.
    """
    if facts.drafter.not_exported:
        return [facts.drafter.not_exported]
    said: dict[str, list[str]] = {}
    able = compatible_engines(facts)
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


def compatible_engines(facts: DrafterFacts) -> list[str]:
    """Return the names of the engines that can serve this drafter."""
    # Each is asked for an obstacle, because a kind that it takes may have a shape that it cannot
    # serve.
    return [
        name
        for name, engine in ENGINES.items()
        if facts.kind in engine.recipes and engine.obstacle(facts) is None
    ]
