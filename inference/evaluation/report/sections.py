"""Sections of a report's page, as HTML.

Most are functions of a report, and return "" where it has no numbers for them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import log2

from ....heads.files import JsonObject
from ..results import PromptSet, Report, Sample, SettingFigures
from .charts import LOOKS, Axis, Bar, Series, Shares, bar_chart, line_chart, nudged, share_chart
from .page import figure, folded, side_by_side
from .tables import (
    UNNAMED,
    Training,
    bounds,
    caption,
    categories,
    factor,
    fastest,
    finite_pair,
    firsts,
    interval,
    loop_shares,
    number,
    summary,
)

PARTS = ("draft", "verify", "accept", "kv", "host")  # of a round; docs/metrics.md#speed
BARS = 30  # in one figure, about
DEEPEST = 6  # depth that has a colour of its own; deeper drafts share it
Colours = Mapping[str, int]
"""Numbers of looks (`charts.LOOKS`) by drafters' names."""


def colours_of(reports: Sequence[Report], baselines: Sequence[str]) -> dict[str, int]:
    """Return a look (colour and marker) for each drafter, the same on the whole page.

    Plain decoding has the neutral one, 0. Baselines come last, so that their number does not change
    the looks of the user's own drafters.
    """
    names: dict[str, None] = {}
    for report in reports:
        for setting in report.settings:
            names |= dict.fromkeys(setting.drafting)
    drafters = [name for name in names if name not in baselines]
    ordered = drafters + [name for name in names if name in baselines]
    looks = {"plain": 0}
    for place, name in enumerate(ordered):
        looks[name] = 1 + place % LOOKS
    return looks


def facts(report: Report, path: str) -> str:
    """Return a list of what the report was measured on; `path` is where it was read from."""
    memory = report.peak_memory_bytes
    rows = {
        "report": path,
        "target": report.target.name if report.target is not None else None,
        "measured": report.started_at.replace("T", " ").replace("+00:00", " UTC"),
        "machine": _machine(report),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
        "prompts": _prompt_set(report.prompt_set),
        "replies": _reply_limits(report.options or {}),
        "partial": f"only {report.partial} so far" if report.partial else None,
        **{f"without {name}": why for name, why in report.left_out.items()},
    }
    body = ""
    for name, value in rows.items():
        if value:
            body += f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
    if report.command:
        # The style keeps a word whole where it fits in a line, so that options do not break.
        words = " ".join(f"<span>{escape(word)}</span>" for word in report.command.split(" "))
        body += f"<dt>command</dt><dd><code>{words}</code></dd>"
    return f'<dl class="facts">{body}</dl>\n'


def _machine(report: Report) -> str:
    """Return device, dtype and threads, as far as the report has them."""
    known = [report.device, report.dtype]
    if report.threads is not None:
        known.append(f"threads: {report.threads}")
    return ", ".join(str(value) for value in known if value is not None)


def _prompt_set(prompts: PromptSet) -> str:
    """Return how many prompts there are, of which file, and their categories if several."""
    path = prompts.path or "an unnamed set"
    text = f"{prompts.prompts} of {path}, SHA-256 {prompts.sha256[:12]}"
    categories = [name for name in prompts.categories if name]
    if len(categories) > 1:
        text += f", {len(categories)} categories: {', '.join(categories)}"
    return text


def _reply_limits(options: JsonObject) -> str | None:
    """Return the limit of a reply's tokens and the runs of each request; `None` if not known."""
    if "max_new_tokens" not in options:
        return None
    runs = options.get("repeats", 1)
    return f"at most {options['max_new_tokens']} tokens, timed runs of each: {runs}"


def verdict(report: Report) -> str:
    """Return a remark on losslessness, and a line for each temperature with its fastest drafter.

    The line is about the smallest batch of that temperature.
    """
    if not report.settings:
        return ""
    lossy = [f"T = {s.temperature:g}, batch {s.batch}" for s in report.settings if not s.lossless]
    lines = []
    if lossy:
        lossy_settings = "; ".join(lossy)
        lines.append(
            '<p class="lossy" role="alert">⚠ LOSSY: typical acceptance does not keep the '
            f"target's distribution ({lossy_settings}). Replies differ from the target's own in "
            "distribution, and speed-ups are not those of lossless decoding.</p>"
        )
    else:
        lines.append(
            '<p class="lossless">✓ lossless: every rule used keeps the target\'s distribution</p>'
        )
    for setting in firsts(report):
        name = fastest(setting)
        title = caption(setting)
        if name is None:
            lines.append(
                f'<p class="verdict">{title}: no drafter is faster than plain decoding.</p>'
            )
            continue
        s = setting.drafters[name]
        # Of fewer than five prompts or batches there is no interval.
        between = ""
        if finite_pair(s.speedup_ci95):
            between = f" (95% {interval(s.speedup_ci95)})"
        lines.append(
            f'<p class="verdict">{title}: <strong>{escape(name)}</strong> is fastest, '
            f"<strong>{factor(s.speedup)}</strong> plain decoding{between}, at "
            f"{number(s.tau_incl_bonus)} tokens a round.</p>"
        )
    return "\n".join(lines)


def others_folded(report: Report, draw: Callable[[SettingFigures], list[str]]) -> str:
    """Return figures of the smallest batches in sight, and those of all others folded.

    `draw` returns the figures of one setting.
    """
    smallest = firsts(report)
    in_sight, others = [], []
    for setting in smallest:
        in_sight += draw(setting)
    for setting in report.settings:
        # By identity, since two settings may be equal in all their numbers.
        if not any(setting is first for first in smallest):
            others += draw(setting)
    return side_by_side(in_sight) + folded("Other batch sizes", side_by_side(others))


def summaries(report: Report, colours: Colours) -> str:
    """Return a table for each setting, and the remarks that a reader of it needs."""
    tables = [summary(setting, report.drafter_bytes).html(colours) for setting in report.settings]
    notes = [
        "tau: tokens a round, the target's own included. Bold: the highest speed-up. Intervals "
        "are over prompts."
    ]
    if shares := loop_shares(report):
        notes.append(shares)
    for setting in report.settings:
        for name, s in setting.drafters.items():
            if (gap := s.largest_gap) is not None:
                differ = "where a reply first differs, the target's two best logits are at most"
                notes.append(f"{caption(setting)}, {name}: {differ} {gap:.2g} apart.")
    return "".join(tables) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def acceptance(report: Report, colours: Colours) -> str:
    """Return charts of acceptance by position and of survival, with a line for each drafter.

    Dashed lines are `cond_offered`, where it differs; see docs/metrics.md#acceptance.
    """

    def draw(setting: SettingFigures) -> list[str]:
        """Return both charts of one setting."""
        accepted, survived = [], []
        for name, s in setting.drafting.items():
            colour = colours[name]
            accepted.append(Series(name, _by_depth(s.cond_accept), colour))
            if s.cond_offered and s.cond_offered != s.cond_accept:
                points = _by_depth(s.cond_offered)
                accepted.append(
                    Series(f"{name}, where offered", points, colour, dashed=True, label="")
                )
            survived.append(Series(name, _by_depth(s.survival), colour))
        deepest = max((len(line.points) for line in (*accepted, *survived)), default=0)
        # About 16 ticks at most: every depth, every second one, and so on.
        # 40 depths, 40 / 16 rounded up: every third one has a tick.
        step = max(1, -(-deepest // 16))
        depths = [(float(i), str(i)) for i in range(1, deepest + 1, step)]
        x = Axis("position in the draft", 1, deepest, depths)
        note = "accepted, given that those before it were"
        if any(line.dashed for line in accepted):
            note += "; dashed: among the rounds that had a draft there"
        return [
            figure(
                f"Acceptance by position, {caption(setting)}",
                line_chart(accepted, x, Axis("acceptance", 0, 1)),
                note,
            ),
            figure(
                f"Survival, {caption(setting)}",
                line_chart(survived, x, Axis("share of rounds", 0, 1)),
                "rounds that accept at least so many",
            ),
        ]

    return others_folded(report, draw)


def _by_depth(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return points (depth, value) of values at the depths 1, 2, ..; `None` has no point."""
    points = []
    for depth, value in enumerate(values, 1):
        if value is not None:
            points.append((float(depth), value))
    return points


def by_category(report: Report, colours: Colours) -> str:
    """Return bar charts of tau by category of prompts, where there is more than one."""

    def draw(setting: SettingFigures) -> list[str]:
        """Return the charts of one setting, each of as many categories as fit."""
        if (table := categories(setting)) is None:
            return []
        groups = []
        for category in (row[0] for row in table.rows):
            # The table names the category of prompts that have none; in the report it is empty.
            key = "" if category == UNNAMED else category
            bars = []
            for name, s in setting.drafting.items():
                if c := s.by_category.get(key):
                    bars.append(Bar(name, c.tau_incl_bonus, colours[name], finite_pair(c.tau_ci95)))
            groups.append((category, bars))
        # Many categories go on in further figures, with the same axis.
        highest = []
        for _, bars in groups:
            for bar in bars:
                highest.append(max(bar.value, *(bar.interval or (0,))))
        high = max(highest)
        per_figure = max(1, BARS // len(setting.drafting))
        pieces = [groups[i : i + per_figure] for i in range(0, len(groups), per_figure)]
        title = f"Tau by category, {caption(setting)}"
        note = "dotted: plain decoding; whiskers: 95% over prompts"
        figures = []
        for piece, suffix in zip(pieces, numbered(len(pieces)), strict=True):
            chart = bar_chart(piece, "tau (tokens a round)", 1.0, high)
            figures.append(figure(f"{title}{suffix}", chart, note))
        return figures

    return others_folded(report, draw)


def numbered(count: int) -> list[str]:
    """Return suffixes for the titles of `count` figures that belong together; none for one."""
    if count == 1:
        return [""]
    return [f" ({i} of {count})" for i in range(1, count + 1)]


def speed(report: Report, colours: Colours) -> str:
    """Return a chart of the speed-up for each temperature: over batch sizes, or bars for one."""
    figures = []
    for first in firsts(report):
        kind = first.temperature, first.lossless
        same = [s for s in report.settings if (s.temperature, s.lossless) == kind]
        same.sort(key=lambda setting: setting.batch)
        title = f"Speed-up, T = {first.temperature:g}" + ("" if first.lossless else ", LOSSY")
        if len(same) > 1:
            note = (
                "points: measured, with 95% intervals; dashed: predicted from the smallest "
                "batch and plain decoding's steps; dotted: plain decoding"
            )
            figures.append(figure(title, _over_batches(same, colours), note))
            continue
        bars = []
        for name, s in first.drafting.items():
            if s.speedup is not None:
                whisker = finite_pair(s.speedup_ci95)
                bars.append(Bar(name, s.speedup, colours[name], whisker, None))
        label = f"speed-up over plain decoding, batch {first.batch}"
        chart = bar_chart([("", bars)], label, 1.0)
        figures.append(figure(title, chart, "dotted: plain decoding"))
    return side_by_side(figures)


def _over_batches(settings: Sequence[SettingFigures], colours: Colours) -> str:
    """Return a chart of the speed-up over batch sizes, measured (points) and predicted (dashed).

    The prediction is `modelled_speedup` of docs/metrics.md#speed. Batch sizes are on a logarithmic
    axis.
    """
    found: dict[str, None] = {}  # the drafters of all batch sizes, in order
    for setting in settings:
        found |= dict.fromkeys(setting.drafting)
    names = list(found)
    lines = []
    for name, offset in zip(names, nudged(len(names), 0.12), strict=True):
        measured, intervals, predicted = [], [], []
        for setting in settings:
            if name not in setting.drafters:
                continue
            s = setting.drafters[name]
            x = log2(setting.batch) + offset
            if s.speedup is not None:
                measured.append((x, s.speedup))
                intervals.append(finite_pair(s.speedup_ci95))
            if s.modelled_speedup is not None:
                predicted.append((x, s.modelled_speedup))
        lines.append(Series(f"{name}, predicted", predicted, colours[name], dashed=True, label=""))
        lines.append(Series(name, measured, colours[name], intervals, joined=False))
    sizes = [(log2(setting.batch), str(setting.batch)) for setting in settings]
    return line_chart(
        lines,
        Axis("batch size (requests)", ticks=sizes),
        Axis("speed-up over plain decoding", low=0),
        1.0,
    )


def times(report: Report) -> str:
    """Return charts of the parts of a round's time, for each way of decoding."""

    def draw(setting: SettingFigures) -> list[str]:
        """Return the chart of one setting."""
        rows = []
        for name, s in setting.drafters.items():
            parts = [s.split.get(part, 0.0) for part in PARTS]
            # Other libraries' loops (transformers' assisted generation) time no parts, so that all
            # of their time is the host's.
            if s.rounds and sum(parts[:-1]) > 0:
                rows.append(Shares(name, parts, f"{sum(parts) / s.rounds * 1000:.2f} ms"))
        note = "share of a round; behind it its length"
        if setting.batch != 1:
            note += ", shared among the batch's requests"
        return [figure(f"Time of a round, {caption(setting)}", share_chart(rows, PARTS), note)]

    return others_folded(report, draw)


def training(runs: Sequence[Training]) -> str:
    """Return charts of loss and tau over the steps of each training run."""
    figures = []
    for run in runs:
        x = Axis("step", low=0)
        loss = Series("loss", run.curve("loss"), 1, label="")
        figures.append(figure(f"{run.name}: training loss", line_chart([loss], x, Axis("loss"))))
        measured = run.curve("tau_measured")
        intervals = [bounds(run, step) for step, _ in measured]
        lines = [
            Series("measured", measured, 1, intervals, joined=False),
            Series("estimated", run.curve("tau_estimated"), 2, dashed=True),
        ]
        chart = line_chart(lines, x, Axis("tau (tokens a round)", low=1))
        note = (
            "dashed: estimated by replay on known texts; points: measured by decoding, with 95% "
            "intervals"
        )
        figures.append(figure(f"{run.name}: held-out tau", chart, note))
    return side_by_side(figures)


LEGEND = (
    '<ul class="legend"><li><i class="d1">1</i> <i class="d2">2</i> <i class="d3">3</i> '
    '<i class="d4">4</i> <i class="d5">5</i> '
    f'<i class="d{DEEPEST}">{DEEPEST}+</i> accepted draft of that depth</li>'
    '<li><i class="own">token</i> the target\'s own, at the end of a round</li>'
    '<li><i class="first">token</i> the prefill\'s</li></ul>'
    '<p class="note">Point at a token, tap it, or go along with the arrow keys: how it came, the '
    "target's probability of it, and its three best (at temperature 1 where decoding is greedy)."
    "</p>\n"
)


def replies(report: Report, colours: Colours) -> str:
    """Return the sampled replies of each drafter, token by token and folded.

    The first reply on the page is unfolded, to show what there is.
    """
    blocks: list[str] = []
    for setting in firsts(report):
        views = []
        for name in sorted(setting.drafting, key=lambda name: colours[name]):
            samples = [sample for sample in setting.drafters[name].samples if sample.tokens]
            opened = not blocks and not views
            inside = []
            for place, sample in enumerate(samples):
                inside.append(folded(_about(sample), reply(sample), opened and place == 0))
            if samples:
                views.append(folded(f"{name}: {len(samples)} replies", "".join(inside), opened))
        if views:
            blocks += [f"<h4>{escape(caption(setting))}</h4>", *views]
    return LEGEND + "".join(blocks) if blocks else ""


def _about(sample: Sample) -> str:
    """Return a reply's title: its id, its turn if a later one, and its numbers of tokens."""
    turn = f", turn {sample.turn + 1}" if sample.turn else ""
    accepted = sum(depth > 0 for depth in sample.came)
    return f"{sample.id}{turn} ({len(sample.tokens)} tokens, {accepted} of them accepted drafts)"


def reply(sample: Sample) -> str:
    """Return one reply as HTML, each token in an element that shows how it came.

    Every text in `sample` is escaped, and characters that cannot be seen are made visible.
    """
    spans = []
    for token, came, p, best in zip(sample.tokens, sample.came, sample.p, sample.best, strict=True):
        # `came` is the depth of an accepted draft, 0 for a bonus token, -1 for the prefill's token.
        if came > 0:
            kind, origin = f"d{min(came, DEEPEST)}", f"accepted draft, depth {came}"
        elif came < 0:
            kind, origin = "first", "from the prefill"
        else:
            kind, origin = "own", "the target's own"
        lines = [origin, f"{quoted(token)}  p = {number(p, '.3f')}"]
        for rank, (text, chance) in enumerate(best, 1):
            lines.append(f"{rank}. {quoted(text)}  {chance:.3f}")
        title = escape("\n".join(lines)).replace("\n", "&#10;")
        spans.append(f'<i class="{kind}" title="{title}">{visible(token)}</i>')
    prompt_text = visible(sample.prompt, False)
    prompt = folded("Prompt", f'<div class="prompt">{prompt_text}</div>')
    label = escape(f"reply to {sample.id}")
    # It can have the focus, so that the arrow keys reach its tokens.
    return (
        f'{prompt}<div class="reply" tabindex="0" role="group" '
        f'aria-label="{label}">{"".join(spans)}</div>'
    )


def quoted(text: str) -> str:
    """Return a token's text on one line, in quotation marks that show where it ends."""
    return "\u2018" + text.replace("\n", "↵").replace("\t", "⇥").translate(_CONTROLS) + "\u2019"


def visible(text: str, marked: bool = True) -> str:
    """Return `text` as HTML for an element that keeps white space.

    If `marked`, every line break has a sign before it, and an empty text is a sign.
    """
    if not text:
        return '<span class="nl">∅</span>' if marked else ""
    safe = escape(text.replace("\r\n", "\n").translate(_CONTROLS))
    return safe.replace("\n", '<span class="nl">↵</span>\n') if marked else safe


# Control characters become their pictures in Unicode (U+2400 and on). Invisible format characters,
# among them those that turn the direction of a text, become U+FFFD: a reply must not reorder the
# text around it.
_CONTROLS = {0x7F: 0x2421}
for _code in range(32):
    if chr(_code) not in "\n\t":
        _CONTROLS[_code] = 0x2400 + _code
for _code in range(0x202A, 0x206A):
    if unicodedata.category(chr(_code)) == "Cf":
        _CONTROLS[_code] = 0xFFFD
