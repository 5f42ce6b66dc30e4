"""Intervals of ratios over prompts or batches: the jackknife (docs/metrics.md#intervals).

A unit, such as a prompt, is represented by its sums, for example its tokens and its rounds. A
statistic is a function of the sums over all units, so that leaving out a unit is a subtraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from operator import truediv

from .results import FEWEST, NAN

LEVEL = 0.95
WIDEST = math.log(100)
BISECTIONS = 60  # halve the range of an angle to the precision of a float
Sums = tuple[float, ...]


def pooled(rows: Sequence[Sums], units: Sequence[Hashable]) -> list[Sums]:
    """Return the sums of the rows of each unit, in the order of the units' first rows.

    The requests of one unit, such as the turns of a conversation, are correlated, so they count as
    one observation. `units[i]` names the unit of row i.
    """
    by_unit: dict[Hashable, list[Sums]] = {}
    for row, unit in zip(rows, units, strict=True):
        by_unit.setdefault(unit, []).append(row)
    return [summed(group) for group in by_unit.values()]


def summed(rows: Sequence[Sums]) -> Sums:
    """Return the sum of each column."""
    return tuple(map(sum, zip(*rows, strict=True)))


def interval(
    units: Sequence[Sums], statistic: Callable[..., float], level: float = LEVEL
) -> tuple[float, float]:
    """Return the interval of a positive statistic over independent units.

    It is the jackknife of the logarithm: of n units, with x_i the logarithm of the statistic
    without unit i, the variance is (n - 1) / n times the sum of the squared deviations of the x_i
    from their mean (Efron and Stein 1981, eq. 1.2). The half-width in standard deviations is
    Student's t, with one degree of freedom less than there are `effective_sample_size` units.

    Units whose sums are all 0 are left out. Both ends are NaN for fewer than `FEWEST` others, if
    the statistic is not defined without one of them, and for an interval beyond a factor of 100,
    which means that one unit has nearly all of the sums.
    """
    nonzero = [unit for unit in units if any(unit)]
    count = len(nonzero)
    if count < FEWEST:
        return NAN, NAN
    sums = summed(nonzero)
    value = statistic(*sums)
    logs = []
    for unit in nonzero:
        without = statistic(*(total - own for total, own in zip(sums, unit, strict=True)))
        if not (value > 0 and without > 0):
            return NAN, NAN
        # relative to the whole, so that equal units give exactly 0
        logs.append(math.log(without / value))
    centre = sum(logs) / count
    variance = (count - 1) / count * sum((x - centre) ** 2 for x in logs)
    degrees = max(round(effective_sample_size(nonzero)) - 1, 1)
    reach = student_t((1 + level) / 2, degrees) * math.sqrt(variance)
    if reach > WIDEST:
        return NAN, NAN
    return value * math.exp(-reach), value * math.exp(reach)


def effective_sample_size(units: Sequence[Sums]) -> float:
    """Return the effective number of units: (sum of w)^2 / sum of w^2 (Kish 1965, section 11.7).

    The weight w of a unit is its share of the sums, the mean over the columns. Long replies
    dominate the statistic and its variance, which is then known less well than from equal units.
    """
    sums = summed(units)
    weights = [sum(own / total for own, total in zip(unit, sums, strict=True)) for unit in units]
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def tau_interval(
    emitted: Sequence[Sequence[int]],
    units: Sequence[Hashable] | None = None,
    drafts: int | None = None,
) -> tuple[float, float]:
    """Return the 95% interval of tau; NaN for fewer than `FEWEST` units with a round.

    `emitted[i]` are the tokens emitted in each round of request i, `units[i]` names its unit; each
    request is its own unit if they are not given. `drafts` is the largest number of drafts in a
    round, or of levels in its tree, if it is known.

    The interval is clipped to possible values of tau, which does not change its coverage: every
    round emits one token, and at most one more for each draft.
    """
    rows = [(sum(request), len(request)) for request in emitted]
    low, high = interval(rows if units is None else pooled(rows, units), truediv)
    # With NaN as the first argument, `max` and `min` return NaN.
    return max(low, 1.0), high if drafts is None else min(high, 1.0 + drafts)


@cache
def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t at a `probability` from 0.5 on, below 1."""
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if probability_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def probability_within(angle: float, degrees: int) -> float:
    """Return the probability that |t| is at most sqrt(degrees) * tan(angle), for Student's t.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd `degrees`) and 26.7.4
    (even).
    """
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    series = 0.0 if degrees == 1 else term
    for power in range(2 + odd, degrees - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        series += term
    series *= math.sin(angle)
    return 2 / math.pi * (angle + series) if odd else series
