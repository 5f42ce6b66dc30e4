"""Counters of speculation in serving engines, and the figures that follow from them.

vLLM has Prometheus counters that all requests share. Its `drafts` are the steps in which a request
had a draft. A step without one (n-grams that find nothing) is in no counter, so 1 + accepted /
drafts can be above the tokens emitted per step. Drafts accepted behind an end token count as
accepted. llama.cpp has the same counters under its own prefix, also where it does not speculate.

SGLang sends its counts with every reply. `spec_verify_ct` are all verifications of a request. Its
own `spec_accept_length` is completion_tokens / spec_verify_ct, with the prefill's token in the
numerator; its option `--speculative-num-draft-tokens` counts the root, which the drafts here do
not.

docs/metrics.md#servers-counters compares both with draftsmith's own definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ....heads.files import JsonObject

# A line of Prometheus text: name{labels} value, and perhaps a time. Labels may contain braces (a
# model's name, say), so they reach to the last closing one.
SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
# A server may say anything: a position of at most three digits bounds the list of positions.
POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
SPECULATION = re.compile(r"^(vllm|llamacpp):spec_decode_num_")
DEFINITIONS = {
    "vllm": "1 + accepted / drafts of its counters: without steps that had no draft, with drafts "
    "accepted behind a reply's end",
    "llamacpp": "1 + accepted / drafts of its counters: without steps that had no draft",
    "sglang": "1 + accepted / spec_verify_ct of the measured replies; its own spec_accept_length "
    "has the prefill's token in the numerator",
    "sglang, tokens": "(completion_tokens - 1 for the prefill's) / spec_verify_ct of the measured "
    "replies",
    "none": "1: the server does not speculate",
    "unknown": "not known: the server's replies say nothing of its speculation",
}


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
        drafts = None if self.drafts is None else self.drafts - (before.drafts or 0)
        generated = None if self.generated is None else self.generated - (before.generated or 0)
        # Positions that the earlier reading does not have were 0 then; zeros too many are cut by
        # `zip`.
        earlier = before.by_position + [0] * len(self.by_position)
        by_position = []
        for count_now, count_before in zip(self.by_position, earlier, strict=False):
            by_position.append(count_now - count_before)
        return Counters(
            drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            by_position,
            generated,
            self.running,
            self.prefix_hits - before.prefix_hits,
            self.prefix_queries - before.prefix_queries,
        )


def read_counters(text: str) -> Counters:
    """Return the counters of vLLM or llama.cpp from Prometheus text; the rest is passed over."""
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
        # Libraries for Prometheus add `_total` to a counter's name, depending on their version.
        name = SPECULATION.sub("", sample["name"].removesuffix("_total"))
        # The engines of one server differ in a label only; their counts are added up.
        sums[name] = sums.get(name, 0) + int(value)
        if name == "accepted_tokens_per_pos" and (
            position := POSITION.search(sample["labels"] or "")
        ):
            positions[int(position[1])] = positions.get(int(position[1]), 0) + int(value)
    if "llamacpp:tokens_predicted" in sums:
        generated = sums["llamacpp:tokens_predicted"]
        running = [sums.get(f"llamacpp:requests_{kind}", 0) for kind in ("processing", "deferred")]
        cached = sums.get("llamacpp:prompt_tokens_cached", 0)
        queries = cached + sums.get("llamacpp:prompt_tokens", 0)
    else:
        generated = sums.get("vllm:generation_tokens")
        running = [sums.get(f"vllm:num_requests_{kind}", 0) for kind in ("running", "waiting")]
        cached = sums.get("vllm:prefix_cache_hits", 0)
        queries = sums.get("vllm:prefix_cache_queries", 0)
    return Counters(
        sums.get("drafts"),
        sums.get("draft_tokens", 0),
        sums.get("accepted_tokens", 0),
        [positions.get(i, 0) for i in range(max(positions, default=-1) + 1)],
        generated,
        sum(running),
        cached,
        queries,
    )


@dataclass
class Speculation:
    """Figures of an engine's drafts during the measured requests; `None` for what is not known."""

    counted: str
    """The way in which tau is counted: a key of `DEFINITIONS`."""
    tau: float | None
    """The engine's tau, as `counted` says."""
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
    engine: str, delta: Counters, tokens: int, replies: int, chunks: int, ran_before: int
) -> Speculation:
    """Return the figures that the counters of vLLM or llama.cpp give for the measured requests.

    `delta` is what was counted while `replies` came, which have `tokens` in all and arrived in
    `chunks`; `ran_before` are the requests under way before the first of them.

    Neither counts steps. There were at least as many as drafts; of vLLM, as chunks behind the first
    of each reply (a slow reader gets two steps in one chunk), where llama.cpp sends a chunk for
    each token; and as tokens that neither a prefill nor an accepted draft gave. The largest of
    these is taken.
    """
    if delta.drafts is None:
        speculation = Speculation("none", 1.0, rounds=tokens - replies, tau_emitted=1.0)
    else:
        tau = 1 + delta.accepted / delta.drafts if delta.drafts else 1.0
        survival = [count / delta.drafts for count in delta.by_position] if delta.drafts else []
        rounds = max(delta.drafts, tokens - replies - delta.accepted)
        if engine == "vllm":
            rounds = max(rounds, chunks - replies)
        speculation = Speculation(
            engine, tau, delta.drafts, delta.drafted, delta.accepted, survival, rounds
        )
        if rounds:
            speculation.tau_emitted = (tokens - replies) / rounds
    speculation.warnings = _shared(delta, tokens, replies, ran_before)
    # The counters hold steps of other clients, while `tokens` are those of the measured requests.
    if speculation.warnings and speculation.counted == engine:
        speculation.rounds = speculation.tau_emitted = None
    if delta.prefix_hits > 0.1 * delta.prefix_queries > 0:
        share = delta.prefix_hits / delta.prefix_queries
        speculation.warnings.append(
            f"{share:.0%} of the prompts' tokens came from the server's prefix cache, which "
            "flatters TTFT"
        )
    return speculation


def _shared(delta: Counters, tokens: int, replies: int, ran_before: int) -> list[str]:
    """Return a warning if other clients' requests are in the counters, else nothing.

    Parameters are those of `of_counters`.
    """
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
    # A reply may end within its last draft, whose tokens behind the end count as accepted.
    most = tokens - replies + replies * len(delta.by_position)
    if emitted > most:
        return [
            f"its drafts stand for {emitted} tokens, draftsmith's requests got {tokens}: tau is of "
            "other requests too"
        ]
    return []


# Names of the same count in SGLang's versions, newest first.
ACCEPTED_NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED_NAMES = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM_NAMES = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def of_sglang(metas: Iterable[JsonObject], tokens: int, speculates: bool | None) -> Speculation:
    """Return the figures that the `meta_info` of SGLang's replies give.

    `tokens` are those of all replies; `speculates` is the server's own answer, `None` if it gave
    none. A reply of one token has no verification, and then no count of speculation.
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
        return Speculation("none", 1.0, rounds=tokens - len(metas), tau_emitted=1.0)
    # One token of each reply is the prefill's and belongs to no round.
    tau_emitted = (tokens - len(metas)) / rounds
    accepted, drafted = (_sum(verified, names) for names in (ACCEPTED_NAMES, DRAFTED_NAMES))
    if accepted is None:
        return Speculation(
            "sglang, tokens",
            tau_emitted,
            rounds,
            drafted,
            None,
            rounds=rounds,
            tau_emitted=tau_emitted,
        )
    survival = _survival(verified, rounds)
    return Speculation(
        "sglang", 1 + accepted / rounds, rounds, drafted, accepted, survival, rounds, tau_emitted
    )


def _survival(metas: list[JsonObject], rounds: int) -> list[float]:
    """Return the share of `rounds` that accepted at least d drafts, d = 1, 2, ..

    Element i of a reply's histogram counts its rounds that accepted i drafts. The result is empty
    where a reply has no histogram.
    """
    histograms = []
    for meta in metas:
        present = [meta[name] for name in HISTOGRAM_NAMES if meta.get(name)]
        if not present:
            return []
        histograms.append(present[0])
    longest = max(map(len, histograms))
    shares = []
    for depth in range(1, longest):
        survived = sum(sum(histogram[depth:]) for histogram in histograms)
        shares.append(survived / rounds)
    return shares


def _sum(metas: list[JsonObject], names: tuple[str, ...]) -> int | None:
    """Return the sum over replies of the first of `names` that each has.

    `None` is returned where a reply has none of them: a sum over the others would be too small.
    """
    total = 0
    for meta in metas:
        present = [meta[name] for name in names if meta.get(name) is not None]
        if not present:
            return None
        total += present[0]
    return total
