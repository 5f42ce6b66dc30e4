"""Measurement of the finalists of `draftsmith tune` with the default tree and plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....heads.files import JsonObject
from ...conversations.prompts import Prompt
from ...decode import Generation, Request, generate
from ...settings import Sampling
from ...targets.target import Target
from ..figures import figures_of_drafter, gain
from ..measure import Setting, Turn, decode_alternately
from ..results import NAN
from .budget import finalists_that_fit
from .candidates import Candidate
from .choice import Choice, enough, level_of
from .costs import DraftCosts, VerifyCosts, predicted
from .options import TuneOptions
from .replay_roots import KnownText


@dataclass
class Search:
    """Candidates of one drafter at one temperature, and everything that predicts their speed."""

    sampling: Sampling
    ways: list[Candidate]
    """All candidates, the default one first."""
    texts: list[KnownText]
    verify: VerifyCosts
    costs: DraftCosts
    plain: Candidate
    """Plain decoding, which accepts nothing at any root."""
    plain_costs: DraftCosts
    prompts: list[Prompt]
    """Prompts that `texts` answer, on which finalists are measured."""
    others: list[Prompt]
    """Prompts on which the gain of the one that is taken is measured again."""
    tokens: int
    """Longest reply to them."""

    def predict(self, way: Candidate, batch: int) -> dict[str, float]:
        """Return `predicted` of `plain` or of one of `ways`."""
        costs = self.plain_costs if way is self.plain else self.costs
        return predicted(way, self.texts, batch, self.verify, costs)

    def ranked(self, batch: int) -> list[Candidate]:
        """Return all but the default, those of most predicted tokens per second first."""
        # a default of fixed shape may be among the others a second time
        others = [way for way in self.ways if way.setting != self.ways[0].setting]
        return sorted(others, key=lambda way: -self.predict(way, batch)["tokens_s"])


def measured_row(
    target: Target,
    search: Search,
    batch: int,
    options: TuneOptions,
    seconds: float,
    tick: Callable[[str], None],
) -> JsonObject:
    """Measure the best predictions in about `seconds`, and return a row of the profile.

    The default and plain decoding are measured with them. Predictions are scaled by `pace`, plain
    decoding's measured speed over its predicted one: machines speed up and slow down, and
    candidates are compared with plain decoding at the moment of the measurement.
    """
    prompts, others = search.prompts, search.others
    if not enough(others, batch):
        # They are measured together to be shown, since nothing can be chosen on either half.
        prompts, others = [*prompts, *others], []
    promising = [search.plain, search.ways[0], *search.ranked(batch)[: options.finalists]]
    speeds = [search.predict(way, batch)["tokens_s"] for way in promising]
    runs = [len(prompts) * search.tokens / speed for speed in speeds]
    again = len(others) / len(prompts)
    count, repeats = finalists_that_fit(options.finalists, options.repeats, runs, again, seconds)
    ways = promising[: 2 + count]
    temperature = search.sampling.temperature
    tick(f"{len(ways) - 2} finalists, T = {temperature:g}, batch {batch}")
    setting = Setting(search.sampling, batch, search.tokens, repeats)
    results = decoded(target, ways, prompts, setting)
    finals, pace = _finals(search, ways, results, batch)
    level = level_of(len(ways) - 2)
    gains = [gain(turns, replies(results[1]), batch, level) for turns in results[2:]]
    measured = [
        {**final, "gain": own.ratio, "gain_interval": own.interval}
        for final, own in zip(finals[2:], gains, strict=True)
    ]
    best = max(range(len(gains)), key=lambda place: gains[place].ratio)
    choice = Choice(ways[1].label, ways[2 + best].label, gains[best], level, batch, len(others))
    if choice.promising:
        tick(f"the gain on {len(others)} other prompts")
        before, after = decoded(target, [ways[1], ways[2 + best]], others, setting)
        choice.again = gain(after, replies(before), batch)
    return {
        "temperature": temperature,
        "batch": batch,
        **finals[2 + best if choice.taken else 1],
        **choice.to_json(),
        "plain": finals[0],
        "default": finals[1],
        "finalists": [finals[1], *measured],
        "candidates": len(search.ways),
        "cost_fit_error": search.costs.error,
        "pace": pace,
    }


def _finals(
    search: Search, ways: Sequence[Candidate], results: Sequence[Sequence[Turn]], batch: int
) -> tuple[list[JsonObject], float]:
    """Return each way with its prediction next to its measurement, and plain decoding's pace."""
    finals: list[JsonObject] = []
    pace = 1.0
    for way, turns in zip(ways, results, strict=True):
        f = figures_of_drafter(turns, replies(results[0]), batch)
        assert f.tau_incl_bonus is not None and f.tokens_s is not None
        prediction = search.predict(way, batch)
        unscaled = prediction["tokens_s"]
        if way is search.plain:  # the first
            pace = f.tokens_s / unscaled
        finals.append(
            {
                "kind": way.kind,
                "label": way.label,
                "setting": way.setting,
                "predicted": {
                    **prediction, "tokens_s": unscaled * pace, "tokens_s_unscaled": unscaled,
                },
                "measured": {
                    "tau": f.tau_incl_bonus,
                    "tokens_s": f.tokens_s,
                    "speedup": NAN if f.speedup is None else f.speedup,
                },
            }
        )  # fmt: skip
    return finals, pace


def replies(turns: Sequence[Turn]) -> list[Generation]:
    return [turn.generation for turn in turns]


def decoded(
    target: Target, ways: Sequence[Candidate], prompts: Sequence[Prompt], setting: Setting
) -> list[list[Turn]]:
    """Decode `prompts` with each of `ways` alternately, and return the replies of each."""
    loops = [_Ready(target, way) for way in ways]
    return list(decode_alternately(target, loops, prompts, setting).values())


class _Ready:
    """Candidate as a way to decode (a `measure.OwnLoop`), which is set up when its turn comes."""

    def __init__(self, target: Target, candidate: Candidate) -> None:
        self.name, self._target, self._candidate = candidate.label, target, candidate

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """Decode like `decode.generate`."""
        return generate(self._target, self._candidate.make(), requests, max_new_tokens, sampling)
