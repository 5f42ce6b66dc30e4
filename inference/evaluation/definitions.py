"""Types and short definitions of the figures of a report; docs/metrics.md has the whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

Number = float | None
Interval = tuple[Number, Number]
"""Both ends of a 95% interval; NaN where it is not known."""
ByName = Mapping[str, Number]
ByDepth = Sequence[Number]
Temperature = Annotated[float, Meta(ge=0)]

DEFINITIONS = {
    "tau_incl_bonus": "tokens emitted per round, the target's own included, the prefill's "
    "excluded, pooled over requests",
    "tau_ci95": "95% interval over prompts (the turns of one go together), by the jackknife of "
    "log(tau) with Student's t; not given for fewer than five prompts",
    "tau_by_position": "tau of the rounds whose root is below that position",
    "tau_macro": "mean of the requests' own taus; tau_by_request: their quantiles",
    "samples": "the first replies, token by token; came: depth of an accepted draft, 0 the "
    "target's own, -1 the prefill's",
    "rounds": "of each request: [nodes drafted, drafts accepted, tokens emitted] of every round",
    "discarded_share": "share of all verified nodes, roots included, that were drafts and not "
    "accepted",
    "verify_cost": "a verification over a plain verification; round_cost: a whole round over a "
    "plain round",
    "predicted_speedup": "tau over round_cost; both over plain decoding's: what the split of "
    "these very rounds explains",
    "modelled_speedup": "predicted from the smallest batch's tau and draft time, and from plain "
    "decoding's steps at all sizes",
    "ttft_s": "time to the first token; tpot: time per later token, of each request; quantiles "
    "over requests, nearest rank",
    "survival": "share of rounds that accepted at least d drafts",
    "cond_accept": "survival at d over survival at d - 1; cond_offered: among the rounds that had "
    "a draft at d",
    "chunk_gap": "seconds between the pieces that a reader of the stream sees: one a round",
    "tokens_s": "tokens of all rounds / their wall time, prefill excluded",
    "speedup_ci95": "over prompts; over batches where several prompts ran together; not given for "
    "fewer than five of them",
    "speedup": "tokens a second over plain decoding's, the same prompts, prefill excluded; where "
    "both wrote the same text, the ratio of the times",
    "gain_over_default": "of a tuned drafter: tokens a second over those of the same drafter "
    "without the profile (untuned), on the same prompts; gain_ci95: its interval, as speedup_ci95",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, "
    "traversal, or rrs",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare "
    "distributions only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null "
    "for rules that keep the distribution only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low "
    "precision, others must not",
}
"""They are part of every report, and docs/reference/report.md is made of them."""
