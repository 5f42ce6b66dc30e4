"""Sections of a report's page about time: speed-ups, what the cost model says, parts of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import log2

from ..results import NAN, Report, SettingFigures
from .axes import Axis, nudged
from .charts import Bar, Interval, Series, Shares, bar_chart, line_chart, share_chart
from .page import Figure, others_folded, side_by_side
from .tables import Colours, caption, factor, finite_pair, firsts, is_finite

# Parts of a round (docs/metrics.md#speed), and the words that stand for them.
PARTS = {
    "draft": "draft",
    "verify": "verify",
    "accept": "accept",
    "kv": "cache",
    "host": "rest",
}
MISFIT = 0.15  # share of the measured speed-up by which a model may be off without a remark


@dataclass
class Growth:
    """Speed-ups of one drafter over batch sizes, the smallest first; NaN where not known."""

    name: str
    batches: list[int]
    measured: list[float]
    intervals: list[Interval]
    modelled: list[float]
    """Predictions of the cost model: `modelled_speedup` in docs/metrics.md#speed."""

    @property
    def scale(self) -> float:
        """Factor by which the model is multiplied to begin at the measured point; 1 without one."""
        for measured, modelled in zip(self.measured, self.modelled, strict=True):
            if is_finite(modelled):
                return measured / modelled if is_finite(measured) and modelled > 0 else 1.0
        return 1.0

    @property
    def drawn(self) -> list[float]:
        """The model's speed-ups, scaled so that the first of them is the measured one."""
        return [self.scale * value for value in self.modelled]


def growths(settings: Sequence[SettingFigures]) -> list[Growth]:
    """Return the speed-ups of every drafter over settings that differ in batch size only."""
    found: dict[str, Growth] = {}
    for setting in settings:
        for name, s in setting.drafting.items():
            growth = found.setdefault(name, Growth(name, [], [], [], []))
            growth.batches.append(setting.batch)
            growth.measured.append(s.speedup if is_finite(s.speedup) else NAN)
            growth.intervals.append(finite_pair(s.speedup_ci95))
            growth.modelled.append(s.modelled_speedup if is_finite(s.modelled_speedup) else NAN)
    return list(found.values())


def misfits(growth: Growth) -> list[str]:
    """Return where the cost model is off by more than `MISFIT`, in words; [] if it is nowhere.

    At the smallest batch size the model itself counts, at the others what is drawn of it: the model
    scaled to the point measured at the smallest.
    """
    said: list[str] = []
    first = True
    for batch, measured, modelled, drawn in zip(
        growth.batches, growth.measured, growth.modelled, growth.drawn, strict=True
    ):
        predicted = modelled if first else drawn
        if not (measured > 0 and is_finite(predicted)):
            continue
        off = abs(predicted - measured) / measured
        if off > MISFIT:
            scaled = "" if first else " by the dashed line"
            said.append(
                f"batch {batch}, {growth.name}: {factor(predicted)} predicted{scaled}, "
                f"{factor(measured)} measured, off by {off:.0%}"
            )
        first = False
    return said


def speed(report: Report, colours: Colours) -> str:
    """Return a chart of the speed-up for each temperature: over batch sizes, or bars for one.

    A sentence and a list below them say where the cost model does not fit.
    """
    figures, remarks = [], []
    for first in firsts(report):
        kind = first.temperature, first.lossless
        same = [s for s in report.settings if (s.temperature, s.lossless) == kind]
        same.sort(key=lambda setting: setting.batch)
        title = f"Speed-up, T = {first.temperature:g}{'' if first.lossless else ', LOSSY'}"
        if len(same) == 1:
            figures.append(Figure(title, _one_batch(first, colours), "dotted: plain decoding"))
            continue
        lines = growths(same)
        note = (
            "points: measured, with 95% intervals; dotted: plain decoding; dashed: predicted by "
            "the cost model from the smallest batch, so that it begins at the point measured there"
        )
        figures.append(Figure(title, _over_batches(lines, same, colours), note))
        for line in lines:
            remarks += [f"T = {first.temperature:g}, {said}" for said in misfits(line)]
    if not remarks:
        return side_by_side(figures)
    lead = f"The cost model is off by more than {MISFIT:.0%} of the measured speed-up here:"
    listed = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f'{side_by_side(figures)}<p class="note">{lead}</p>\n<ul class="note">{listed}</ul>\n'


def _one_batch(setting: SettingFigures, colours: Colours) -> partial[str]:
    """Return what draws the speed-ups of one setting as bars."""
    bars = []
    for name, s in setting.drafting.items():
        if s.speedup is not None:
            bars.append(Bar(name, s.speedup, colours[name], finite_pair(s.speedup_ci95)))
    label = f"speed-up over plain decoding, batch {setting.batch}"
    return partial(bar_chart, [("", bars)], label, 1.0)


def _over_batches(
    growths: Sequence[Growth], settings: Sequence[SettingFigures], colours: Colours
) -> partial[str]:
    """Return what draws the speed-up over batch sizes, measured (points) and predicted (dashed).

    Batch sizes are on a logarithmic axis.
    """
    lines = []
    for growth, offset in zip(growths, nudged(len(growths), 0.12), strict=True):
        name, colour = growth.name, colours[growth.name]
        xs = [log2(batch) + offset for batch in growth.batches]
        measured = list(zip(xs, growth.measured, strict=True))
        predicted = list(zip(xs, growth.drawn, strict=True))
        lines.append(Series(f"{name}, predicted", predicted, colour, dashed=True, named=False))
        lines.append(Series(name, measured, colour, growth.intervals, joined=False))
    sizes = [(log2(setting.batch), str(setting.batch)) for setting in settings]
    x, y = Axis("batch size (requests)", ticks=sizes), Axis("speed-up over plain decoding", low=0)
    return partial(line_chart, lines, x, y, 1.0)


def times(report: Report) -> str:
    """Return charts of the parts of a round's time, for each way of decoding."""

    def draw(setting: SettingFigures) -> list[Figure]:
        """Return the chart of one setting."""
        rows = []
        for name, s in setting.drafters.items():
            parts = [s.split.get(part, 0.0) for part in PARTS]
            # Other libraries' loops (transformers' assisted generation) time no parts, so that all
            # of their time is the rest.
            if s.rounds and sum(parts[:-1]) > 0:
                rows.append(Shares(name, parts, f"{sum(parts) / s.rounds * 1000:.2f} ms"))
        note = "shares of a round; after them its length"
        if setting.batch != 1:
            note += ", shared among the batch's requests"
        chart = partial(share_chart, rows, list(PARTS.values()))
        return [Figure(f"Time of a round, {caption(setting)}", chart, note)]

    charts = others_folded(report, draw)
    if not charts:
        return ""
    meaning = (
        "draft: the drafter's own passes. verify: the target's pass over the draft tree. accept: "
        "the acceptance rule. cache: moving accepted tokens in the caches. rest: what the loop "
        "takes besides these."
    )
    return f'{charts}<p class="note">{meaning}</p>\n'
