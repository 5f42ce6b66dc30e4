"""Measurement of candidates by successive halving, and the resulting row of the profile.

All candidates decode a few prompts, alternating with the default; the faster half of them decodes
more, and so on (arXiv 1502.07943). The last ones decode one half of the prompts with the default
and plain decoding. The best one is taken only if the interval of its gain excludes no gain. Its
gain on the prompts that it was chosen on is biased upwards, so the reported gain is that on the
other half of the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...heads.files import JsonObject
from .. import metrics
from ..base.settings import Sampling
from ..conversations.prompts import Prompt
from ..conversations.selection import balanced_order, hash_number
from ..decode import Request, generate
from ..proposers.ngram import PlainDecoding
from ..targets.target import Target
from .candidates import PLAIN, Candidate
from .figures import Gain, figures_of_drafter, gain
from .intervals import LEVEL
from .measure import ChosenWay, Setting, Turn, decode_alternately
from .results import FEWEST, NAN

FINALISTS = 3  # besides the default and plain decoding
TOKENS = 96  # longest reply; with less time shorter ones, `SHORTEST` at least
SHORTEST = 16
TRIAL = 16  # tokens of the run from which the total time is estimated


def rungs(candidates: int) -> list[tuple[int, int]]:
    """Return the number of candidates in each measurement, and the divisor of the prompts.

    Example: all of 8 candidates decode a quarter of the prompts, 4 a half, and the last 3 all of
    them: [(8, 4), (4, 2), (3, 1)].
    """
    sizes = [candidates]
    while sizes[-1] > FINALISTS:
        sizes.append(max(math.ceil(sizes[-1] / 2), FINALISTS))
    return [(size, 2 ** (len(sizes) - 1 - place)) for place, size in enumerate(sizes)]


def effort_for(
    seconds: float, prompts: int, batch: int, candidates: int, read_s: float, step_s: float
) -> tuple[int, int]:
    """Return how many of `prompts` prompts, and tokens of a reply, fit into `seconds`.

    `read_s` and `step_s` are the seconds of a batch's prefill and of a plain step; a drafted reply
    is counted as a plain one. First the number of prompts is reduced, by a quarter at a time, to
    what intervals need, then the replies are halved.
    """
    fewest = min(prompts, 2 * FEWEST * batch)
    tokens = TOKENS
    while prompts > fewest or tokens > SHORTEST:
        half = prompts / 2
        runs = 2 * math.ceil(half / batch)  # the gain on the other half
        for size, part in rungs(candidates):
            # the default decodes with them, and plain decoding with the finalists
            runs += (size + 1 + (part == 1)) * math.ceil(half / part / batch)
        if runs * (read_s + tokens * step_s) <= seconds:
            break
        if prompts > fewest:
            prompts = max(prompts * 3 // 4, fewest)
        else:
            tokens = max(tokens // 2, SHORTEST)
    return prompts, tokens


def fewer(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` of the prompts, evenly over their categories, in their order."""
    groups = [(prompt.category,) for prompt in prompts]
    units = [hash_number(str(prompt.unit)) for prompt in prompts]
    return [prompts[index] for index in sorted(balanced_order(groups, units)[:count])]


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts for choosing a tree, and those for measuring its gain.

    Every second unit of each category is in the second half, which is empty if there are too few
    prompts. Prompts of one unit stay together.
    """
    by_category = sorted(prompts, key=lambda prompt: prompt.category)
    units = list(dict.fromkeys(prompt.unit for prompt in by_category))
    first = units[::2] if len(units) >= 2 * FEWEST else units
    chosen_on = [prompt for prompt in prompts if prompt.unit in first]
    return chosen_on, [prompt for prompt in prompts if prompt.unit not in first]


def level_of(finalists: int) -> float:
    """Return the level of each finalist's interval, for a joint error of 5% (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(finalists, 1)


@dataclass
class Choice:
    """Choice between the best finalist and the default, with the gains that decide it."""

    default: str
    """Label of the default."""
    best: str
    """Label of the finalist with the highest gain."""
    gain: Gain
    """Its gain on the prompts that it was chosen on, with the interval of `level`."""
    level: float
    batch: int
    others: int
    """Number of the other prompts; 0 if there are too few."""
    again: Gain | None = None
    """Its gain on these, with its 95% interval; None until it is measured."""

    @property
    def promising(self) -> bool:
        """True if the interval excludes no gain, and prompts are left to measure it again."""
        return self.others > 0 and self.gain.interval[0] > 1

    @property
    def taken(self) -> bool:
        """True if the best finalist replaces the default.

        The second measurement is not used for the choice, so it is unbiased, unless it excludes a
        gain.
        """
        return self.promising and self.again is not None and self.again.interval[1] >= 1

    @property
    def reason(self) -> str:
        """Sentence that says which of them is kept, and why."""
        low, high = self.gain.interval
        found = f"{self.best} has {self.gain.ratio:.2f}x its tokens per second"
        if not self.others or math.isnan(low):
            found += (
                ", but more prompts are needed for an interval, "
                f"{2 * FEWEST * self.batch} or more, and time for them (--budget)"
            )
        elif self.again is None:
            found += (
                f", with a {100 * self.level:.3g}% interval of {low:.2f} to {high:.2f}, which does "
                "not exclude no gain"
            )
        else:
            low, high = self.again.interval
            found = (
                f"{self.best} has {self.again.ratio:.2f}x its tokens per second (95%: {low:.2f} to "
                f"{high:.2f}) on {self.others} prompts that had no part in the choice"
            )
        kept = "replaced" if self.taken else "kept"
        return f"The default ({self.default}) is {kept}: {found}."

    def to_json(self) -> JsonObject:
        """Return the keys of a profile's row that describe the choice."""
        again = self.again
        reported = again if self.taken else None
        return {
            "taken": self.taken,
            "reason": self.reason,
            # The gain of the default over itself is 1.
            "gain_over_default": 1.0 if reported is None else reported.ratio,
            "gain_ci95": None if reported is None else reported.interval,
            "best": {
                "label": self.best,
                "gain": self.gain.ratio,
                "gain_interval": self.gain.interval,
                "level": self.level,
                "gain_again": None if again is None else again.ratio,
                "gain_again_ci95": None if again is None else again.interval,
                "prompts_again": self.others,
            },
        }


def enough(prompts: Sequence[Prompt], batch: int) -> bool:
    """Return True if there are enough prompts for an interval of the gain."""
    units = {prompt.unit for prompt in prompts}
    return (len(units) if batch == 1 else math.ceil(len(prompts) / batch)) >= FEWEST


def pace_of(
    target: Target, prompts: Sequence[Prompt], batch: int, sampling: Sampling
) -> tuple[float, float]:
    """Return the seconds of a batch's prefill and of a plain step, from a short run."""
    requests = [Request(prompt.token_ids, i) for i, prompt in enumerate(prompts[:batch])]
    for _ in range(2):  # the first run warms up
        replies = generate(target, PlainDecoding(), requests, TRIAL, sampling)
    steps = max(len(reply.rounds) for reply in replies)
    return max(reply.ttft_s for reply in replies), metrics.batch_seconds(replies) / max(steps, 1)


def tuned_row(
    target: Target,
    ways: Sequence[Candidate],
    prompts: Sequence[Prompt],
    batch: int,
    sampling: Sampling,
    seconds: float,
    tick: Callable[[str], None],
) -> JsonObject:
    """Measure the candidates `ways`, the default first, in about `seconds`.

    Returns a row of the profile.
    """
    sampling = sampling.resolved(target.repetition_penalty)
    read_s, step_s = pace_of(target, prompts, batch, sampling)
    count, tokens = effort_for(seconds, len(prompts), batch, len(ways) - 1, read_s, step_s)
    chosen_on, others = halves(fewer(prompts, count))
    if not enough(others, batch):
        # Neither half is enough for a choice, so the figures shown are those of all prompts.
        chosen_on, others = [*chosen_on, *others], []
    # More prompts are worth more than repeated runs.
    setting = Setting(sampling, batch, tokens, repeats=1)
    default, left, tried = ways[0], list(ways[1:]), []
    for size, part in rungs(len(left))[:-1]:
        some = fewer(chosen_on, max(len(chosen_on) // part, min(batch, len(chosen_on))))
        tick(f"{size} chains and trees on {len(some)} prompts")
        first, *results = decoded(target, [default, *left], some, setting)
        ratios = [gain(turns, first, batch).ratio for turns in results]
        gains = {way.label: ratio for way, ratio in zip(left, ratios, strict=True)}
        tried.append({"prompts": len(some), "gains": gains})
        # NaN, from replies without a round, comes last
        left.sort(key=lambda way: -gains[way.label] if gains[way.label] > 0 else 0.0)
        left = left[: max(math.ceil(len(left) / 2), FINALISTS)]
    row = _decided(target, default, left, (chosen_on, others), setting, tick)
    return row | {
        "candidates": len(ways),
        "tried": tried,
        "effort": {
            "prompts": len(chosen_on),
            "prompts_again": len(others),
            "max_new_tokens": tokens,
        },
    }


def _decided(
    target: Target,
    default: Candidate,
    finalists: Sequence[Candidate],
    halves_of_prompts: tuple[Sequence[Prompt], Sequence[Prompt]],
    setting: Setting,
    tick: Callable[[str], None],
) -> JsonObject:
    """Return the row of the finalists, decoded with the default and plain decoding."""
    prompts, others = halves_of_prompts
    batch, ways = setting.batch, [PLAIN, default, *finalists]
    tick(f"{len(finalists)} finalists on {len(prompts)} prompts")
    results = decoded(target, ways, prompts, setting)
    finals = [
        _final(way, turns, results[0], batch) for way, turns in zip(ways, results, strict=True)
    ]
    level = level_of(len(finalists))
    gains = [gain(turns, results[1], batch, level) for turns in results[2:]]
    measured = [
        {**final, "gain": own.ratio, "gain_interval": own.interval}
        for final, own in zip(finals[2:], gains, strict=True)
    ]
    best = max(range(len(gains)), key=lambda place: gains[place].ratio)
    choice = Choice(default.label, finalists[best].label, gains[best], level, batch, len(others))
    if choice.promising:
        tick(f"the gain on {len(others)} other prompts")
        before, after = decoded(target, [default, finalists[best]], others, setting)
        choice.again = gain(after, before, batch)
    return {
        "temperature": setting.sampling.temperature,
        "batch": batch,
        **finals[2 + best if choice.taken else 1],
        **choice.to_json(),
        "plain": finals[0],
        "default": finals[1],
        "finalists": [finals[1], *measured],
    }


def _final(way: Candidate, turns: Sequence[Turn], plain: Sequence[Turn], batch: int) -> JsonObject:
    """Return a candidate with its measured figures."""
    f = figures_of_drafter(turns, plain, batch)
    measured = {
        "tau": NAN if f.tau_incl_bonus is None else f.tau_incl_bonus,
        "tokens_s": f.tokens_s,
        "speedup": NAN if f.speedup is None else f.speedup,
    }
    return {"kind": way.kind, "label": way.label, "setting": way.setting, "measured": measured}


def decoded(
    target: Target, ways: Sequence[Candidate], prompts: Sequence[Prompt], setting: Setting
) -> list[list[Turn]]:
    """Decode `prompts` with each of `ways` alternately, and return the replies of each."""
    loops = [ChosenWay(way.label, way.make, way.setting) for way in ways]
    return list(decode_alternately(target, loops, prompts, setting).values())
