"""Settings of every command that decodes: where the target is, and how the next token is
chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ..heads.errors import UserError

COLDEST = 1e-5
Rule = Literal["auto", "coupled", "match", "rejection", "recursive", "lossy-typical"]


def check_url(url: str | None, option: str) -> None:
    """Demand an address of a server, such as http://localhost:8000/v1; None is none. Raises
    `UserError`."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or above 65535; a half-written IPv6 address
        sound = False
    if not sound:
        raise UserError(
            f"{option} {url!r} is no address of a server; write it as http://localhost:8000/v1"
        )


BadRows = Literal["stop", "skip"]
"""What a malformed row does: end the command, which names it, or be named and left out."""


@dataclass
class TargetConfig:
    """Where the target is and how it is loaded."""

    path: str
    """Model folder, or its name on the hub. `--target X` is short for `--target.path X`."""
    dtype: str = "auto"
    """auto (as stored, but float32 on a CPU), float32, bfloat16 or float16."""
    device: str = "auto"
    """auto (cuda if there is one, else cpu), cpu, cuda or cuda:N."""
    adapter: str | None = None
    """LoRA adapter folder, merged into the weights on load (needs peft)."""
    attention: str | None = None
    """Attention implementation to ask transformers for; its own choice if not given."""
    spread: Literal["whole", "fsdp", "tensor", "devices"] = "whole"
    """whole: a copy on every rank; fsdp: each decoder layer shared by all ranks; tensor: every
    layer split between them (tensor parallelism, where the model has a plan); devices: laid over
    this process's GPUs, for one process."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources that you trust."""


@dataclass(frozen=True)
class Sampling:
    """How to sample, and which acceptance rule keeps the target's distribution. Raises `UserError`
    for values out of range."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Keep the so many best tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float | None = None
    """Penalise tokens that the text holds already (CTRL, arXiv 1909.05858); 1 does not. The
    target's own setting if not given."""
    seed: int = 0
    """With the request's id and sample index, the seed of all its noise."""
    rule: Rule = "auto"
    """At T > 0: coupled (auto; the text that plain sampling with the same noise writes, whatever
    the drafter), match (the same text, but drafts are the drafter's best tokens and know nothing of
    the noise, as in most engines), rejection (block verification of a sampled chain, traversal of a
    sampled tree, match of a deterministic draft), recursive (recursive rejection instead of
    traversal), lossy-typical (Medusa's typical acceptance: NOT the target's distribution)."""

    def __post_init__(self) -> None:
        def demand(holds: bool, what: str) -> None:
            if not holds:
                raise UserError(what)

        for name, kind in (
            ("temperature", Real),
            ("top_p", Real),
            ("min_p", Real),
            ("top_k", Integral),
            ("seed", Integral),
            ("repetition_penalty", Real),
        ):
            value = getattr(self, name)
            if name == "repetition_penalty" and value is None:
                continue
            demand(
                isinstance(value, kind),
                f"{name} must be a {'number' if kind is Real else 'whole number'}, not {value!r}",
            )
        demand(
            0 <= self.temperature < float("inf"),
            f"temperature must be 0 or more, not {self.temperature}",
        )
        cold = 0 < self.temperature < COLDEST  # logits divided by it leave the range of float32
        demand(
            not cold,
            f"temperature must be 0 (greedy) or at least {COLDEST:g}, not {self.temperature}",
        )
        demand(self.top_k >= 0, f"top_k must be 0 (all) or more, not {self.top_k}")
        demand(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        demand(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}")
        demand(
            self.repetition_penalty is None or self.repetition_penalty > 0,
            f"repetition_penalty must be above 0, not {self.repetition_penalty}",
        )
        truncates = [
            name
            for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
            if getattr(self, name) != off
        ]
        demand(
            not (self.greedy and truncates),
            f"{', '.join(truncates)} means nothing at temperature 0; give a temperature too",
        )
        demand(
            self.rule in get_args(Rule),
            f"unknown rule {self.rule!r}; use one of {', '.join(get_args(Rule))}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's distribution; greedy decoding has, whatever the
        rule."""
        return self.greedy or self.rule != "lossy-typical"

    @property
    def compares_distributions(self) -> bool:
        """Whether the rule compares distributions, so that drafts have to be fresh draws from a
        distribution that is kept."""
        return not self.greedy and self.rule in ("rejection", "recursive")

    @property
    def coupled(self) -> bool:
        return not self.greedy and self.rule in ("auto", "coupled")

    @cached_property
    def history_processor(self) -> Any | None:
        """What needs the text so far; `None` if nothing does."""
        # seconds, which a help text need not take
        from transformers import RepetitionPenaltyLogitsProcessor

        penalty = self.repetition_penalty
        return RepetitionPenaltyLogitsProcessor(penalty) if penalty not in (None, 1) else None

    @cached_property
    def warpers(self) -> Any:
        """A `LogitsProcessorList` of what looks at one row of scores only, in the order of
        transformers' `generate`."""
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found: list[Any] = []
        if not self.greedy:
            if self.temperature != 1:
                found.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                found.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                found.append(TopPLogitsWarper(self.top_p))
            if self.min_p > 0:
                found.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(found)

    def resolved(self, own_penalty: float) -> Sampling:
        """With the target's own repetition penalty, if none was given."""
        return (
            self
            if self.repetition_penalty is not None
            else replace(self, repetition_penalty=own_penalty)
        )


GREEDY = Sampling()
