"""What a drafter would do in a serving engine: that engine's shape, drafts and acceptance rule, in
our loop.

Which engine takes which drafter, and with what defaults, is as of vLLM 0.32, SGLang 0.5 and
llama.cpp of late 2026; engines change, so every number can be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...heads.errors import UserError
from ...heads.exchange.exports import block_obstacle, eagle_obstacle
from ..decode import Generation, Request, generate
from ..proposer import Proposer, load_proposer, parse_spec, positive, without_tree
from ..proposers.dflash import DFlashProposer
from ..proposers.draft_model import DraftModelProposer
from ..proposers.eagle import EagleProposer
from ..proposers.medusa import MedusaProposer
from ..proposers.ngram import NgramLookup
from ..settings import Rule, Sampling
from ..target import Target

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"drafts": 3, "draws": "greedy", "verify": "standard"},
    "sglang": {"steps": None, "topk": None, "tokens": None},
    "llamacpp": {"drafts": 3},
}
"""Settings and their defaults: vLLM's num_speculative_tokens (which it wants from you),
draft_sample_method and rejection_sample_method; SGLang's speculative-num-steps, -eagle-topk and
-num-draft-tokens; llama.cpp's draft n-max."""


class Engine:
    """An engine's way to speculate. `spec`: its name, settings after a colon, such as
    vllm:drafts=5,draws=probabilistic."""

    def __init__(self, spec: str) -> None:
        """Raises `UserError` for an engine or a setting that is not known."""
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
            positive("tokens", self.settings["tokens"], 2)
        if self.settings.get("draws", "greedy") not in ("greedy", "probabilistic"):
            raise UserError(
                f"vllm's draws are greedy or probabilistic, not {self.settings['draws']!r}"
            )
        if self.settings.get("verify", "standard") not in ("standard", "block"):
            raise UserError(f"vllm's verify is standard or block, not {self.settings['verify']!r}")

    def rule(self, kind: type) -> Rule:
        """The rule at T > 0. Greedy drafts are one-hot distributions, of which all lossless rules
        accept alike: match.

        Standard rejection of a drawn chain is recursive rejection with one child a node.
        """
        if self.settings.get("draws") == "probabilistic" and issubclass(
            kind, EagleProposer | DFlashProposer | DraftModelProposer
        ):
            return "rejection" if self.settings["verify"] == "block" else "recursive"
        return "match"

    def shape(self, proposer: Proposer, family: str = "llama") -> dict[str, Any]:
        """The settings, for `load_proposer`, of `proposer` as it would draft there. Raises
        `UserError` if it does not.

        `family`: the target's model type.
        """
        if isinstance(proposer, EagleProposer):
            reason = eagle_obstacle(self.name, proposer.drafter_shape, family)
            if self.name == "llamacpp" and proposer.drafter_shape.version == 1:
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
        if isinstance(proposer, MedusaProposer) and self.name == "vllm":  # taken out in 0.33
            return {"tree": "chain", "nodes": min(drafts, proposer.heads)}
        raise UserError(
            f"{self.name} takes no such drafter, or drafts with one of its own that is not "
            "imitated here"
        )

    def _block(self, proposer: DFlashProposer) -> dict[str, Any]:
        """A chain of as many drafts as are asked for, from a block that is no longer than they
        need: all of it in SGLang."""
        asked = self.settings.get("drafts", proposer.longest)
        if self.name == "sglang":
            for key in ("steps", "topk"):
                if self.settings[key] is not None:
                    raise UserError(
                        f"sglang drafts a block in one step, as a chain; leave out {key}, tokens "
                        "says how many"
                    )
            if (tokens := self.settings["tokens"]) is not None:
                asked = tokens - 1
        drafts = min(asked, proposer.longest)
        return {"length": drafts, "width": 1, "slots": drafts + proposer.first_slot}

    def _sglang(self, proposer: Proposer) -> dict[str, Any]:
        """A tree of `tokens` with the root for EAGLE; a chain for small models, and for EAGLE where
        topk is 1."""
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
        return {
            "length": steps,
            "width": topk,
            "nodes": min(tokens - 1, topk + (steps - 1) * topk**2),
        }


class AsIn:
    """A drafter as a way to decode: an engine's shape and rule in our loop."""

    def __init__(
        self, engine: Engine, spec: str, target: Target, warn: Callable[[str], None]
    ) -> None:
        """Raises `UserError` for a drafter that the engine does not take."""
        proposer = load_proposer(without_tree(spec), target, warn)
        self.spec = spec
        self.name = f"{proposer.name} as in {engine.label}"
        self.setting = engine.shape(proposer, target.config.model_type)
        self._rule = engine.rule(type(proposer))
        self._target = target
        self._proposer = load_proposer(spec, target, lambda message: None, self.setting)

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """As `decode.generate`."""
        as_ruled = sampling if sampling.greedy else replace(sampling, rule=self._rule)
        return generate(self._target, self._proposer, requests, max_new_tokens, as_ruled)
