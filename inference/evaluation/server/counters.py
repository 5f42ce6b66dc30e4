"""Counters of speculation in serving engines, and the figures that follow from them.

vLLM and llama.cpp have Prometheus counters that all requests share; a vLLM can be asked to send
those of a request with its reply, and then these are taken. A step without a draft (n-grams
that find nothing) is in none of them, so 1 + accepted / drafts can be above the tokens emitted per
step, and drafts accepted after an end token count as accepted. SGLang sends its counts with every
reply. docs/metrics.md#servers-counters compares both with draftsmith's own definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any

from ....heads.exchange.engines.servers import CounterNames, ReplyCounts, ServerProtocol
from ....heads.files import JsonObject

# A line of Prometheus text: name{labels} value, and perhaps a time. Labels may contain braces (a
# model's name, say), so they reach to the last closing one.
SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
# A server may say anything: a position of at most three digits bounds the list of positions.
POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
NO_SPECULATION = "1: the server does not speculate"
SPECULATION = "spec_decode_num_"
UNKNOWN = "not known: the server's replies say nothing of its speculation"


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
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache, of `prefix_queries` that were looked up."""
    prefix_queries: int = 0

    def since(self, before: Counters) -> Counters:
        """Return what was counted since the reading `before`; `running` stays that of this one."""
        # Positions that the earlier reading does not have were 0 then; zeros too many are cut by
        # `map`.
        earlier = before.by_position + [0] * len(self.by_position)
        return Counters(
            drafts=None if self.drafts is None else self.drafts - (before.drafts or 0),
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            by_position=list(map(sub, self.by_position, earlier)),
            generated=None if self.generated is None else self.generated - (before.generated or 0),
            running=self.running,
            prefix_hits=self.prefix_hits - before.prefix_hits,
            prefix_queries=self.prefix_queries - before.prefix_queries,
        )


def counted_in_replies(names: ReplyCounts | None, metas: Sequence[JsonObject]) -> Counters | None:
    """Return what came with the measured replies themselves; None where nothing did.

    A reply without a draft has no counts.
    """
    counted = [meta for meta in metas if names is not None and names.rounds in meta]
    if names is None or not counted:
        return None
    drafted = _firsts(counted, names.drafted) or []
    accepted = _firsts(counted, names.accepted) or []
    histograms = _firsts(counted, names.histograms) or []
    deepest = max(map(len, histograms), default=1)
    return Counters(
        drafts=sum(meta[names.rounds] for meta in counted),
        drafted=sum(drafted),
        accepted=sum(accepted),
        by_position=[sum(sum(each[depth:]) for each in histograms) for depth in range(1, deepest)],
    )


def read_counters(text: str, names: CounterNames) -> Counters:
    """Return the counters of an engine from Prometheus text; the rest is passed over."""
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
        # The engines of one server differ in a label only; their counts are added up.
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
        sums.get(names.cached, 0),
        sum(sums.get(name, 0) for name in names.queried),
    )


@dataclass
class Speculation:
    """Figures of an engine's drafts during the measured requests; `None` for what is not known.

    The fields are those of `ServerFigures`.
    """

    speculates: bool | None
    tau_definition: str
    tau_incl_bonus: float | None
    """The engine's tau."""
    drafts: int | None = None
    drafted: int | None = None
    """Drafted tokens, roots excluded."""
    accepted: int | None = None
    survival: list[float] = field(default_factory=list)
    """Share of the drafts of which at least d tokens were accepted, d = 1, 2, .."""
    rounds: int | None = None
    """Decoding steps of the measured requests, those without a draft included; of vLLM and
    llama.cpp a lower bound, see `of_counters`."""
    tau_emitted: float | None = None
    """Tokens emitted per decoding step, the prefill's excluded: what `draftsmith evaluate` calls
    tau of a local drafter."""
    warnings: list[str] = field(default_factory=list)


def of_counters(
    protocol: ServerProtocol,
    delta: Counters,
    tokens: int,
    replies: int,
    chunks: int,
    ran_before: int,
) -> Speculation:
    """Return the figures that an engine's counters give for the measured requests.

    `delta` is what was counted while `replies` came, which have `tokens` in all and arrived in
    `chunks`; `ran_before` are the requests under way before the first of them.

    None counts steps. There were at least as many as drafts; where a step sends a chunk, as chunks
    after the first of each reply (a slow reader gets two steps in one chunk); and as tokens that
    neither a prefill nor an accepted draft gave. The largest of these is taken.
    """
    assert isinstance(protocol.counts, CounterNames)
    if delta.drafts is None:
        speculation = no_speculation(tokens - replies)
    else:
        tau = 1 + delta.accepted / delta.drafts if delta.drafts else 1.0
        survival = [count / delta.drafts for count in delta.by_position] if delta.drafts else []
        rounds = max(delta.drafts, tokens - replies - delta.accepted)
        if protocol.counts.chunk_of_step:
            rounds = max(rounds, chunks - replies)
        speculation = Speculation(
            True,
            protocol.definition,
            tau,
            delta.drafts,
            delta.drafted,
            delta.accepted,
            survival,
            rounds,
            tau_emitted=(tokens - replies) / rounds if rounds else None,
        )
    speculation.warnings = _shared(delta, tokens, replies, ran_before)
    # The counters hold steps of other clients, while `tokens` are those of the measured requests.
    if speculation.warnings and speculation.speculates:
        speculation.rounds = speculation.tau_emitted = None
    if delta.prefix_hits > 0.1 * delta.prefix_queries > 0:
        share = delta.prefix_hits / delta.prefix_queries
        speculation.warnings.append(
            f"{share:.0%} of the prompts' tokens came from the server's prefix cache, which "
            "flatters TTFT"
        )
    return speculation


def _shared(delta: Counters, tokens: int, replies: int, ran_before: int) -> list[str]:
    """Return a warning if other clients' requests are in the counters, else nothing."""
    if ran_before:
        return [
            f"{ran_before} requests of others were under way before the measurement: its counters, "
            "and tau, are of theirs too"
        ]
    if delta.generated is not None and delta.generated != tokens:
        return [
            f"its counters hold {delta.generated} tokens, draftsmith's requests got {tokens}: tau "
            "is of other requests too"
        ]
    emitted = (delta.drafts or 0) + delta.accepted
    # A reply may end within its last draft, whose tokens after the end count as accepted.
    most = tokens - replies + replies * len(delta.by_position)
    if emitted > most:
        return [
            f"its drafts stand for {emitted} tokens, draftsmith's requests got {tokens}: tau is of "
            "other requests too"
        ]
    return []


def no_speculation(steps: int) -> Speculation:
    """Return the figures of a server that writes a token in each of its `steps`."""
    return Speculation(False, NO_SPECULATION, 1.0, rounds=steps, tau_emitted=1.0)


def of_replies(
    protocol: ServerProtocol, metas: Sequence[JsonObject], tokens: int, speculates: bool | None
) -> Speculation:
    """Return the figures that the counts `metas`, which came with the replies, give.

    `tokens` are those of all replies; `speculates` is the server's own answer, `None` if it gave
    none. A reply of one token has no verification, and then no count of speculation.
    """
    names = protocol.counts
    assert isinstance(names, ReplyCounts)
    verified = [meta for meta in metas if meta.get(names.rounds)]
    rounds = sum(meta[names.rounds] for meta in verified)
    if not rounds:
        if speculates:
            why = (
                f"the server speculates, but its replies have no {names.rounds}; use a newer "
                "version"
            )
            return Speculation(None, UNKNOWN, None, warnings=[why])
        return no_speculation(tokens - len(metas))
    # One token of each reply is the prefill's and belongs to no round.
    tau_emitted = (tokens - len(metas)) / rounds
    drafted, accepted = (_firsts(verified, wanted) for wanted in (names.drafted, names.accepted))
    found = Speculation(
        True, names.definition, tau_emitted, rounds, rounds=rounds, tau_emitted=tau_emitted
    )
    if drafted is not None:
        found.drafted = sum(drafted)
    if accepted is not None:
        found.accepted = sum(accepted)
        found.tau_definition = protocol.definition
        found.tau_incl_bonus = 1 + found.accepted / rounds
        histograms = _firsts(verified, names.histograms) or [[]]
        for depth in range(1, max(map(len, histograms))):
            survived = sum(sum(histogram[depth:]) for histogram in histograms)
            found.survival.append(survived / rounds)
    return found


def _firsts(metas: list[JsonObject], names: tuple[str, ...]) -> list[Any] | None:
    """Return the first of the counts `names` that each reply has.

    `None` is returned where a reply has none of them: a sum over the others would be too small.
    """
    found = []
    for meta in metas:
        present = [meta[name] for name in names if meta.get(name) not in (None, [])]
        if not present:
            return None
        found.append(present[0])
    return found
