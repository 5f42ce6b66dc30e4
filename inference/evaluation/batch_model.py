"""Predicted speed-up at larger batch sizes, from the smallest one and plain decoding's steps.

docs/metrics.md#speed defines `modelled_speedup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .results import DrafterFigures, SettingFigures


def model_batches(settings: Sequence[SettingFigures]) -> None:
    """Set `modelled_speedup` of every drafter of settings that differ in batch size only.

    It follows for each batch size from acceptance and draft time at the smallest one, and from
    plain decoding's steps at all of them (`_modelled`). Settings of a temperature that has one
    batch size are left as they are.
    """
    for kind in {(s.temperature, s.lossless) for s in settings}:
        alike = [s for s in settings if (s.temperature, s.lossless) == kind]
        alike.sort(key=lambda setting: setting.batch)
        steps = {s.batch: _round_seconds(s.plain) for s in alike if s.plain.rounds}
        if len(steps) < 2:
            continue
        smallest = alike[0]
        for setting in alike:
            for name, figures in setting.drafters.items():
                base = smallest.drafters.get(name)
                # only of loops that report the time of a verification
                if base is not None and base.rounds and base.split["verify"]:
                    figures.modelled_speedup = _modelled(base, smallest.batch, setting.batch, steps)


def _round_seconds(figures: DrafterFigures) -> float:
    """Return the mean wall time of a round of a whole batch, in seconds."""
    return (figures.decode_s or 0.0) / figures.steps


def _modelled(
    base: DrafterFigures, smallest: int, batch: int, steps: dict[int, float]
) -> float | None:
    """Return the modelled speed-up of a drafter at a batch size.

    `base` are its figures at the batch size `smallest`, and `steps` the seconds of plain steps by
    batch size. A pass over n tokens in all takes what a plain step of n requests takes; drafting
    grows with the batch as a plain step does, and the rest of a round does not grow.
    """
    if base.tau_incl_bonus is None or base.mean_n_draft is None:
        return None
    # `split` shares a batch's round among its rows, so its sums are those of whole batches
    per_step = {name: seconds / base.steps for name, seconds in base.split.items()}
    growth = _extended(steps, batch) / _extended(steps, smallest)
    cost = (
        per_step["draft"] * growth
        + _extended(steps, batch * (1 + base.mean_n_draft))
        + per_step["accept"]
        + per_step["kv"]
        + per_step["host"]
    )
    return base.tau_incl_bonus * _extended(steps, batch) / cost


def _extended(points: dict[int, float], at: float) -> float:
    """Return the value at `at` of the line through the two `points` around it.

    Beyond the ends the line through the first two or the last two points goes on.
    """
    sizes = sorted(points)
    low, high = sizes[-2:]
    for left, right in pairwise(sizes):
        if at <= right:
            low, high = left, right
            break
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
