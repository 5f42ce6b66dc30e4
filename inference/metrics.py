"""The one definition of every number about decoded text (docs/metrics.md).

A round drafts n nodes, accepts a of them and emits at most `a + 1` tokens (fewer if it is cut at an
end token or a limit). The token that the prefill chooses belongs to no round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from .decode import Generation, Round
from .rounds.device import PARTS

LOOP_NGRAM = 8


def tau(emitted: Sequence[Sequence[int]]) -> float:
    """Return tokens emitted per round, bonus token included; NaN without a round.

    `emitted[i]` are the tokens emitted in each round of request i. Rounds are pooled over requests,
    so that long replies weigh more (micro average).
    """
    rounds = sum(len(request) for request in emitted)
    return sum(map(sum, emitted)) / rounds if rounds else math.nan


BUCKETS = (256, 1024, 4096, 16384, 65536)


def tau_by_position(requests: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """Return tau of the rounds whose root is at positions below 256, 1024, .. and beyond.

    Drafters get worse beyond the lengths that they were trained on. `requests` holds for each
    request the prompt's length, which is the position of its first root, and the tokens emitted in
    each round. Keys are such as `<256` and `>=65536`; those without a round are left out.
    """
    # In the order of the positions, whatever bucket comes up first.
    by_bucket: dict[str, list[int]] = {_bucket(position): [] for position in (0, *BUCKETS)}
    for root, emitted in requests:
        for count in emitted:
            by_bucket[_bucket(root)].append(count)
            # A round moves the root by all that it emitted, bonus token included.
            root += count
    return {name: sum(counts) / len(counts) for name, counts in by_bucket.items() if counts}


def _bucket(position: int) -> str:
    for edge in BUCKETS:
        if position < edge:
            return f"<{edge}"
    return f">={BUCKETS[-1]}"


def survival(accepted: Sequence[int], levels: int) -> list[float]:
    """Return `s_d` for d = 1 .. levels: the share of rounds that accepted at least d drafts."""
    return [_share([a >= d for a in accepted]) for d in range(1, levels + 1)]


def _share(passed: Sequence[bool]) -> float:
    return sum(passed) / len(passed) if passed else math.nan


def conditional(survived: Sequence[float]) -> list[float]:
    """Return `c_d = s_d / s_(d-1)`: acceptance at depth d given that depth d - 1 was accepted."""
    shares = []
    # s_0 is 1: every round reaches the root.
    for before, survived_here in pairwise([1.0, *survived]):
        shares.append(survived_here / before if before > 0 else math.nan)
    return shares


def offered_conditional(
    accepted: Sequence[int], offered: Sequence[int], levels: int
) -> list[float]:
    """Return acceptance at depths 1 .. levels, among the rounds that had a draft there.

    A round has a draft at depth d if `offered` (`Round.offered`) is at least d: it accepted d - 1
    drafts and a draft followed them. The figures are above those of `conditional` where trees
    are pruned or end early, since that one counts a draft that was never made as refused.
    """
    rounds = list(zip(accepted, offered, strict=True))
    return [_share([a >= d for a, o in rounds if o >= d]) for d in range(1, levels + 1)]


def repeats_itself(tokens: Sequence[int], n: int = LOOP_NGRAM) -> bool:
    """Return True if a text repeats one of its n-grams.

    Small targets loop under greedy decoding, and a loop raises the tau of every drafter.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


def emitted_per_round(generation: Generation) -> list[int]:
    return [len(round_.tokens) for round_ in generation.rounds]


def batch_seconds(generations: Sequence[Generation]) -> float:
    """Return the decode time of requests that ran as one batch: that of the last to finish."""
    return max(g.decode_s for g in generations)


def split(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of each part of the rounds, and of the host.

    A batch's round is shared equally among its rows. `host` is the wall time that the other parts
    leave.
    """
    parts = {part: sum(getattr(r, f"t_{part}_s") / r.rows for r in rounds) for part in PARTS}
    return parts | {"host": sum(r.t_round_s / r.rows for r in rounds) - sum(parts.values())}


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def alpha(overlaps: Sequence[Sequence[float] | None]) -> list[float] | None:
    """Return the mean overlap `sum of min(p, q)` at depths 1, 2, ..

    Each is a mean over the rounds that reached the depth. `overlaps` are those of each round
    (`Round.overlap`). None if the rule does not compare distributions, so that no round has any.
    """
    known = [row for row in overlaps if row is not None]
    if not known:
        return None
    by_depth = [[row[d] for row in known if len(row) > d] for d in range(max(map(len, known)))]
    return [sum(reached) / len(reached) for reached in by_depth]


def quantiles(
    values: Sequence[float | None], at: Sequence[float] = (0.5, 0.95, 0.99)
) -> dict[str, float] | None:
    """Return `p50`, `p95`, `p99` of the values that are not None; None if there are none.

    Quantiles are taken at the nearest rank, so each is one of the values. `at` gives other shares.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    # The nearest rank counts from 1: the median of 4 values is number 2, at index 1.
    ranks = {f"p{100 * share:g}": max(math.ceil(share * len(known)), 1) for share in at}
    return {name: known[rank - 1] for name, rank in ranks.items()}


def time_per_token(generation: Generation) -> float | None:
    """Return a reply's seconds per token of its rounds, the prefill not counted; None without."""
    tokens = sum(emitted_per_round(generation))
    return generation.decode_s / tokens if tokens else None
