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
    return sum(map(sum, emitted)) / rounds if rounds else float("nan")


BUCKETS = (256, 1024, 4096, 16384, 65536)


def tau_by_position(requests: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """Return tau of the rounds whose root is at positions below 256, 1024, .. and beyond.

    Drafters get worse beyond the lengths that they were trained on. `requests` holds for each
    request the prompt's length, which is the position of its first root, and the tokens emitted in
    each round. Keys are such as `<256` and `>=65536`; those without a round are left out.
    """
    by_bucket: dict[str, list[int]] = {}
    for root, emitted in requests:
        for count in emitted:
            by_bucket.setdefault(_bucket(root), []).append(count)
            # A round moves the root by all that it emitted, bonus token included.
            root += count
    # In the order of the positions, whatever bucket came up first.
    means: dict[str, float] = {}
    for position in (0, *BUCKETS):
        name = _bucket(position)
        if name in by_bucket:
            means[name] = sum(by_bucket[name]) / len(by_bucket[name])
    return means


def _bucket(position: int) -> str:
    for edge in BUCKETS:
        if position < edge:
            return f"<{edge}"
    return f">={BUCKETS[-1]}"


def survival(accepted: Sequence[int], levels: int) -> list[float]:
    """Return `s_d` for d = 1 .. levels: the share of rounds that accepted at least d drafts."""
    shares = []
    for d in range(1, levels + 1):
        survived = [a >= d for a in accepted]
        shares.append(sum(survived) / len(survived) if survived else float("nan"))
    return shares


def conditional(survived: Sequence[float]) -> list[float]:
    """Return `c_d = s_d / s_(d-1)`: acceptance at depth d given that depth d - 1 was accepted."""
    shares = []
    # s_0 is 1: every round reaches the root.
    for before, survived_here in pairwise([1.0, *survived]):
        shares.append(survived_here / before if before > 0 else float("nan"))
    return shares


def offered_conditional(
    accepted: Sequence[int], offered: Sequence[int], levels: int
) -> list[float]:
    """Return acceptance at depths 1 .. levels, among the rounds that had a draft there.

    A round has a draft at depth d if `offered` (`Round.offered`) is at least d: it accepted d - 1
    drafts and a draft followed them. The figures are above those of `conditional` where trees
    are pruned or end early, since that one counts a draft that was never made as refused.
    """
    shares = []
    for d in range(1, levels + 1):
        passed = []
        for a, o in zip(accepted, offered, strict=True):
            if o >= d:
                passed.append(a >= d)
        shares.append(sum(passed) / len(passed) if passed else float("nan"))
    return shares


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
    parts: dict[str, float] = {}
    for part in PARTS:
        parts[part] = sum(getattr(round_, f"t_{part}_s") / round_.rows for round_ in rounds)
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
    depths = max(map(len, known))
    means = []
    for d in range(depths):
        reached = [row[d] for row in known if len(row) > d]
        means.append(sum(reached) / len(reached))
    return means


def quantiles(
    values: Sequence[float | None], at: Sequence[float] = (0.5, 0.95, 0.99)
) -> dict[str, float] | None:
    """Return `p50`, `p95`, `p99` of the values that are not None; None if there are none.

    Quantiles are taken at the nearest rank, so each is one of the values. `at` gives other shares.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    by_name: dict[str, float] = {}
    for share in at:
        # The nearest rank counts from 1: the median of 4 values is number 2, at index 1.
        rank = max(math.ceil(share * len(known)), 1)
        by_name[f"p{100 * share:g}"] = known[rank - 1]
    return by_name


def time_per_token(generation: Generation) -> float | None:
    """Return the decode time of a reply per token of its rounds, in seconds.

    The prefill's token and time are not counted. None for a reply without a round.
    """
    tokens = sum(emitted_per_round(generation))
    return generation.decode_s / tokens if tokens else None
