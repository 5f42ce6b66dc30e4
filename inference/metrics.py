"""One definition of every number, as in reference/evaluation.md section 1.

A round drafts `n_draft` nodes, accepts `a` of them and keeps `k <= a + 1` tokens (cut at an end
token or a limit). The token that the prefill chooses belongs to no round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from .clock import PARTS
from .decode import Generation, Round

RESAMPLES = 1000
LOOP_NGRAM = 8


def tau(kept: Sequence[Sequence[int]]) -> float:
    """Tokens kept per round, bonus included, pooled over requests (micro average); `kept[i]` are
    the rounds of request i."""
    rounds = sum(len(request) for request in kept)
    return sum(map(sum, kept)) / rounds if rounds else float("nan")


BUCKETS = (256, 1024, 4096, 16384, 65536)


def tau_by_position(requests: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """Tau of the rounds whose root lies at positions below 256, 1024, ..: drafters fade past the
    lengths that they were trained on.

    Of each request the prompt's length, which is where its first root stands, and the tokens kept
    in each round.
    """
    found: dict[str, list[int]] = {}
    for root, kept in requests:
        for count in kept:
            below = next((edge for edge in BUCKETS if root < edge), None)
            found.setdefault(f"<{below}" if below else f">={BUCKETS[-1]}", []).append(count)
            root += count
    order = [*(f"<{edge}" for edge in BUCKETS), f">={BUCKETS[-1]}"]
    return {name: sum(found[name]) / len(found[name]) for name in order if name in found}


def survival(accepted: Sequence[int], levels: int) -> list[float]:
    """`s_d`, d = 1 .. levels: share of rounds that accepted at least d drafts."""
    return [
        sum(a >= d for a in accepted) / len(accepted) if accepted else float("nan")
        for d in range(1, levels + 1)
    ]


def conditional(survived: Sequence[float]) -> list[float]:
    """`c_d = s_d / s_(d-1)`: acceptance at depth d given that depth d - 1 was accepted."""
    return [s / b if b > 0 else float("nan") for b, s in pairwise([1.0, *survived])]


def offered_conditional(
    accepted: Sequence[int], offered: Sequence[int], levels: int
) -> list[float]:
    """Acceptance at depth d among the rounds that had a draft there, behind d - 1 accepted ones;
    `Round.offered`.

    Above `conditional` where trees are pruned or end early: that one counts what was never drafted
    as refused.
    """
    found = []
    for d in range(1, levels + 1):
        asked = [a >= d for a, o in zip(accepted, offered, strict=True) if o >= d]
        found.append(sum(asked) / len(asked) if asked else float("nan"))
    return found


def pooled(kept: Sequence[Sequence[int]], prompts: Sequence[int]) -> list[list[int]]:
    """The rounds of all requests that belong to one prompt, such as the turns of a conversation:
    they are correlated."""
    found: dict[int, list[int]] = {}
    for rounds, prompt in zip(kept, prompts, strict=True):
        found.setdefault(prompt, []).extend(rounds)
    return list(found.values())


def bootstrap(
    requests: Sequence[Any], statistic: Callable[[Sequence[Any]], float], seed: int = 0
) -> tuple[float, float]:
    """95% interval of a statistic, resampling requests or prompts: rounds of one are correlated, so
    they go together."""
    rng = random.Random(seed)
    drawn = (
        statistic(rng.choices(requests, k=len(requests)))
        for _ in range(RESAMPLES if requests else 0)
    )
    # of nothing but replies without a round, say
    values = sorted(value for value in drawn if not math.isnan(value))
    if not values:
        return float("nan"), float("nan")
    return values[int(0.025 * len(values))], values[max(int(0.975 * len(values)) - 1, 0)]


def repeats_itself(tokens: Sequence[int], n: int = LOOP_NGRAM) -> bool:
    """Whether a text repeats one of its n-grams: small targets loop under greedy decoding, and a
    loop flatters every drafter."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


def emitted_per_round(generation: Generation) -> list[int]:
    return [len(round_.tokens) for round_ in generation.rounds]


def batch_seconds(generations: Sequence[Generation]) -> float:
    """Decode time of requests that ran as one batch: that of the last to finish."""
    return max(g.decode_s for g in generations)


def split(rounds: Sequence[Round]) -> dict[str, float]:
    """Seconds of each part of the rounds, a batch's round shared among its rows; host is what the
    parts leave of the wall time."""
    parts = {part: sum(getattr(r, f"t_{part}_s") / r.rows for r in rounds) for part in PARTS}
    return parts | {"host": sum(r.t_round_s / r.rows for r in rounds) - sum(parts.values())}


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is there; `None` if nothing is."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def alpha(overlaps: Sequence[Sequence[float] | None]) -> list[float] | None:
    """Mean of sum min(p, q) at depths 1, 2, .. over the rounds that reached them; `None` where the
    rule does not compare distributions."""
    there = [row for row in overlaps if row is not None]
    if not there:
        return None
    depths = max(map(len, there))
    return [
        sum(row[d] for row in there if len(row) > d) / sum(len(row) > d for row in there)
        for d in range(depths)
    ]


def quantiles(
    values: Sequence[float | None], at: Sequence[float] = (0.5, 0.95, 0.99)
) -> dict[str, float] | None:
    """`p50`, `p95`, `p99` of what is there, by the nearest rank; `None` if nothing is."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return None
    return {f"p{100 * share:g}": there[max(math.ceil(share * len(there)) - 1, 0)] for share in at}


def time_per_token(generation: Generation) -> float | None:
    """Seconds from the prefill's token to the last over the tokens of all rounds; `None` for a
    reply without a round."""
    tokens = sum(emitted_per_round(generation))
    return generation.decode_s / tokens if tokens else None


def summarise(
    generations: Sequence[Generation],
    batches: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Pooled numbers of many requests decoded alike; names as in evaluation.md section 2.

    `batches`: places of the requests that ran together; each alone if not given. `prompts`: the
    number of the prompt that each request belongs to, for intervals; each its own if not given.
    """
    rounds = [r for g in generations for r in g.rounds]
    kept = [emitted_per_round(g) for g in generations]
    accepted = [r.accepted for r in rounds]
    drafted = sum(r.drafted or 0 for r in rounds)
    levels = max(accepted, default=0)
    survived = survival(accepted, levels)
    together = [[i] for i in range(len(generations))] if batches is None else batches
    decode_s = sum(batch_seconds([generations[i] for i in batch]) for batch in together)
    low, high = (
        bootstrap(pooled(kept, prompts or range(len(kept))), tau)
        if rounds
        else (float("nan"), float("nan"))
    )
    return {
        "requests": len(generations),
        "rounds": len(rounds),
        "steps": sum(
            max((len(generations[i].rounds) for i in batch), default=0) for batch in together
        ),
        "tokens": sum(len(g.token_ids) for g in generations),
        "tau_incl_bonus": tau(kept),
        "tau_ci95": [low, high],
        "tau_macro": mean([tau([k]) if k else None for k in kept]),
        "tau_by_request": quantiles(
            [tau([k]) if k else None for k in kept], (0.05, 0.25, 0.5, 0.75, 0.95)
        ),
        "tau_by_position": tau_by_position(
            [(len(g.prompt_ids), k) for g, k in zip(generations, kept, strict=True)]
        ),
        "tau_untruncated": sum(a + 1 for a in accepted) / len(rounds) if rounds else float("nan"),
        "survival": survived,
        "cond_accept": conditional(survived),
        "cond_offered": offered_conditional(accepted, [r.offered for r in rounds], levels),
        "accept_rate": sum(accepted) / drafted if drafted else 0.0,
        "mean_n_draft": drafted / len(rounds) if rounds else 0.0,
        "discarded_share": (drafted - sum(accepted)) / (drafted + len(rounds)) if rounds else 0.0,
        "zero_accept_rate": sum(a == 0 for a in accepted) / len(rounds) if rounds else 0.0,
        "tokens_s": sum(map(sum, kept)) / decode_s if decode_s else float("nan"),
        "ttft_s": sum(g.ttft_s for g in generations) / len(generations),
        "ttft_quantiles_s": quantiles([g.ttft_s for g in generations]),
        "tpot_quantiles_s": quantiles([time_per_token(g) for g in generations]),
        "chunk_gap_quantiles_s": quantiles([r.t_round_s for r in rounds]),
        "rb_tau": mean([r.expected for r in rounds]),
        "alpha": alpha([r.overlap for r in rounds]),
        "verify_mode": sorted({r.rule for r in rounds}),
        "split_s": split(rounds),
        "decode_s": decode_s,
        "loop_share": sum(repeats_itself(g.token_ids) for g in generations) / len(generations),
    }
