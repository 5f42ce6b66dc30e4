"""The time that `draftsmith tune` may take: prompts, reply lengths, timings and finalists are
reduced to fit, in that order.

Everything is estimated from what was just measured on this machine, so that a run may end a little
before or after its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FEWEST_PROMPTS = 3
SHORTEST_REPLY = 16
TRIAL_ROOTS = 6  # of each text, from which the time of replaying over all of them is estimated
LEAST_WAYS = 3  # plain decoding, the default and one prediction are always measured
# shares of the time; measuring finalists has the rest
VERIFICATION, TEXTS, REPLAYS, DRAFTING = 0.2, 0.1, 0.25, 0.2
MEASURING = 1 - VERIFICATION - TEXTS - REPLAYS - DRAFTING


@dataclass
class Budget:
    """Seconds that a command may take, counted from when this is made."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of_minutes(cls, minutes: float) -> Budget:
        """0: as long as it takes."""
        return cls(60 * minutes if minutes else math.inf)

    @property
    def left(self) -> float:
        return max(self.seconds - (time.monotonic() - self.started), 0.0)


def texts_that_fit(
    prompts: int, tokens: int, batches: Sequence[int], seconds: float, step: Callable[[int], float]
) -> tuple[int, int]:
    """Prompts and tokens of a reply for which plain replies and the fewest measurements fit into
    their shares of `seconds`.

    `step(n)`: seconds of a plain step of n rows. Prompts are halved first, down to a full batch,
    then replies.
    """

    def fits(n: int, t: int) -> bool:
        writing = t * step(n)
        measuring = sum(LEAST_WAYS * math.ceil(n / batch) * t * step(batch) for batch in batches)
        return writing <= TEXTS * seconds and measuring <= MEASURING * seconds

    fewest, shortest = min(prompts, max(FEWEST_PROMPTS, *batches)), min(tokens, SHORTEST_REPLY)
    while not fits(prompts, tokens) and prompts > fewest:
        prompts = max(prompts // 2, fewest)
    while not fits(prompts, tokens) and tokens > shortest:
        tokens = max(tokens // 2, shortest)
    return prompts, tokens


def roots_that_fit(roots: int, trial_seconds: float, seconds: float) -> int:
    """Roots of a text to replay in `seconds`, where replaying over `TRIAL_ROOTS` took
    `trial_seconds`."""
    if trial_seconds * roots <= TRIAL_ROOTS * seconds:
        return roots
    return min(roots, max(TRIAL_ROOTS, int(TRIAL_ROOTS * seconds / trial_seconds)))


def samples_that_fit(
    samples: int, fewest: int, fixed_s: float, each_s: float, seconds: float
) -> int:
    """Rounds behind a timing where `fixed_s` goes by in any case and every sample takes
    `each_s`."""
    if fixed_s + samples * each_s <= seconds:
        return samples
    return max(fewest, int((seconds - fixed_s) / each_s))


def finalists_that_fit(
    finalists: int, repeats: int, runs: Sequence[float], seconds: float
) -> tuple[int, int]:
    """Finalists and repeats whose runs fit. `runs`: seconds of one run of plain decoding, of the
    default, and of each finalist, the most promising first. Repeats go first."""

    def cost():
        return repeats * sum(runs[: 2 + finalists])

    while cost() > seconds and repeats > 1:
        repeats -= 1
    while cost() > seconds and finalists > 1:
        finalists -= 1
    return finalists, repeats
