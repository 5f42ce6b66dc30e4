"""Drafters as a serving engine would use them: its shape, drafts and rule in draftsmith's loop.

Which engine takes which drafter, and with what defaults, is as of vLLM 0.32, SGLang 0.5 and
llama.cpp of late 2026. Engines change, so every number can be given as a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...heads.errors import UserError
from ...heads.exchange.exports import block_obstacle, eagle_obstacle
from ..decode import Generation, Request, generate
from ..drafters import Given, load_proposer, parse_spec, without_tree
from ..proposer import Proposer
from ..proposers.dflash import DFlashProposer
from ..proposers.draft_model import DraftModelProposer
from ..proposers.eagle import EagleProposer
from ..proposers.medusa import MedusaProposer
from ..proposers.ngram import NgramLookup
from ..settings import Rule, Sampling
from ..targets.target import Target
from ..tree_settings import positive

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"drafts": 3, "draws": "greedy", "verify": "standard"},
    "sglang": {"steps": None, "topk": None, "tokens": None},
    "llamacpp": {"drafts": 3},
}
"""Settings of each engine and their defaults.

vLLM: num_speculative_tokens (for which vLLM itself has no default), draft_sample_method and
rejection_sample_method. SGLang: speculative-num-steps, -eagle-topk and -num-draft-tokens; None is
SGLang's own default, which depends on the drafter. llama.cpp: its draft n-max.
"""


class Engine:
    """An engine's way to speculate."""

    def __init__(self, spec: str) -> None:
        """Read `spec`, an engine's name with settings such as vllm:drafts=5,draws=probabilistic.

        Raises `UserError` for an engine or a setting that is not known.
        """
        self.name, given = parse_spec(spec)
        self.label = spec
        if self.name not in ENGINES:
            raise UserError(f"unknown engine {self.name!r}; there are: {', '.join(ENGINES)}")
        if unknown := sorted(given.keys() - ENGINES[self.name].keys()):
            raise UserError(
                f"{self.name} has no setting {unknown[0]!r} here; there are: "
                f"{', '.join(ENGINES[self.name])}"
            )
        self.settings = ENGINES[self.name] | given
        for key in ("drafts", "steps", "topk"):
            if self.settings.get(key) is not None:
                positive(key, self.settings[key])
        if self.settings.get("tokens") is not None:
            positive("tokens", self.settings["tokens"], 2)  # the root and at least one draft
        if self.settings.get("draws", "greedy") not in ("greedy", "probabilistic"):
            raise UserError(
                f"vllm's draws are greedy or probabilistic, not {self.settings['draws']!r}"
            )
        if self.settings.get("verify", "standard") not in ("standard", "block"):
            raise UserError(f"vllm's verify is standard or block, not {self.settings['verify']!r}")

    def rule(self, kind: type) -> Rule:
        """Return the acceptance rule at T > 0 for proposers of the class `kind`.

        A greedy draft has a one-hot distribution, and every lossless rule accepts its token with
        the target's probability of it, as acceptance by match does. Drawn drafts are judged by
        vLLM's block verification or by its standard rejection, which for a chain is recursive
        rejection with one child a node (docs/verification.md#rejection-rules).
        """
        if self.settings.get("draws") == "probabilistic" and issubclass(
            kind, EagleProposer | DFlashProposer | DraftModelProposer
        ):
            return "rejection" if self.settings["verify"] == "block" else "recursive"
        return "match"

    def shape(self, proposer: Proposer, family: str = "llama") -> dict[str, Any]:
        """Return the settings with which `load_proposer` makes `proposer` draft as in the engine.

        `family` is the target's model type. Raises `UserError` for a drafter that the engine cannot
        serve, and for one that is not imitated here.
        """
        if isinstance(proposer, EagleProposer):
            reason = eagle_obstacle(self.name, proposer.drafter.shape, family)
            if self.name == "llamacpp" and proposer.drafter.kind == "eagle1":
                reason = "it knows EAGLE-3 only"
            if reason is not None:
                raise UserError(f"{self.name} cannot serve this drafter: {reason}")
        if isinstance(proposer, DFlashProposer):
            if (reason := block_obstacle(self.name, proposer.drafter, family)) is not None:
                raise UserError(f"{self.name} cannot serve this drafter: {reason}")
            return self._block(proposer)
        if self.name == "sglang":
            return self._sglang(proposer)
        drafts = self.settings["drafts"]
        if isinstance(proposer, EagleProposer | DraftModelProposer):
            return {"length": drafts, "width": 1}
        if isinstance(proposer, NgramLookup):
            return {"length": drafts}
        # vLLM 0.33 took Medusa out
        if isinstance(proposer, MedusaProposer) and self.name == "vllm":
            return {"length": min(drafts, proposer.longest), "width": 1}
        raise UserError(
            f"{self.name} takes no such drafter, or drafts with one of its own that is not "
            "imitated here"
        )

    def _block(self, proposer: DFlashProposer) -> dict[str, Any]:
        """Return the settings of a block drafter: a chain, and a block of just as many slots.

        SGLang drafts the whole block if `tokens` is not given. Raises `UserError` for SGLang's
        settings that do not apply to blocks.
        """
        requested = self.settings.get("drafts", proposer.longest)
        if self.name == "sglang":
            for key in ("steps", "topk"):
                if self.settings[key] is not None:
                    raise UserError(
                        f"sglang drafts a block in one step, as a chain; leave out {key}, tokens "
                        "says how many"
                    )
            if (tokens := self.settings["tokens"]) is not None:
                requested = tokens - 1  # SGLang's tokens count the root
        drafts = min(requested, proposer.longest)
        # Slots of a block see each other. An engine that drafts less runs a shorter block, and the
        # drafts of a shorter block are other ones than the first of a longer.
        return {"length": drafts, "width": 1, "slots": drafts + proposer.first_slot}

    def _sglang(self, proposer: Proposer) -> dict[str, Any]:
        """Return SGLang's settings of an EAGLE drafter or draft model; a chain where topk is 1.

        Elsewhere it is a tree of `tokens` nodes, the root counted. Raises `UserError` for other
        drafters and for too few tokens.
        """
        if not isinstance(proposer, EagleProposer | DraftModelProposer):
            raise UserError(
                "sglang takes no such drafter, or drafts with one of its own that is not imitated "
                "here"
            )
        steps, topk, tokens = (5, 4, 8) if isinstance(proposer, EagleProposer) else (3, 1, 4)
        steps = self.settings["steps"] or steps
        topk = self.settings["topk"] or topk
        if topk == 1:
            return {"length": steps, "width": 1}
        tokens = self.settings["tokens"] or max(tokens, steps + 1)
        if tokens <= steps:
            raise UserError(
                f"sglang: tokens count the root too; {steps} steps need at least {steps + 1}, not "
                f"{tokens}"
            )
        # the root has topk children; on each later level topk nodes have topk children each
        candidates = topk + (steps - 1) * topk**2
        return {"length": steps, "width": topk, "nodes": min(tokens - 1, candidates)}


class AsIn:
    """A drafter as a way to decode: with an engine's shape and rule, in draftsmith's loop."""

    def __init__(
        self, engine: Engine, spec: str, target: Target, warn: Callable[[str], None]
    ) -> None:
        """Load the drafter of `spec`. Raises `UserError` for one that the engine does not take."""
        # Loaded twice: the engine's settings follow from what the drafter is. The first time it
        # has its default tree, since the tree of `spec` is not used and need not fit.
        proposer = load_proposer(without_tree(spec), target, warn)
        self.spec = spec
        self.given = Given(without_tree(spec), f" as in {engine.label}")
        self.name = proposer.name + self.given.suffix
        self.setting = engine.shape(proposer, target.config.model_type)
        self._rule = engine.rule(type(proposer))
        self._target = target
        self._proposer = load_proposer(spec, target, lambda message: None, self.setting)

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """Return the reply to each request, as `decode.generate` does, under the engine's rule."""
        as_ruled = sampling if sampling.greedy else replace(sampling, rule=self._rule)
        return generate(self._target, self._proposer, requests, max_new_tokens, as_ruled)
