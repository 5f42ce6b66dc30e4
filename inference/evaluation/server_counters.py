"""Counters of speculation in serving engines, and the figures that follow from them.

vLLM and llama.cpp have Prometheus counters that all requests share. They omit steps without a draft
(n-grams without a match), so 1 + accepted / drafts can exceed the tokens emitted per step, and
drafts accepted after an end token count as accepted. SGLang sends its counts with every reply.
docs/metrics.md#servers-counters compares both with draftsmith's own definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any

from ...heads.exchange.engines.engine import CounterNames, ReplyCounts, ServerProtocol
from ...heads.files import JsonObject
from ..conversations.prompts import Prompt
from .results import Speculation

# A line of Prometheus text: name{labels} value, and perhaps a time. Labels (a model's name, for
# example) may contain braces, so they reach to the last closing one.
SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
# The server is not trusted: three digits bound the length of the list of positions.
POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
SPECULATION = "spec_decode_num_"


@dataclass
class ServerReply:
    """The server's reply to one prompt, and its times: `time.perf_counter` in seconds."""

    prompt: Prompt
    turn: int
    """Number of the turn in its conversation, from 0."""
    sent: float
    ids: list[int] | None = None
    """Token ids, the end token included; None if the server does not send them."""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """The time at which each chunk with tokens arrived."""
    finish: str = ""
    """The engine's reason for the end of the reply; empty until it has ended."""
    meta: JsonObject = field(default_factory=dict)
    """Counts that came with the reply; of several chunks the last value of each key."""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first chunk, the server's queue included."""
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; `None` for a reply of one token."""
        if self.tokens <= 1:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)


@dataclass
class Counters:
    """A reading of `/metrics`, summed over a server's engines, or a difference of two readings."""

    drafts: int | None = None
    """Steps in which a request had a draft; `None` where the server does not speculate."""
    drafted: int = 0
    """Drafted tokens, roots excluded."""
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    """Drafts accepted at depth 1, 2, .."""
    generated: int | None = None
    """Tokens written for all clients; `None` where the server does not count them."""
    running: int = 0
    """Requests in the engine at the moment of the reading, waiting ones included."""

    def since(self, before: Counters) -> Counters:
        """Return what was counted since the reading `before`; `running` stays that of this one."""
        # Positions that the earlier reading lacks were 0 then; `map` drops surplus zeros.
        earlier = before.by_position + [0] * len(self.by_position)
        return Counters(
            drafts=None if self.drafts is None else self.drafts - (before.drafts or 0),
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            by_position=list(map(sub, self.by_position, earlier)),
            generated=None if self.generated is None else self.generated - (before.generated or 0),
            running=self.running,
        )


def read_counters(text: str, names: CounterNames) -> Counters:
    """Return the counters of an engine from Prometheus text; other metrics are ignored."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        if (sample := SAMPLE.match(line)) is None:
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        name = sample["name"].removesuffix("_total").removeprefix(names.prefix)
        # The engines of one server differ in a label only; their counts are summed.
        sums[name] = sums.get(name, 0) + int(value)
        if name == f"{SPECULATION}accepted_tokens_per_pos" and (
            position := POSITION.search(sample["labels"] or "")
        ):
            positions[int(position[1])] = positions.get(int(position[1]), 0) + int(value)
    return Counters(
        sums.get(f"{SPECULATION}drafts"),
        sums.get(f"{SPECULATION}draft_tokens", 0),
        sums.get(f"{SPECULATION}accepted_tokens", 0),
        [positions.get(i, 0) for i in range(max(positions, default=-1) + 1)],
        sums.get(names.generated),
        sum(sums.get(name, 0) for name in names.running),
    )


def speculation_from_counters(
    protocol: ServerProtocol,
    before: Counters,
    after: Counters,
    replies: Sequence[ServerReply],
    speculates: bool | None = None,
) -> Speculation:
    """Return the figures from an engine's counters `before` and `after` the replies.

    `speculates` is the server's own answer, None if it gave none. Engines do not count steps. Their
    number is estimated by the largest of its lower bounds: the drafts; the tokens that came neither
    from a prefill nor from an accepted draft; and, if each step sends a chunk, the chunks after the
    first of each reply (a slow reader gets two steps in one chunk).
    """
    assert isinstance(protocol.counts, CounterNames)
    delta, later = after.since(before), sum(reply.tokens - 1 for reply in replies)
    # llama.cpp has counters, which stay 0, without speculation too.
    if delta.drafts is None or speculates is False:
        speculation = no_speculation(later)
    else:
        rounds = max(delta.drafts, later - delta.accepted)
        if protocol.counts.chunk_of_step:
            rounds = max(rounds, sum(len(reply.arrivals) - 1 for reply in replies))
        drafts = delta.drafts or 1  # without drafts nothing was accepted
        speculation = Speculation(
            speculates=True,
            tau_definition=protocol.definition,
            tau_incl_bonus=1 + delta.accepted / drafts,
            tau_emitted=later / rounds if rounds else None,
            survival=[count / drafts for count in delta.by_position] if delta.drafts else [],
            drafts=delta.drafts,
            drafted=delta.drafted,
            accepted=delta.accepted,
            rounds=rounds,
        )
    if (shared := _shared(delta, replies, before.running)) is not None:
        speculation.warnings = [f"{shared}: tau is of other requests too"]
        # The counters include other clients' steps, `later` only the measured requests' tokens.
        if speculation.speculates:
            speculation.rounds = speculation.tau_emitted = None
    return speculation


def _shared(delta: Counters, replies: Sequence[ServerReply], ran_before: int) -> str | None:
    """Return the evidence that the counters include other clients' requests, or None."""
    tokens = sum(reply.tokens for reply in replies)
    if ran_before:
        return f"{ran_before} requests of others were under way before the measurement"
    if delta.generated is not None and delta.generated != tokens:
        return f"its counters hold {delta.generated} tokens, draftsmith's requests got {tokens}"
    return None


def no_speculation(steps: int) -> Speculation:
    """Return the figures of a server that writes a token in each of its `steps`."""
    return Speculation(
        speculates=False,
        tau_definition="1: the server does not speculate",
        tau_incl_bonus=1.0,
        tau_emitted=1.0,
        rounds=steps,
    )


def speculation_from_replies(
    protocol: ServerProtocol, replies: Sequence[ServerReply], speculates: bool | None
) -> Speculation:
    """Return the figures from the counts that came with the replies.

    `speculates` is the server's own answer, None if it gave none. A reply of one token, which has
    no verification, has no counts.
    """
    names = protocol.counts
    assert isinstance(names, ReplyCounts)
    verified = [reply.meta for reply in replies if reply.meta.get(names.rounds)]
    rounds = sum(meta[names.rounds] for meta in verified)
    # One token of each reply is the prefill's and belongs to no round.
    later = sum(reply.tokens - 1 for reply in replies)
    if not rounds and speculates:
        why = f"the server speculates, but its replies have no {names.rounds}; use a newer version"
        return Speculation(tau_incl_bonus=None, tau_definition="not known", warnings=[why])
    if not rounds:
        return no_speculation(later)
    drafted, accepted = (_firsts(verified, wanted) for wanted in (names.drafted, names.accepted))
    found = Speculation(
        speculates=True,
        tau_definition=names.definition,
        tau_incl_bonus=later / rounds,
        tau_emitted=later / rounds,
        drafts=rounds,
        drafted=None if drafted is None else sum(drafted),
        rounds=rounds,
    )
    if accepted is not None:
        found.accepted = sum(accepted)
        found.tau_definition = protocol.definition
        found.tau_incl_bonus = 1 + found.accepted / rounds
        histograms = _firsts(verified, names.histograms) or [[]]
        depths = range(1, max(map(len, histograms)))
        reached = [sum(sum(each[depth:]) for each in histograms) for depth in depths]
        found.survival = [count / rounds for count in reached]
    return found


def _firsts(metas: list[JsonObject], names: tuple[str, ...]) -> list[Any] | None:
    """Return the first of the counts `names` that each reply has; None if a reply has none."""
    found = []
    for meta in metas:
        present = [meta[name] for name in names if meta.get(name) not in (None, [])]
        if not present:
            return None
        found.append(present[0])
    return found
