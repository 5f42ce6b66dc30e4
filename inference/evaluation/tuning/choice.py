"""Choice of `draftsmith tune` between the default tree and the best of the finalists.

The finalists are measured with the default on one half of the prompts. The best one is taken only
if the interval of its gain excludes no gain. The best of several on the prompts that it was chosen
on is also the luckiest, so what is reported is its gain on the other half of the prompts, which had
no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....heads.files import JsonObject
from ...conversations.choice import alternately, number_of
from ...conversations.prompts import Prompt
from ..figures import Gain
from ..intervals import LEVEL
from ..results import FEWEST


def fewer(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` of the prompts, evenly over their categories, in their order."""
    groups = [(prompt.category,) for prompt in prompts]
    units = [number_of(str(prompt.unit)) for prompt in prompts]
    return [prompts[index] for index in sorted(alternately(groups, units)[:count])]


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts that a tree is chosen on, and those on which its gain is measured.

    Of each category every second one is in the second half; prompts of one unit stay together. The
    second half is empty where there are too few.
    """
    by_category = sorted(prompts, key=lambda prompt: prompt.category)
    units = list(dict.fromkeys(prompt.unit for prompt in by_category))
    first = units[::2] if len(units) >= 2 * FEWEST else units
    chosen_on = [prompt for prompt in prompts if prompt.unit in first]
    return chosen_on, [prompt for prompt in prompts if prompt.unit not in first]


def level_of(finalists: int) -> float:
    """Return the level of each finalist's interval: together they err in 5% (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(finalists, 1)


@dataclass
class Choice:
    """Best finalist and the default: its gains, and whether it is taken."""

    default: str
    """Label of the default."""
    best: str
    """Label of the finalist with the highest gain."""
    gain: Gain
    """Its gain on the prompts that it was chosen on, with the interval of `level`."""
    level: float
    batch: int
    others: int
    """Number of the other prompts; 0 where there are too few."""
    again: Gain | None = None
    """Its gain on these, with its 95% interval; None until it is measured."""

    @property
    def promising(self) -> bool:
        """True if the interval excludes no gain, and there are prompts to measure it again."""
        return self.others > 0 and self.gain.interval[0] > 1

    @property
    def taken(self) -> bool:
        """True if the best finalist replaces the default.

        The second measurement decides nothing, so that it is unbiased, unless it excludes a gain.
        """
        return self.promising and self.again is not None and self.again.interval[1] >= 1

    @property
    def reason(self) -> str:
        """One line that says what is kept, and why."""
        kept = f"The default ({self.default}) is kept: "
        low, high = self.gain.interval
        if not self.others or math.isnan(low):
            return (
                f"{kept}{self.best} has {self.gain.ratio:.2f}x its tokens per second, but more "
                "prompts are needed for an interval, "
                f"{2 * FEWEST * self.batch} or more, and time for them (--budget)."
            )
        if not self.promising:
            return (
                f"{kept}the best finalist, {self.best}, has {self.gain.ratio:.2f}x its tokens per "
                f"second, with a {100 * self.level:.3g}% interval of {low:.2f} to {high:.2f}, "
                "which does not exclude no gain."
            )
        assert self.again is not None
        low, high = self.again.interval
        found = (
            f"{self.again.ratio:.2f}x (95%: {low:.2f} to {high:.2f}) the tokens per second of the "
            f"default on {self.others} prompts that had no part in the choice"
        )
        if not self.taken:
            return f"{kept}{self.best} has {found}."
        return f"{self.best} is taken in place of the default ({self.default}): {found}."

    def to_json(self) -> JsonObject:
        """Return the keys of a profile's row that are about the choice."""
        again = self.again
        reported = again if self.taken else None
        return {
            "taken": self.taken,
            "reason": self.reason,
            # 1 is that of the default over itself
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
    """Return whether an interval of the gain on these prompts can be given."""
    units = {prompt.unit for prompt in prompts}
    return (len(units) if batch == 1 else math.ceil(len(prompts) / batch)) >= FEWEST
