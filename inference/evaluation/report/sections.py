"""Sections of a report's page, as HTML.

Most are functions of a report, and return "" where it has no numbers for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape

from ....heads.files import JsonObject
from ..console_tables import over_untuned
from ..remarks import headline
from ..results import FEWEST, PromptSet, Report, SettingFigures
from .axes import Axis
from .charts import LOOKS, Bar, Series, bar_chart, line_chart
from .page import Figure, folded, others_folded, side_by_side
from .tables import (
    UNNAMED,
    Colours,
    Table,
    caption,
    categories,
    finite_pair,
    firsts,
    loop_shares,
    summary,
)

BARS = 30  # in one figure, about


def colours_of(reports: Sequence[Report], baselines: Sequence[str]) -> dict[str, int]:
    """Return a look (colour and marker) for each drafter, the same on the whole page.

    Plain decoding has the neutral one, 0. Baselines come last, so that their number does not change
    the looks of the user's own drafters.
    """
    names: dict[str, None] = {}
    for report in reports:
        for setting in report.settings:
            names |= dict.fromkeys(setting.drafting)
    ordered = sorted(names, key=lambda name: name in baselines)
    return {"plain": 0} | {name: 1 + place % LOOKS for place, name in enumerate(ordered)}


def facts(report: Report, path: str) -> str:
    """Return a list of what the report was measured on; `path` is where it was read from."""
    memory = report.peak_memory_bytes
    rows = {
        "report": path,
        "target": report.target.name if report.target is not None else None,
        "measured": report.started_at.replace("T", " ").replace("+00:00", " UTC"),
        "machine": report.measured_on,
        "measured so far": report.partial,
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
        "prompts": _prompt_set(report.prompt_set),
        "replies": _reply_limits(report.options or {}),
        **{f"without {name}": why for name, why in report.left_out.items()},
    }
    body = terms({name: text for name, text in rows.items() if text})
    if report.command:
        body += f"<dt>command</dt><dd>{command(report.command)}</dd>"
    return f'<dl class="facts">{body}</dl>\n'


def terms(meanings: Mapping[str, str]) -> str:
    """Return the rows of a list of terms with their meanings."""
    rows = [f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in meanings.items()]
    return "".join(rows)


def command(line: str) -> str:
    """Return a command line as HTML, to which the page's script adds a button that copies it."""
    # The style keeps a word whole where it fits in a line, so that options do not break.
    words = " ".join(f"<span>{escape(word)}</span>" for word in line.split(" "))
    return f'<code class="command">{words}</code>'


def _prompt_set(prompts: PromptSet) -> str:
    """Return how many prompts there are, of which file, and their categories if several."""
    path = prompts.path or "an unnamed set"
    text = f"{prompts.prompts} of {path}, SHA-256 {prompts.sha256[:12]}"
    if (benchmark := prompts.benchmark) is not None:
        text += f", from {benchmark.path} (licence {benchmark.license})"
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


def alerts(report: Report) -> str:
    """Return what a reader has to know before any figure: a report that is not whole, or lossy."""
    said = ""
    if report.partial:
        said = f'<p class="alert">Not whole: only {escape(report.partial)} so far.</p>\n'
    lossy = [f"T = {s.temperature:g}, batch {s.batch}" for s in report.settings if not s.lossless]
    if lossy:
        said += (
            '<p class="lossy" role="alert">⚠ LOSSY: typical acceptance does not keep the '
            f"target's distribution ({'; '.join(lossy)}). Replies differ from the target's own in "
            "distribution, and speed-ups are not those of lossless decoding.</p>"
        )
    return said


def tau_and_speed(report: Report, colours: Colours) -> str:
    """Return tau and speed-up of each drafter as bars, at the smallest batch of each temperature.

    Further temperatures are left out where the bars would become too many.
    """
    taus: list[tuple[str, list[Bar]]] = []
    gains: list[tuple[str, list[Bar]]] = []
    for setting in firsts(report):
        tau_bars, gain_bars = [], []
        # The user's own drafters come first.
        for name in sorted(setting.drafting, key=lambda name: colours[name]):
            s, look = setting.drafting[name], colours[name]
            if s.tau_incl_bonus is not None:
                tau_bars.append(Bar(name, s.tau_incl_bonus, look, finite_pair(s.tau_ci95)))
            if s.speedup is not None:
                gain_bars.append(Bar(name, s.speedup, look, finite_pair(s.speedup_ci95)))
        if taus and sum(len(bars) for _, bars in taus) + len(tau_bars) > BARS:
            break
        taus.append((caption(setting), tau_bars))
        gains.append((caption(setting), gain_bars))
    tau, gain = "tau (tokens a round)", "speed-up over plain decoding"
    few = f"no intervals, of fewer than {FEWEST} prompts"
    note = f"{few if few_prompts(report) else 'whiskers: 95% intervals'}; dotted: plain decoding"
    return side_by_side([
        Figure("Tau: tokens a round", partial(bar_chart, taus, tau, 1.0), note),
        Figure("Speed-up", partial(bar_chart, gains, gain, 1.0), note),
    ])  # fmt: skip


def verdict(report: Report) -> str:
    """Return a line on losslessness, and the headline that the terminal shows too."""
    lines = []
    if report.settings and all(setting.lossless for setting in report.settings):
        lines.append(
            '<p class="lossless">✓ lossless: every rule used keeps the target\'s distribution</p>'
        )
    lines += [f'<p class="verdict">{escape(line)}.</p>' for line in headline(report)]
    return "\n".join(lines)


def summaries(report: Report, colours: Colours) -> str:
    """Return the table of all settings, and the remarks that a reader of it needs."""
    if not report.settings:
        return ""
    notes = [
        "tau: tokens a round, the target's own included. Bold: the highest speed-up of a setting. "
        "Intervals are over prompts. A draft tree offers several tokens for one place, at most one "
        "of which is accepted: its share of accepted tokens is low even where its tau is high."
    ]
    if few := few_prompts(report):
        notes.append(few)
    if shares := loop_shares(report):
        notes.append(shares)
    for setting in report.settings:
        for name, s in setting.drafters.items():
            if (gap := s.largest_gap) is not None:
                differ = "where a reply first differs, the target's two best logits are at most"
                notes.append(f"{caption(setting)}, {name}: {differ} {gap:.2g} apart.")
            if s.untuned is not None:
                notes.append(f"{caption(setting)}, {name}: {over_untuned(s)}.")
    remarks = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return with_all_columns(summary(report), colours) + remarks


def with_all_columns(table: Table, colours: Colours | None = None) -> str:
    """Return a table of the most important columns; one of all, if it has more, is folded."""
    cut = table.cut()
    whole = table.html() if len(cut.columns) < len(table.columns) else ""
    return cut.html(colours) + folded(f"All {len(table.columns)} columns", whole)


def few_prompts(report: Report) -> str:
    """Return why there are no intervals, where too few prompts were measured; else ""."""
    counts = []
    for setting in report.settings:
        if 0 < (count := len({r.unit for r in setting.plain.per_request})) < FEWEST:
            counts.append(count)
    if not counts:
        return ""
    return (
        f"No interval is given for figures of fewer than {FEWEST} prompts (here {min(counts)}; "
        "those of one id or text are one): it would be narrower than the figures differ between "
        "prompts."
    )


def acceptance(report: Report, colours: Colours) -> str:
    """Return charts of acceptance by position and of survival, with a line for each drafter.

    Dashed lines are `cond_offered`, where it differs; see docs/metrics.md#acceptance.
    """

    def draw(setting: SettingFigures) -> list[Figure]:
        """Return both charts of one setting."""
        accepted, survived = [], []
        for name, s in setting.drafting.items():
            colour = colours[name]
            accepted.append(Series(name, _by_depth(s.cond_accept), colour))
            if s.cond_offered and s.cond_offered != s.cond_accept:
                points = _by_depth(s.cond_offered)
                offered = f"{name}, where offered"
                accepted.append(Series(offered, points, colour, dashed=True, named=False))
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
            Figure(
                f"Acceptance by position, {caption(setting)}",
                partial(line_chart, accepted, x, Axis("acceptance", 0, 1)),
                note,
            ),
            Figure(
                f"Survival, {caption(setting)}",
                partial(line_chart, survived, x, Axis("share of rounds", 0, 1)),
                "share of rounds that accept at least so many drafts",
            ),
        ]

    return others_folded(report, draw)


def _by_depth(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return points (depth, value) of values at the depths 1, 2, ..; `None` has no point."""
    return [(float(depth), v) for depth, v in enumerate(values, 1) if v is not None]


def by_category(report: Report, colours: Colours) -> str:
    """Return bar charts of tau by category of prompts, where there is more than one."""

    def draw(setting: SettingFigures) -> list[Figure]:
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
        high = max(max(bar.reach) for _, bars in groups for bar in bars)
        per_figure = max(1, BARS // len(setting.drafting))
        pieces = [groups[i : i + per_figure] for i in range(0, len(groups), per_figure)]
        title = f"Tau by category, {caption(setting)}"
        note = f"dotted: plain decoding; whiskers: 95% over prompts, where there are {FEWEST}"
        figures = []
        for piece, suffix in zip(pieces, numbered(len(pieces)), strict=True):
            chart = partial(bar_chart, piece, "tau (tokens a round)", 1.0, high)
            figures.append(Figure(f"{title}{suffix}", chart, note))
        return figures

    return others_folded(report, draw)


def numbered(count: int) -> list[str]:
    """Return suffixes for the titles of `count` figures that belong together; none for one."""
    return [f" ({i} of {count})" if count > 1 else "" for i in range(1, count + 1)]
