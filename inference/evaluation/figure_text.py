"""Text of measured figures: numbers, intervals, and remarks next to them.

Remarks name a slow drafter, a busy machine and looping replies, which otherwise look like a gain.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch

from ..proposers.registry import UNTRAINED
from .drafter_names import LOOKUP
from .results import ByDepth, Conditions, DrafterFigures, Number, Report, SettingFigures

NOTHING = "-"  # in place of a figure that was not measured
SHOWN = 3  # positions whose acceptance the tables show; the JSON holds all
LOSS = 0.995  # speed-ups below it are printed as 0.99 or less
GAIN = 1.005  # speed-ups from it on are printed as 1.01 or more
SPARE = 0.5  # running processes above the cores that a quiet machine briefly shows
LOOPING = 0.2  # share of looping replies from which tau is doubtful
UNTRAINED_MARK = "untrained"
UNTRAINED_KIND = re.compile(rf"({'|'.join(UNTRAINED)})([ :]|$)")


def caption(*settings: SettingFigures) -> str:
    """Return `T = 0, batch 1, 4` for settings that differ in batch size only."""
    sizes = ", ".join(str(setting.batch) for setting in settings)
    return f"T = {settings[0].temperature:g}, batch {sizes}"


def is_measured(value: object) -> TypeGuard[float]:
    """Return True for a finite number; ratios of nothing are NaN, and JSON has huge integers."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def number_text(value: object, form: str = ".2f", scale: float = 1.0) -> str:
    """Return `value * scale` in the format `form`; a dash if it was not measured."""
    return format(value * scale, form) if is_measured(value) else NOTHING


def ratio_text(value: object) -> str:
    """Return a ratio as `1.34x`; a dash if it was not measured."""
    return f"{value:.2f}x" if is_measured(value) else NOTHING


def ends(pair: Sequence[Number] | None) -> tuple[float, float] | None:
    """Return both ends of an interval; None unless both are known."""
    low, high = pair or (None, None)
    return (low, high) if is_measured(low) and is_measured(high) else None


def interval_text(pair: Sequence[Number] | None, form: str = "{:.2f}-{:.2f}") -> str:
    """Return both ends of an interval in the format `form`; empty if they are not known."""
    found = ends(pair)
    return form.format(*found) if found else ""


def number_with_interval(value: object, pair: Sequence[Number] | None) -> str:
    """Return `2.31 (2.01-2.34)`, without the brackets if the interval is not known."""
    return number_text(value) + interval_text(pair, " ({:.2f}-{:.2f})")


def survival_text(survival: ByDepth) -> str:
    """Return the first figures of `survival` as `.71 .44 .25`."""
    shares = [share for share in survival[:SHOWN] if share is not None]
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares) or NOTHING


def equal_replies_text(same: int | None, of: int | None) -> str:
    """Return `yes`, `3 of 4`, or a dash if replies were not compared."""
    if same is None or not of:
        return NOTHING
    return "yes" if same == of else f"{same} of {of}"


def slower(speedups: Mapping[str, float | None]) -> str:
    """Return `slower than plain decoding: NAME (0.91x)` with every slower drafter, or ""."""
    lost = [f"{name} ({x:.2f}x)" for name, x in speedups.items() if is_measured(x) and x < LOSS]
    return f"slower than plain decoding: {', '.join(lost)}" if lost else ""


def busy(loads: list[float | None], cores: int | None, threads: int | None) -> str:
    """Return a warning if other processes took cores that a measurement needed, else "".

    `loads` are mean numbers of running processes, which include the measurement's own `threads`.
    Only a load above these and above `cores` is other work that slows the measurement down.
    """
    highest = max((load for load in loads if load is not None), default=None)
    if highest is None or cores is None or highest <= max(cores, threads or 1) + SPARE:
        return ""
    count = f"{cores} core{'s' if cores != 1 else ''}"
    return f"the machine was busy (load {highest:.1f} on {count}): read tau, not speed"


def busy_now() -> str:
    """Return `busy` of the last minute."""
    return busy([load()], os.cpu_count(), torch.get_num_threads())


def load() -> float | None:
    """Return the mean number of running processes in the last minute, or None."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def looping(share: float | None) -> str:
    """Return a remark on the share of looping replies if it makes tau doubtful, else ""."""
    if not is_measured(share) or share < LOOPING:
        return ""
    return f"{share:.0%} of the replies loop, which raises tau"


def headline(report: Report) -> list[str]:
    """Return the first lines about a report of `draftsmith evaluate`; [] without drafters.

    They are the number of prompts with the load of the machine, and a line for each setting.
    """
    if not report.settings:
        return []
    first = [report.scope, load_of(report.conditions, report.threads)]
    lines = ["; ".join(filter(None, first))]
    return lines + [f"{caption(setting)}: {of_setting(setting)}" for setting in report.settings]


def load_of(conditions: Conditions | None, threads: int | None) -> str:
    """Return a warning about a busy machine, else the load; "" if it is not known."""
    # The load is that of the whole machine, of which the process may use a part only.
    cores = conditions and (conditions.machine_cores or conditions.cores)
    if conditions is None or cores is None:
        return ""
    loads = [conditions.load_before, conditions.load_after]
    shown = " and ".join(f"{load:.1f}" for load in loads if is_measured(load))
    quiet = f"load before and after {shown} on {cores} core{'s' if cores != 1 else ''}"
    return busy(loads, cores, threads) or (quiet if shown else "")


def of_setting(setting: SettingFigures) -> str:
    """Return a sentence with the fastest drafter of a setting, slow ones, and looping replies.

    A drafter whose drafts come from an untrained part is marked, and the fastest trained one is
    named too.
    """
    drafting = setting.drafting
    parts = []
    if (name := fastest(setting)) is None:
        parts.append("no drafter is faster than plain decoding")
    else:
        untrained = untrained_part(name, drafting[name])
        mark = f" ({untrained})" if untrained else ""
        low = (drafting[name].speedup_ci95 or (None,))[0]
        sure = ", but too few prompts to be sure of it" if is_measured(low) and low <= 1 else ""
        parts.append(f"{name}{mark} is fastest, {gain_of(drafting[name])}{sure}")
        trained = [other for other in drafting if not untrained_part(other, drafting[other])]
        if untrained and trained:
            best = fastest(setting, trained)
            parts.append(
                f"the fastest trained drafter by itself is {best}, {gain_of(drafting[best])}"
                if best is not None
                else "no trained drafter by itself is faster than plain decoding"
            )
    speedups = {name: figures.speedup for name, figures in drafting.items()}
    parts += [slower(speedups), looping(setting.plain.loop_share)]
    return "; ".join(filter(None, parts))


def gain_of(figures: DrafterFigures) -> str:
    """Return `1.34x plain decoding (95%: 1.21-1.48), tau 3.20`."""
    between = interval_text(figures.speedup_ci95, " (95%: {:.2f}-{:.2f})")
    return (
        f"{figures.speedup:.2f}x plain decoding{between}, tau {number_text(figures.tau_incl_bonus)}"
    )


def fastest(setting: SettingFigures, names: Iterable[str] | None = None) -> str | None:
    """Return the drafter of the highest speed-up, among `names` if given.

    Returns None if no drafter is faster than plain decoding at two decimals.
    """
    gains = {}
    for name in setting.drafting if names is None else names:
        speedup = setting.drafters[name].speedup
        if is_measured(speedup) and speedup >= GAIN:
            gains[name] = speedup
    return max(gains, key=gains.__getitem__, default=None)


def untrained_part(name: str, figures: DrafterFigures) -> str:
    """Return `untrained` or `its lookup is untrained` for drafts without training, else "".

    Nothing is known of users' own classes. `name`, that in tables, is used in reports without
    `kind`.
    """
    kind = figures.kind or name
    if UNTRAINED_KIND.match(kind):
        return UNTRAINED_MARK
    looks_up = "lookup=" in kind or LOOKUP in kind
    return "its lookup is untrained" if looks_up else ""
