"""Drafters as a serving engine would use them: its shape, drafts and rule in draftsmith's loop.

Which drafters an engine takes, and with what defaults, is in its file in `heads/exchange/engines`.
Engines change, so every number can be given as a setting.
"""

from __future__ import annotations

from typing import Any

from ...heads.errors import UserError
from ...heads.exchange.engines import ENGINES
from ...heads.exchange.engines.engine import DrafterFacts
from ...heads.fingerprint import output_settings
from ..base.settings import Rule, choice_named
from ..base.tree_settings import positive
from ..proposers.cached import FeatureProposer
from ..proposers.contract import DrafterSpec, Proposer
from ..proposers.registry import load_proposer, parse_spec, without_tree
from ..targets.target import Target
from .measure import ChosenWay

AS_IN = " as in "
"""Words between the names of a drafter and of the engine that it is measured as in."""
IMITATED = {name: engine.like for name, engine in ENGINES.items() if engine.like is not None}


class ImitatedEngine:
    """An engine's way to speculate."""

    def __init__(self, spec: str) -> None:
        """Read `spec`, an engine's name with settings such as vllm:drafts=5,draws=probabilistic.

        Raises `UserError` for an engine or a setting that is not known.
        """
        name, given = parse_spec(spec)
        self.name = choice_named(name, IMITATED)
        self.label = self.name + spec.removeprefix(name)
        if self.name not in IMITATED:
            raise UserError(f"unknown engine {self.name!r}; there are: {', '.join(IMITATED)}")
        self._like = IMITATED[self.name]
        self.settings = self._like.settings | given
        if unknown := sorted(given.keys() - self._like.settings.keys()):
            raise UserError(
                f"{self.name} has no setting {unknown[0]!r} here; there are: "
                f"{', '.join(self._like.settings)}"
            )
        for key, value in self.settings.items():
            choices = self._like.choices.get(key)
            if choices is None and value is not None:
                positive(key, value, self._like.least.get(key, 1))
            if choices is not None and value not in choices:
                raise UserError(f"{self.name}: {key} is {' or '.join(choices)}, not {value!r}")

    def rule(self, proposer: Proposer) -> Rule:
        """Return the acceptance rule at T > 0."""
        return self._like.rule(proposer.kind, self.settings)

    def shape(self, proposer: Proposer, target: Any = None) -> dict[str, Any]:
        """Return the settings with which `load_proposer` makes `proposer` draft as in the engine.

        `target` is the target's text configuration; without one, it is a Llama's. Raises
        `UserError` for a drafter that the engine cannot serve, and for one that is not imitated
        here.
        """
        if proposer.kind not in self._like.shapes:
            raise UserError(
                f"{self.name} takes no such drafter, or drafts with one of its own that is not "
                "imitated here"
            )
        if isinstance(proposer, FeatureProposer):
            drafter = proposer.drafter
            family = "llama" if target is None else target.model_type
            numbers = {} if target is None else output_settings(target)
            facts = DrafterFacts(drafter, family, drafter.shape.vocab_size, numbers)
            if (reason := ENGINES[self.name].obstacle(facts)) is not None:
                raise UserError(f"{self.name} cannot serve this drafter: {reason}")
        return self._like.shapes[proposer.kind](proposer, self.settings)


def as_in_engine(engine: ImitatedEngine, spec: str, target: Target) -> ChosenWay:
    """Return a drafter as a way to decode with an engine's shape and rule, in draftsmith's loop.

    Raises `UserError` for one that the engine does not take.
    """

    def silent(message: str) -> None:
        pass  # it was shown when the drafter was first loaded

    # Loaded twice: the engine's settings follow from what the drafter is. The first time it has its
    # default tree, since the tree of `spec` is not used and need not fit.
    proposer = load_proposer(without_tree(spec), target, silent)
    setting = engine.shape(proposer, target.config)
    # without the settings that the engine's own replace
    named = DrafterSpec(without_tree(spec, tuple(setting)), f"{AS_IN}{engine.label}")
    rule = engine.rule(proposer)
    name = proposer.name + named.suffix
    shaped = load_proposer(spec, target, silent, setting)
    return ChosenWay(name, lambda: shaped, setting, spec, named, rule)
