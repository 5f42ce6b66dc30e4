"""Time limit of `draftsmith tune`, and the amounts of work that fit into it.

Prompts, reply lengths, replayed roots, timings and finalists are reduced in that order. A minimum
of each remains, so that many settings in a short limit take longer than it. All durations are
estimated from what was just measured on this machine, so a run may end a little before or after its
limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..results import FEWEST

FEWEST_PROMPTS = 3
SHORTEST_REPLY = 16
# The replay is tried on so many roots of each text; the time for all roots is estimated from it.
TRIAL_ROOTS = 6
# Plain decoding, the default tree and one finalist are always measured; a finalist that is taken
# is measured again next to the default on other prompts.
LEAST_WAYS, AGAIN = 3, 2
# Prompts are cut to no fewer tokens where drafters are timed: lookups need a text to search.
LEAST_READ = 64
# Rounds that a median needs.
FEWEST_ROUNDS = 3
# Shares of the whole time; measuring the finalists has the rest.
VERIFICATION, TEXTS, REPLAYS, DRAFTING = 0.15, 0.1, 0.15, 0.15
MEASURING = 1 - VERIFICATION - TEXTS - REPLAYS - DRAFTING


@dataclass
class Budget:
    """Seconds that a command may take, counted from the creation of this object."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of_minutes(cls, minutes: float) -> Budget:
        """Return a budget of `minutes` minutes from now on; 0 means no limit."""
        return cls(60 * minutes if minutes else math.inf)

    @property
    def left(self) -> float:
        """Return the seconds that are left; 0 when the time is over."""
        return max(self.seconds - (time.monotonic() - self.started), 0.0)


def past_the_limit(took: float, parts: int, left: float) -> str | None:
    """Return a line if `parts` more parts may take more than twice the `left` seconds, else None.

    The last part took `took` seconds. Later ones have shorter shares and take less.
    """
    if took * parts <= 2 * left:
        return None
    return (
        f"the last pair of drafter and temperature took {took / 60:.1f} minutes and {parts} remain,"
        f" with {left / 60:.1f} minutes of --budget left: expect up to {took * parts / 60:.0f} "
        "minutes more. Fewer drafters, temperatures or batch sizes take less"
    )


def to_choose_on(prompts: int) -> int:
    """Return on how many of the prompts a tree is chosen; on the others its gain is measured.

    Half of them, if both halves then have enough for an interval, else all.
    """
    return math.ceil(prompts / 2) if prompts >= 2 * FEWEST else prompts


def texts_that_fit(
    prompts: int, tokens: int, batches: Sequence[int], seconds: float, step: Callable[[int], float]
) -> tuple[int, int]:
    """Return how many prompts, and how many tokens of each reply, fit into `seconds`.

    Two things have to fit into their shares of `seconds`: writing the plain replies that trees are
    chosen on in one batch, and at every batch size measuring `LEAST_WAYS` ways to decode on these
    prompts and `AGAIN` on the others. A drafted reply is counted as if it took as long as a plain
    one, and one repeat is assumed. `step(n)` gives the seconds of a plain step of n rows. The
    prompts are made fewer first, by a quarter at a time, down to as many as intervals need at every
    batch size that has them, to a full batch of the largest size, or to `FEWEST_PROMPTS`; then the
    replies are halved, down to `SHORTEST_REPLY`.
    """

    def fits(count: int, length: int) -> bool:
        first = to_choose_on(count)
        writing = length * step(first)
        measuring = 0.0
        for batch in batches:
            runs = LEAST_WAYS * math.ceil(first / batch)
            runs += AGAIN * math.ceil((count - first) / batch)
            measuring += runs * length * step(batch)
        return writing <= TEXTS * seconds and measuring <= MEASURING * seconds

    # Fewer prompts than the largest batch would time that batch half empty.
    for_intervals = [n for batch in batches if (n := 2 * FEWEST * batch) <= prompts]
    fewest = min(prompts, max(FEWEST_PROMPTS, *batches, *for_intervals))
    shortest = min(tokens, SHORTEST_REPLY)
    while not fits(prompts, tokens) and prompts > fewest:
        prompts = max(prompts * 3 // 4, fewest)
    while not fits(prompts, tokens) and tokens > shortest:
        tokens = max(tokens // 2, shortest)
    return prompts, tokens


def roots_that_fit(roots: int, trial_seconds: float, seconds: float) -> int:
    """Return how many of the `roots` roots of a text can be replayed in `seconds`.

    Replaying `TRIAL_ROOTS` roots took `trial_seconds`, and the time grows linearly with the roots.
    At least `TRIAL_ROOTS` are returned, or all `roots` of a shorter text.
    """
    # Multiplied out, so that a trial of 0 seconds divides nothing.
    if trial_seconds * roots <= TRIAL_ROOTS * seconds:
        return roots
    return min(roots, max(TRIAL_ROOTS, int(TRIAL_ROOTS * seconds / trial_seconds)))


@dataclass(frozen=True)
class Timings:
    """Numbers of rounds and of prompt tokens with which a drafter is timed."""

    rounds: int
    """Rounds of every way that count in each turn."""
    turns: int
    """In each turn all prompts are read once for every way."""
    tokens: int | None
    """Tokens that the prompts are cut to; None where they are read whole."""
    seconds: float
    """Estimate of what all turns take."""


def timings_that_fit(
    samples: int,
    turns: int,
    settle: int,
    round_s: float,
    token_s: float,
    tokens: float,
    seconds: float,
) -> Timings:
    """Return the timings, `samples` rounds in `turns` turns at most, that fit into `seconds`.

    `round_s` are the seconds of one round of every way at every batch size, `token_s` those of
    reading a token of every row's prompt, and `settle` the rounds of a turn that are not counted.
    The prompts have `tokens` tokens on average; they are cut first, then rounds are given up, then
    turns. `FEWEST_ROUNDS` rounds in one turn remain, which may take longer than `seconds`.
    """
    shortest = min(tokens, LEAST_READ)

    def cost(rounds: int, turns: int, read: float) -> float:
        return turns * ((settle + rounds) * round_s + read * token_s)

    rounds = max(samples // turns, 1)
    while cost(rounds, turns, shortest) > seconds:
        if turns * (rounds - 1) >= FEWEST_ROUNDS and rounds > 2:
            rounds -= 1
        elif turns > 1:
            turns -= 1
            rounds = max(samples // turns, 1)
        else:
            break
    if cost(rounds, turns, tokens) <= seconds:
        return Timings(rounds, turns, None, cost(rounds, turns, tokens))
    left = (seconds / turns - (settle + rounds) * round_s) / token_s
    read = max(int(left), math.ceil(shortest))
    return Timings(rounds, turns, read, cost(rounds, turns, read))


def finalists_that_fit(
    finalists: int, repeats: int, runs: Sequence[float], again: float, seconds: float
) -> tuple[int, int]:
    """Return how many finalists, and how many repeats of their runs, fit into `seconds`.

    `runs` holds the seconds of one run of plain decoding, of the default tree, and of each
    finalist, the most promising first; `again` is the number of prompts on which the gain is
    measured over that of the prompts of `runs`. Repeats are given up before finalists; one of each
    remains.
    """

    def cost():
        # Plain decoding and the default tree run with the finalists; the default and one
        # finalist run again on the other prompts.
        return repeats * (sum(runs[: 2 + finalists]) + again * sum(runs[1 : 1 + AGAIN]))

    while cost() > seconds and repeats > 1:
        repeats -= 1
    while cost() > seconds and finalists > 1:
        finalists -= 1
    return finalists, repeats
