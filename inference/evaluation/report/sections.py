"""What a report's page shows, section by section; each is empty where the report has no numbers for
it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import log2
from typing import Any

from .charts import LOOKS, Axis, Bar, Series, Shares, bar_chart, line_chart, nudged, share_chart
from .page import figure, folded, side_by_side
from .tables import (
    UNNAMED,
    Report,
    Training,
    bounds,
    caption,
    categories,
    drafting,
    factor,
    fastest,
    finite_pair,
    firsts,
    interval,
    loop_shares,
    number,
    summary,
)

PARTS = ("draft", "verify", "accept", "kv", "host")
BARS = 30  # in one figure, about
DEEPEST = 6  # deeper drafts share its colour
Colours = Mapping[str, int]


def colours_of(reports: Sequence[Report], baselines: Sequence[str]) -> dict[str, int]:
    """A look (colour and marker) for each drafter, the same on the whole page: plain decoding
    neutral, baselines last."""
    names = dict.fromkeys(
        name for report in reports for setting in report["settings"] for name in drafting(setting)
    )
    ordered = [name for name in names if name not in baselines] + [
        name for name in names if name in baselines
    ]
    return {"plain": 0} | {name: 1 + i % LOOKS for i, name in enumerate(ordered)}


def facts(report: Report, path: str) -> str:
    """What the numbers were measured on."""
    prompts, options, versions = (
        report["prompt_set"],
        report.get("options", {}),
        report.get("versions", {}),
    )
    kinds = [kind for kind in prompts.get("categories", {}) if kind]
    memory = report.get("peak_memory_bytes")
    rows = {
        "report": path,
        "target": (report.get("target") or {}).get("name"),
        "measured": str(report.get("started_at", "")).replace("T", " ").replace("+00:00", " UTC"),
        "machine": ", ".join(
            f"{word}{value}"
            for word, value in (
                ("", report.get("device")),
                ("", report.get("dtype")),
                ("threads: ", report.get("threads")),
            )
            if value is not None
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
        "prompts": f"{prompts['prompts']} of {prompts.get('path', 'an unnamed set')}, SHA-256 "
        f"{prompts['sha256'][:12]}"
        + (f", {len(kinds)} categories: {', '.join(kinds)}" if len(kinds) > 1 else ""),
        "replies": f"at most {options['max_new_tokens']} tokens, timed runs of each: "
        f"{options.get('repeats', 1)}"
        if "max_new_tokens" in options
        else None,
        "partial": f"only {report['partial']} so far" if report.get("partial") else None,
        **{f"without {name}": why for name, why in report.get("left_out", {}).items()},
    }
    body = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in rows.items()
        if value
    )
    if report.get("command"):
        words = " ".join(f"<span>{escape(word)}</span>" for word in report["command"].split(" "))
        body += f"<dt>command</dt><dd><code>{words}</code></dd>"
    return f'<dl class="facts">{body}</dl>\n'


def verdict(report: Report) -> str:
    """Whether decoding was lossless, and the fastest drafter of each temperature's first setting,
    in a line each."""
    if not report["settings"]:
        return ""
    lossy = [
        f"T = {s['temperature']:g}, batch {s['batch']}"
        for s in report["settings"]
        if not s["lossless"]
    ]
    lines = []
    if lossy:
        where = "; ".join(lossy)
        lines.append(
            '<p class="lossy" role="alert">⚠ LOSSY: typical acceptance does not keep the '
            f"target's distribution ({where}). Replies "
            "differ from the target's own in distribution, and speed-ups are not those of "
            "lossless decoding.</p>"
        )
    else:
        lines.append(
            '<p class="lossless">✓ lossless: every rule used keeps the target\'s distribution</p>'
        )
    for setting in firsts(report):
        name = fastest(setting)
        head = caption(setting)
        if name is None:
            lines.append(
                f'<p class="verdict">{head}: no drafter is faster than plain decoding.</p>'
            )
            continue
        s = setting["drafters"][name]
        between = interval(s.get("speedup_ci95"))
        doubt = f" (95% {between})" if finite_pair(s.get("speedup_ci95")) else ""
        lines.append(
            f'<p class="verdict">{head}: <strong>{escape(name)}</strong> is fastest, '
            f"<strong>{factor(s['speedup'])}</strong> "
            f"plain decoding{doubt}, at {number(s['tau_incl_bonus'])} tokens a round.</p>"
        )
    return "\n".join(lines)


def others_folded(report: Report, draw: Callable[[Report], list[str]]) -> str:
    """Figures of the smallest batches in sight, those of the others behind a fold."""
    first = firsts(report)
    rest = [setting for setting in report["settings"] if not any(setting is one for one in first)]
    shown = [drawn for setting in first for drawn in draw(setting)]
    more = [drawn for setting in rest for drawn in draw(setting)]
    return side_by_side(shown) + folded("Other batch sizes", side_by_side(more))


def summaries(report: Report, colours: Colours) -> str:
    """A table for each setting, and what must be known to read it."""
    found = [
        summary(setting, report.get("drafter_bytes", {})).html(colours)
        for setting in report["settings"]
    ]
    notes = [
        "tau: tokens a round, the target's own included. Bold: the highest speed-up. Intervals "
        "are over prompts."
    ]
    if shares := loop_shares(report):
        notes.append(shares)
    for setting in report["settings"]:
        for name, s in setting["drafters"].items():
            gaps = [
                r["top2_gap"] for r in s.get("per_request", []) if r.get("top2_gap") is not None
            ]
            if gaps:
                differ = "where a reply first differs, the target's two best logits are at most"
                notes.append(f"{caption(setting)}, {name}: {differ} {max(gaps):.2g} apart.")
    return "".join(found) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def acceptance(report: Report, colours: Colours) -> str:
    """Acceptance by position, and survival, of every drafter."""

    def draw(setting: Report) -> list[str]:
        lines, ends = [], []
        for name, s in drafting(setting).items():
            colour = colours[name]

            def numbered(values):
                return [(float(i), v) for i, v in enumerate(values or [], 1) if v is not None]

            lines.append(Series(name, numbered(s.get("cond_accept")), colour))
            if s.get("cond_offered") and s["cond_offered"] != s.get("cond_accept"):
                lines.append(
                    Series(
                        f"{name}, where offered",
                        numbered(s["cond_offered"]),
                        colour,
                        dashed=True,
                        label="",
                    )
                )
            ends.append(Series(name, numbered(s.get("survival")), colour))
        deepest = max((len(line.points) for line in (*lines, *ends)), default=0)
        step = max(1, -(-deepest // 16))
        x = Axis(
            "position in the draft",
            1,
            deepest,
            [(float(i), str(i)) for i in range(1, deepest + 1, step)],
        )
        note = "accepted, given that those before it were"
        note += (
            "; dashed: among the rounds that had a draft there"
            if any(line.dashed for line in lines)
            else ""
        )
        return [
            figure(
                f"Acceptance by position, {caption(setting)}",
                line_chart(lines, x, Axis("acceptance", 0, 1)),
                note,
            ),
            figure(
                f"Survival, {caption(setting)}",
                line_chart(ends, x, Axis("share of rounds", 0, 1)),
                "rounds that accept at least so many",
            ),
        ]

    return others_folded(report, draw)


def by_category(report: Report, colours: Colours) -> str:
    """Tau of each category of prompts, where there is more than one."""

    def draw(setting: Report) -> list[str]:
        if (table := categories(setting)) is None:
            return []
        groups = []
        for category in (row[0] for row in table.rows):
            bars = []
            for name, s in drafting(setting).items():
                if c := s.get("by_category", {}).get("" if category == UNNAMED else category):
                    bars.append(
                        Bar(name, c["tau_incl_bonus"], colours[name], finite_pair(c["tau_ci95"]))
                    )
            groups.append((category, bars))
        high = max(max(bar.value, *(bar.interval or ())) for _, bars in groups for bar in bars)
        each = max(1, BARS // len(drafting(setting)))
        cut = [groups[i : i + each] for i in range(0, len(groups), each)]
        note = "dotted: plain decoding; whiskers: 95% over prompts"
        return [
            figure(
                f"Tau by category, {caption(setting)}{place}",
                bar_chart(some, "tau (tokens a round)", 1.0, high),
                note,
            )
            for some, place in zip(cut, numbered(len(cut)), strict=True)
        ]

    return others_folded(report, draw)


def numbered(count: int) -> list[str]:
    """What is added to the titles of figures that go on; nothing to that of a single one."""
    return [f" ({i} of {count})" if count > 1 else "" for i in range(1, count + 1)]


def speed(report: Report, colours: Colours) -> str:
    """Speed-up against the batch size of each temperature, measured and predicted; bars where there
    is one batch size."""
    figures = []
    for first in firsts(report):
        same = [
            s
            for s in report["settings"]
            if (s["temperature"], s["lossless"]) == (first["temperature"], first["lossless"])
        ]
        same.sort(key=lambda setting: setting["batch"])
        title = f"Speed-up, T = {first['temperature']:g}" + ("" if first["lossless"] else ", LOSSY")
        if len(same) > 1:
            note = (
                "points: measured, with 95% intervals; dashed: foretold from the smallest batch "
                "and plain decoding's steps; "
                "dotted: plain decoding"
            )
            figures.append(figure(title, _over_batches(same, colours), note))
            continue
        bars = [
            Bar(name, s["speedup"], colours[name], finite_pair(s.get("speedup_ci95")), None)
            for name, s in drafting(first).items()
            if s.get("speedup") is not None
        ]
        chart = bar_chart(
            [("", bars)], f"speed-up over plain decoding, batch {first['batch']}", 1.0
        )
        figures.append(figure(title, chart, "dotted: plain decoding"))
    return side_by_side(figures)


def _over_batches(settings: Sequence[Report], colours: Colours) -> str:
    names = list(dict.fromkeys(name for setting in settings for name in drafting(setting)))
    lines = []
    for name, aside in zip(names, nudged(len(names), 0.12), strict=True):
        there = [
            (log2(setting["batch"]), setting["drafters"][name])
            for setting in settings
            if name in setting["drafters"]
        ]
        measured = [(x + aside, s["speedup"]) for x, s in there if s.get("speedup") is not None]
        pairs = [
            finite_pair(s.get("speedup_ci95")) for _, s in there if s.get("speedup") is not None
        ]
        guessed = [
            (x + aside, s["modelled_speedup"])
            for x, s in there
            if s.get("modelled_speedup") is not None
        ]
        lines.append(Series(f"{name}, predicted", guessed, colours[name], dashed=True, label=""))
        lines.append(Series(name, measured, colours[name], pairs, joined=False))
    sizes = [(log2(setting["batch"]), str(setting["batch"])) for setting in settings]
    return line_chart(
        lines,
        Axis("batch size (requests)", ticks=sizes),
        Axis("speed-up over plain decoding", low=0),
        1.0,
    )


def times(report: Report) -> str:
    """Where a round's time goes, for each way of decoding."""

    def draw(setting: Report) -> list[str]:
        rows = []
        for name, s in setting["drafters"].items():
            parts = [(s.get("split_s") or {}).get(part, 0.0) for part in PARTS]
            # of other people's loops no parts are known
            if s.get("rounds") and sum(parts[:-1]) > 0:
                rows.append(Shares(name, parts, f"{sum(parts) / s['rounds'] * 1000:.2f} ms"))
        note = "share of a round; behind it its length" + (
            "" if setting["batch"] == 1 else ", shared among the batch's requests"
        )
        return [figure(f"Time of a round, {caption(setting)}", share_chart(rows, PARTS), note)]

    return others_folded(report, draw)


def training(runs: Sequence[Training]) -> str:
    """Loss and tau over the steps of each run."""
    figures = []
    for run in runs:
        x = Axis("step", low=0)
        loss = Series("loss", run.curve("loss"), 1, label="")
        figures.append(figure(f"{run.name}: training loss", line_chart([loss], x, Axis("loss"))))
        measured = run.curve("tau_measured")
        pairs = [bounds(run, step) for step, _ in measured]
        lines = [
            Series("measured", measured, 1, pairs, joined=False),
            Series("estimated", run.curve("tau_estimated"), 2, dashed=True),
        ]
        note = (
            "dashed: estimated by replay on known texts; points: measured by decoding, with 95% "
            "intervals"
        )
        figures.append(
            figure(
                f"{run.name}: held-out tau",
                line_chart(lines, x, Axis("tau (tokens a round)", low=1)),
                note,
            )
        )
    return side_by_side(figures)


LEGEND = (
    '<ul class="legend"><li><i class="d1">1</i> <i class="d2">2</i> <i class="d3">3</i> <i '
    'class="d4">4</i> <i class="d5">5</i> '
    f'<i class="d{DEEPEST}">{DEEPEST}+</i> accepted draft of that depth</li><li><i '
    'class="own">token</i> '
    "the target's own, at the end of a round</li>"
    '<li><i class="first">token</i> the prefill\'s</li></ul>'
    '<p class="note">Point at a token, tap it, or go along with the arrow keys: how it came, the '
    "target's probability of it, "
    "and its three best (at temperature 1 where decoding is greedy).</p>\n"
)


def replies(report: Report, colours: Colours) -> str:
    """The first replies of each drafter, token by token; one of the first drafter's is open."""
    found: list[str] = []
    for setting in firsts(report):
        views = []
        for name in sorted(drafting(setting), key=lambda name: colours[name]):
            samples = [
                sample
                for sample in setting["drafters"][name].get("samples", [])
                if sample["tokens"]
            ]
            opened = not found and not views
            inside = [
                folded(_about(sample), reply(sample), opened and not i)
                for i, sample in enumerate(samples)
            ]
            views += (
                [folded(f"{name}: {len(samples)} replies", "".join(inside), opened)]
                if samples
                else []
            )
        found += [f"<h4>{escape(caption(setting))}</h4>", *views] if views else []
    return LEGEND + "".join(found) if found else ""


def _about(sample: Mapping[str, Any]) -> str:
    turn = f", turn {sample['turn'] + 1}" if sample.get("turn") else ""
    accepted = sum(depth > 0 for depth in sample["came"])
    return f"{sample['id']}{turn} ({len(sample['tokens'])} tokens, {accepted} of them drafted)"


def reply(sample: Mapping[str, Any]) -> str:
    """One reply; every text in it is escaped, and what cannot be seen is made visible."""
    spans = []
    for token, came, p, best in zip(
        sample["tokens"], sample["came"], sample["p"], sample["best"], strict=True
    ):
        kind = f"d{min(came, DEEPEST)}" if came > 0 else "first" if came < 0 else "own"
        how = (
            f"accepted draft, depth {came}"
            if came > 0
            else "from the prefill"
            if came < 0
            else "the target's own"
        )
        ranks = [
            f"{place}. {quoted(word)}  {chance:.3f}" for place, (word, chance) in enumerate(best, 1)
        ]
        about = escape(
            "\n".join([how, f"{quoted(token)}  p = {number(p, '.3f')}", *ranks])
        ).replace("\n", "&#10;")
        spans.append(f'<i class="{kind}" title="{about}">{visible(token)}</i>')
    prompt = folded(
        "Prompt", f'<div class="prompt">{visible(sample.get("prompt", ""), False)}</div>'
    )
    label = escape(f"reply to {sample['id']}")
    return (
        f'{prompt}<div class="reply" tabindex="0" role="group" '
        f'aria-label="{label}">{"".join(spans)}</div>'
    )


def quoted(text: str) -> str:
    """A token on one line, its edges marked."""
    return "\u2018" + text.replace("\n", "↵").replace("\t", "⇥").translate(_CONTROLS) + "\u2019"


def visible(text: str, marked: bool = True) -> str:
    """Escaped for a page that keeps white space; with a sign at every line break if `marked`, and
    for an empty token."""
    if not text:
        return '<span class="nl">∅</span>' if marked else ""
    safe = escape(text.replace("\r\n", "\n").translate(_CONTROLS))
    return safe.replace("\n", '<span class="nl">↵</span>\n') if marked else safe


# Control characters as their pictures; those that turn the direction of the text around are
# dropped.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= {
    code: 0xFFFD for code in range(0x202A, 0x206A) if unicodedata.category(chr(code)) == "Cf"
}
