"""What serving engines count of their speculation: vLLM in Prometheus counters that all requests
share, SGLang in every reply.

vLLM: `drafts` are steps in which a request had a draft. A step without one (n-grams that find
nothing) is in no counter, so 1 + accepted / drafts can lie above the tokens a step. Drafts accepted
behind an end token count as accepted.

SGLang: `spec_verify_ct` are all verifications of a request. Its own `spec_accept_length` is
completion_tokens / spec_verify_ct, with the prefill's token in the numerator; its
`num_draft_tokens` counts the root, which the drafts here do not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
SPECULATION = "vllm:spec_decode_num_"
DEFINITIONS = {
    "vllm": "1 + accepted / drafts of its counters: without steps that had no draft, with drafts "
    "accepted behind a reply's end",
    "sglang": "1 + accepted / spec_verify_ct of our replies; its own spec_accept_length has the "
    "prefill's token in the numerator",
    "sglang, tokens": "(completion_tokens - 1 for the prefill's) / spec_verify_ct of our replies",
    "none": "1: the server does not speculate",
    "unknown": "not known: the server's replies say nothing of its speculation",
}


@dataclass
class Counters:
    """A reading of vLLM's `/metrics`, summed over engines; or, of two readings, what came between
    them."""

    drafts: int | None = None
    """`None` where the server does not speculate."""
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    """Drafts accepted at depth 1, 2, .."""
    generated: int | None = None
    """Tokens written, whoever asked for them; `None` where the server does not count at all."""
    running: int = 0
    """Requests in the engine at this moment, waiting ones included."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache, of `prefix_queries`."""
    prefix_queries: int = 0

    def since(self, before: Counters) -> Counters:
        """What was counted since a reading."""
        drafts = None if self.drafts is None else self.drafts - (before.drafts or 0)
        generated = None if self.generated is None else self.generated - (before.generated or 0)
        earlier = before.by_position + [0] * len(self.by_position)
        return Counters(
            drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [after - b for after, b in zip(self.by_position, earlier, strict=False)],
            generated,
            self.running,
            self.prefix_hits - before.prefix_hits,
            self.prefix_queries - before.prefix_queries,
        )


def read_counters(text: str) -> Counters:
    """vLLM's counters from Prometheus text; names with and without the `_total` that clients of
    Prometheus add."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        if (found := SAMPLE.match(line)) is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        name = found["name"].removesuffix("_total")
        sums[name] = sums.get(name, 0) + int(value)
        if name == f"{SPECULATION}accepted_tokens_per_pos" and (
            place := POSITION.search(found["labels"] or "")
        ):
            positions[int(place[1])] = positions.get(int(place[1]), 0) + int(value)
    return Counters(
        sums.get(f"{SPECULATION}drafts"),
        sums.get(f"{SPECULATION}draft_tokens", 0),
        sums.get(f"{SPECULATION}accepted_tokens", 0),
        [positions.get(i, 0) for i in range(max(positions, default=-1) + 1)],
        sums.get("vllm:generation_tokens"),
        sums.get("vllm:num_requests_running", 0) + sums.get("vllm:num_requests_waiting", 0),
        sums.get("vllm:prefix_cache_hits", 0),
        sums.get("vllm:prefix_cache_queries", 0),
    )


@dataclass
class Speculation:
    """What became of the drafts while our requests ran."""

    counted: str
    """How tau is counted: a key of `DEFINITIONS`."""
    tau: float | None
    """The engine's tau, as `counted` says."""
    drafts: int | None = None
    drafted: int | None = None
    """Drafted tokens, roots excluded."""
    accepted: int | None = None
    survival: list[float] = field(default_factory=list)
    """Share of the drafts of which at least d tokens were accepted, d = 1, 2, .."""
    rounds: int | None = None
    """Decoding steps of our requests, those without a draft included; from vLLM's a lower bound
    (see `tau_kept`)."""
    tau_kept: float | None = None
    """Tokens kept per decoding step, the prefill's excluded: what `draftsmith evaluate` calls tau
    of a local drafter."""
    warnings: list[str] = field(default_factory=list)


def of_vllm(
    delta: Counters, tokens: int, replies: int, chunks: int, ran_before: int
) -> Speculation:
    """What vLLM counted while `replies` of ours came, of `tokens` in `chunks`; `ran_before`:
    requests under way before.

    The steps are not counted. There were at least as many as drafts; as chunks behind the first of
    each reply (a slow reader gets two steps in one chunk); and as tokens that neither a prefill nor
    an accepted draft gave.
    """
    if delta.drafts is None:
        found = Speculation("none", 1.0, rounds=tokens - replies, tau_kept=1.0)
    else:
        tau = 1 + delta.accepted / delta.drafts if delta.drafts else 1.0
        survival = [count / delta.drafts for count in delta.by_position] if delta.drafts else []
        rounds = max(delta.drafts, chunks - replies, tokens - replies - delta.accepted)
        found = Speculation(
            "vllm", tau, delta.drafts, delta.drafted, delta.accepted, survival, rounds
        )
        if rounds:
            found.tau_kept = (tokens - replies) / rounds
    found.warnings = _shared(delta, tokens, replies, ran_before)
    if found.warnings and found.counted == "vllm":  # steps of others are among the drafts
        found.rounds = found.tau_kept = None
    if delta.prefix_hits > 0.1 * delta.prefix_queries > 0:
        share = delta.prefix_hits / delta.prefix_queries
        found.warnings.append(
            f"{share:.0%} of the prompts' tokens came from the server's prefix cache, which "
            "flatters TTFT"
        )
    return found


def _shared(delta: Counters, tokens: int, replies: int, ran_before: int) -> list[str]:
    """A line where somebody else's requests are in the counters."""
    if ran_before:
        return [
            f"{ran_before} requests of others were under way before ours: its counters, and tau, "
            "are of theirs too"
        ]
    if delta.generated is not None and delta.generated != tokens:
        return [
            f"its counters hold {delta.generated} tokens, our requests got {tokens}: tau is of "
            "other requests too"
        ]
    emitted = (delta.drafts or 0) + delta.accepted
    # each reply may end within its last draft
    most = tokens - replies + replies * len(delta.by_position)
    if emitted > most:
        return [
            f"its drafts stand for {emitted} tokens, our requests got {tokens}: tau is of other "
            "requests too"
        ]
    return []


# newest first
ACCEPTED_NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED_NAMES = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM_NAMES = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def of_sglang(
    metas: Iterable[Mapping[str, Any]], tokens: int, speculates: bool | None
) -> Speculation:
    """What the `meta_info` of our replies, `tokens` in all, says; `speculates`: what the server
    says of itself.

    A reply of one token has no verification, and then none of these fields.
    """
    metas = list(metas)
    verified = [meta for meta in metas if meta.get("spec_verify_ct")]
    rounds = sum(meta["spec_verify_ct"] for meta in verified)
    if not rounds:
        if speculates:
            why = (
                "the server speculates, but its replies have no spec_verify_ct; use a newer SGLang"
            )
            return Speculation("unknown", None, warnings=[why])
        return Speculation("none", 1.0, rounds=tokens - len(metas), tau_kept=1.0)
    kept = (tokens - len(metas)) / rounds
    accepted, drafted = (_sum(verified, names) for names in (ACCEPTED_NAMES, DRAFTED_NAMES))
    if accepted is None:
        return Speculation(
            "sglang, tokens", kept, rounds, drafted, None, rounds=rounds, tau_kept=kept
        )
    survival = []
    histograms = [
        next((meta[name] for name in HISTOGRAM_NAMES if meta.get(name)), None) for meta in verified
    ]
    if all(histograms):
        longest = max(len(h) for h in histograms if h)
        survival = [sum(sum(h[d:]) for h in histograms if h) / rounds for d in range(1, longest)]
    return Speculation(
        "sglang", 1 + accepted / rounds, rounds, drafted, accepted, survival, rounds, kept
    )


def _sum(metas: list[Mapping[str, Any]], names: tuple[str, ...]) -> int | None:
    """The sum over replies of the first of `names` that each has; `None` where one has none."""
    values = [
        next((meta[name] for name in names if meta.get(name) is not None), None) for meta in metas
    ]
    return sum(v for v in values if v is not None) if None not in values else None
