"""Drafters as a serving engine would use them: its shape, drafts and rule in draftsmith's loop.

Which drafters an engine takes, and with what defaults, is in its file in `heads/exchange/engines`.
Engines change, so every number can be given as a setting.
"""

from __future__ import annotations

from typing import Any

from ...heads.errors import UserError
from ...heads.exchange.engines import ENGINES
from ...heads.exchange.engines.engine import DrafterFacts
from ...heads.fingerprint import numbers_of
from ..base.settings import Rule, choice_named
from ..base.tree_settings import positive
from ..proposers.contract import Proposer
from ..proposers.dflash import DFlashProposer
from ..proposers.draft_model import DraftModelProposer
from ..proposers.eagle import EagleProposer
from ..proposers.medusa import MedusaProposer
from ..proposers.ngram import NgramLookup
from ..proposers.registry import Given, load_proposer, parse_spec, without_tree
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
        return self._like.rule(kind_drafted_by(proposer), self.settings)

    def shape(self, proposer: Proposer, target: Any = None) -> dict[str, Any]:
        """Return the settings with which `load_proposer` makes `proposer` draft as in the engine.

        `target` is the target's text configuration; without one, it is a Llama's. Raises
        `UserError` for a drafter that the engine cannot serve, and for one that is not imitated
        here.
        """
        kind = kind_drafted_by(proposer)
        if kind not in self._like.shapes:
            raise UserError(
                f"{self.name} takes no such drafter, or drafts with one of its own that is not "
                "imitated here"
            )
        if isinstance(proposer, EagleProposer | DFlashProposer):
            drafter = proposer.drafter
            family = "llama" if target is None else target.model_type
            numbers = {} if target is None else numbers_of(target)
            facts = DrafterFacts(drafter, family, drafter.shape.vocab_size, numbers)
            if (reason := ENGINES[self.name].obstacle(facts)) is not None:
                raise UserError(f"{self.name} cannot serve this drafter: {reason}")
        return self._like.shapes[kind](proposer, self.settings)


def kind_drafted_by(proposer: Proposer) -> str:
    """Return the kind of a proposer's drafter; `ngram`, or empty for what no engine has."""
    if isinstance(proposer, EagleProposer | DFlashProposer):
        return proposer.drafter.kind
    kinds = {DraftModelProposer: "draft_model", MedusaProposer: "medusa", NgramLookup: "ngram"}
    return kinds.get(type(proposer), "")


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
    given = Given(without_tree(spec, tuple(setting)), f"{AS_IN}{engine.label}")
    rule = engine.rule(proposer)
    name = proposer.name + given.suffix
    shaped = load_proposer(spec, target, silent, setting)
    return ChosenWay(name, lambda: shaped, setting, spec, given, rule)
