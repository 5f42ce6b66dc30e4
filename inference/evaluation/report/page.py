"""The page of `draftsmith report`: a static template, page.html, with its data as JSON in it.

The data are blocks in their order on the page: dictionaries whose `kind` selects the function of
the template's script that draws them. Observable Plot draws charts from their rows. The script
inserts every text as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import msgspec

from ....heads.files import JsonObject
from ..drafter_names import BASELINES
from ..figure_text import caption, ends, headline, is_measured
from ..results import FEWEST, ByDepth, DrafterFigures, Number, PromptSet, Report, SettingFigures
from ..tables import (
    UNNAMED,
    FigureTable,
    categories,
    remarks_of,
    remarks_of_server,
    server_table,
    summary,
)
from ..training_log import Training, trainings

FOLDER = Path(__file__).parent
LIBRARIES = ("d3.min.js", "plot.umd.min.js")
Block = JsonObject
# Parts of a round (docs/metrics.md#speed) and their labels.
PARTS = {"draft": "draft", "verify": "verify", "accept": "accept", "kv": "cache", "host": "rest"}
TAU, SPEED_UP = "tau (tokens a round)", "speed-up over plain decoding"


def html(title: str, blocks: Sequence[Block], looks: Mapping[str, int]) -> bytes:
    """Return a self-contained page in UTF-8.

    Its content security policy forbids loading anything, and running any script but the template's
    own and the chart library, which it allows by their hashes.
    """
    template = (FOLDER / "page.html").read_text("utf-8")
    scripts = [(FOLDER / name).read_text("utf-8") for name in LIBRARIES]
    own = template.rpartition("<script>")[2].partition("</script>")[0]
    digests = (hashlib.sha256(script.encode()).digest() for script in (*scripts, own))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    page = {"title": title, "blocks": blocks, "looks": looks}
    # JSON has no numbers that are not finite: they become null
    finite = json.loads(json.dumps(msgspec.to_builtins(page)), parse_constant=lambda _: None)
    # With "<" escaped, no text can close the element that holds the data.
    data = json.dumps(finite).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(title),
        "HASHES": hashes,
        "LIBRARIES": "".join(f"<script>{script}</script>\n" for script in scripts),
        "DATA": data,
    }
    # In one pass, so that a placeholder within a text is not replaced.
    whole = re.sub(f"@({'|'.join(parts)})@", lambda mark: parts[mark[1]], template)
    # a folder's name may hold bytes that UTF-8 cannot encode
    return whole.encode("utf-8", "replace")


def heading(text: str, level: int = 2) -> Block:
    """Return a heading; level 2 is also listed in the contents at the top of the page."""
    return {"kind": "heading", "text": text, "level": level}


def text(words: str, look: str = "note") -> Block:
    """Return a paragraph; `look` is its class in the template: note, verdict, alert, and so on."""
    return {"kind": "text", "text": words, "look": look}


def table(of: FigureTable) -> Block:
    """Return a table, which shows the columns `few` until the reader asks for all."""
    return {"kind": "table", **msgspec.to_builtins(of), "few": of.few()}


def fold(title: str, blocks: Sequence[Block], opened: bool = False) -> list[Block]:
    """Return blocks under a title that unfolds them; [] without blocks."""
    made = {"kind": "fold", "title": title, "blocks": list(blocks), "open": opened}
    return [made] if blocks else []


def charts(made: Iterable[Block]) -> list[Block]:
    """Return charts side by side, without empty ones."""
    drawn = [chart for chart in made if chart["rows"]]
    return [{"kind": "charts", "charts": drawn}] if drawn else []


def chart(
    kind: str, title: str, note: str, rows: Iterable[JsonObject | None], **more: object
) -> Block:
    """Return a chart: `bars` and `dots` with a row for each, `lines` with a row for each point.

    Rows that are None are left out. `more`: labels `x` and `y`, a `rule` across the chart, limits
    of the axes.
    """
    found = [row for row in rows if row is not None]
    return {"kind": kind, "title": title, "note": note, "rows": found, **more}


def bar(
    group: str, name: str, value: Number, pair: Sequence[Number] | None, form: str = "{:.2f}"
) -> JsonObject | None:
    """Return the row of a bar with its interval and its text; None for an unknown value."""
    if not is_measured(value):
        return None
    low, high = ends(pair) or (None, None)
    written = form.format(value)
    return {
        "group": group, "name": name, "value": value, "low": low, "high": high, "text": written,
    }  # fmt: skip


def points(name: str, values: Mapping[float, Number], **more: object) -> list[JsonObject]:
    """Return the rows of a line's points (x, y); `more` are further keys of each row."""
    return [{"name": name, "x": x, "y": y, **more} for x, y in values.items() if is_measured(y)]


def looks_of(reports: Sequence[Report]) -> dict[str, int]:
    """Return the number of a look (colour and marker) for each drafter, the same on a whole page.

    Plain decoding has the neutral one, 0. Baselines come last, so that they do not change the looks
    of the user's own drafters.
    """
    names: dict[str, None] = {}
    for report in reports:
        for setting in report.settings:
            names |= dict.fromkeys(setting.drafting)
    ordered = sorted(names, key=lambda name: name in BASELINES)
    return {"plain": 0} | {name: place for place, name in enumerate(ordered, 1)}


def smallest(report: Report) -> list[SettingFigures]:
    """Return the setting of the smallest batch for each temperature."""
    found: dict[float, SettingFigures] = {}
    for setting in sorted(report.settings, key=lambda setting: setting.batch):
        found.setdefault(setting.temperature, setting)
    return [setting for setting in report.settings if any(setting is s for s in found.values())]


def drafting(setting: SettingFigures) -> list[tuple[str, DrafterFigures]]:
    """Return names and figures of the ways to decode that draft, baselines last."""
    return sorted(setting.drafting.items(), key=lambda entry: entry[0] in BASELINES)


def others_folded(report: Report, draw: Callable[[SettingFigures], list[Block]]) -> list[Block]:
    """Return visible charts of the smallest batches, and folded ones of all others."""
    visible, others = [], []
    first = smallest(report)
    for setting in report.settings:
        # by identity, since two settings may be equal in all their numbers
        (visible if any(setting is s for s in first) else others).extend(draw(setting))
    return charts(visible) + fold("Other batch sizes", charts(others))


def verdict(report: Report) -> list[Block]:
    """Return the note on losslessness, the headline, and charts of tau and speed-up."""
    blocks = []
    if report.settings:
        lossless = "✓ lossless: every rule used keeps the target's distribution"
        blocks.append(text(lossless, "lossless"))
    blocks += [text(f"{line}.", "verdict") for line in headline(report)]
    taus, gains = [], []
    for setting in smallest(report):
        for name, s in drafting(setting):
            taus.append(bar(caption(setting), name, s.tau_incl_bonus, s.tau_ci95))
            gains.append(bar(caption(setting), name, s.speedup, s.speedup_ci95, "{:.2f}x"))
    note = f"lines: 95% intervals, where there are {FEWEST} prompts; dashed: plain decoding"
    return blocks + charts([
        chart("bars", "Tau: tokens a round", note, taus, x=TAU, rule=1),
        chart("bars", "Speed-up", note, gains, x=SPEED_UP, rule=1),
    ])  # fmt: skip


def summaries(report: Report) -> list[Block]:
    """Return the table of all settings with its remarks."""
    if not report.settings:
        return []
    notes = [
        "tau: tokens a round, the target's own included. Bold: the highest speed-up of a setting. "
        f"Intervals are over prompts, and given for {FEWEST} of them or more. A draft tree offers "
        "several tokens for one place, at most one of which is accepted: its share of accepted "
        "tokens is low even where its tau is high.",
        *remarks_of(report),
    ]
    return [table(summary(report)), *map(text, notes)]


def server(report: Report) -> list[Block]:
    """Return the table of a live server with its remarks."""
    of = server_table(report)
    if of is None or report.server is None:
        return []
    return [table(of), *map(text, remarks_of_server(report.server))]


def acceptance(report: Report) -> list[Block]:
    """Return charts of acceptance by position and of survival, with a line for each drafter.

    Dashed lines are `cond_offered`, where it differs; see docs/metrics.md#acceptance.
    """

    def draw(setting: SettingFigures) -> list[Block]:
        accepted, survived = [], []
        for name, s in drafting(setting):
            accepted += points(name, _depths(s.cond_accept))
            if s.cond_offered and s.cond_offered != s.cond_accept:
                accepted += points(name, _depths(s.cond_offered), dashed=True)
            survived += points(name, _depths(s.survival))
        note = "accepted, given that those before it were"
        if any(row.get("dashed") for row in accepted):
            note += "; dashed: among the rounds that had a draft there"
        axes = {"x": "position in the draft", "low": 0, "high": 1, "whole": True}
        where = caption(setting)
        return [
            chart(
                "lines", f"Acceptance by position, {where}", note, accepted, y="acceptance", **axes
            ),
            chart(
                "lines",
                f"Survival, {where}",
                "share of rounds that accept at least this many drafts",
                survived,
                y="share of rounds",
                **axes,
            ),
        ]

    return others_folded(report, draw)


def _depths(values: ByDepth) -> dict[float, Number]:
    return dict(enumerate(values, 1))


def by_category(report: Report) -> list[Block]:
    """Return charts of tau by category of prompts, and their tables folded, if there are two."""

    def draw(setting: SettingFigures) -> list[Block]:
        rows = []
        names = {category for s in setting.drafting.values() for category in s.by_category}
        for category in sorted(names) if len(names) > 1 else ():
            for name, s in drafting(setting):
                if c := s.by_category.get(category):
                    rows.append(bar(category or UNNAMED, name, c.tau_incl_bonus, c.tau_ci95))
        note = f"dashed: plain decoding; lines: 95% over prompts, where there are {FEWEST}"
        return [chart("bars", f"Tau by category, {caption(setting)}", note, rows, x=TAU, rule=1)]

    tables = [table(of) for of in categories(report.settings) if len(of.rows) > 1]
    return others_folded(report, draw) + fold("Tau by category as tables", tables)


def speed(report: Report) -> list[Block]:
    """Return a chart of the speed-up over batch sizes for each temperature that has several."""
    made = []
    for first in smallest(report):
        same = [s for s in report.settings if s.temperature == first.temperature]
        rows = []
        for setting in sorted(same, key=lambda setting: setting.batch):
            for name, s in drafting(setting):
                low, high = ends(s.speedup_ci95) or (None, None)
                rows += points(name, {setting.batch: s.speedup}, low=low, high=high, point=True)
        note = "lines: 95% intervals; dashed across: plain decoding"
        title = f"Speed-up, T = {first.temperature:g}"
        axes = {"x": "batch size (requests)", "y": SPEED_UP, "low": 0, "rule": 1, "log": True}
        if len(same) > 1:
            made.append(chart("lines", title, note, rows, **axes))
    return charts(made)


def times(report: Report) -> list[Block]:
    """Return charts of the parts of a round's time, for each way of decoding."""

    def draw(setting: SettingFigures) -> list[Block]:
        rows = []
        for name, s in setting.drafters.items():
            # A difference of two clock readings may be slightly negative.
            parts = {words: max(s.split.get(part, 0.0), 0.0) for part, words in PARTS.items()}
            whole = sum(parts.values())
            if s.rounds and whole > parts["rest"]:
                length = f"{whole / s.rounds * 1000:.2f} ms"
                for part, seconds in parts.items():
                    rows.append(
                        {"name": name, "part": part, "value": seconds / whole, "text": length}
                    )
        note = "shares of a round; after them its length"
        if setting.batch != 1:
            note += ", shared among the batch's requests"
        return [chart("shares", f"Time of a round, {caption(setting)}", note, rows)]

    made = others_folded(report, draw)
    meaning = (
        "draft: the drafter's own passes. verify: the target's pass over the draft tree. accept: "
        "the acceptance rule. cache: moving accepted tokens in the caches. rest: what the loop "
        "takes besides these."
    )
    return [*made, text(meaning)] if made else []


def replies(report: Report) -> list[Block]:
    """Return the sampled replies of each drafter, token by token; all but the first are folded."""
    blocks: list[Block] = []
    for setting in smallest(report):
        views: list[Block] = []
        for name, s in drafting(setting):
            opened = not blocks and not views
            inside = []
            for sample in s.samples:
                accepted = sum(depth > 0 for depth in sample.came)
                turn = f", turn {sample.turn + 1}" if sample.turn else ""
                count = f"{len(sample.tokens)} tokens, {accepted} of them accepted drafts"
                reply = {"kind": "reply", **msgspec.to_builtins(sample)}
                if sample.tokens:
                    title = f"{sample.id}{turn} ({count})"
                    inside += fold(title, [reply], opened and not inside)
            count = f"{len(inside)} {'reply' if len(inside) == 1 else 'replies'}"
            views += fold(f"{name}: {count}", inside, opened)
        if views:
            blocks += [heading(caption(setting), 4), *views]
    return [{"kind": "legend"}, *blocks] if blocks else []


def facts(report: Report, path: str) -> Block:
    """Return the facts about a report's target, machine and prompts; `path` is its file."""
    memory, limits = report.peak_memory_bytes, report.options or {}
    rows = {
        "report": path,
        "target": report.target and report.target_name,
        "measured": report.started_at.replace("T", " ").replace("+00:00", " UTC"),
        "machine": report.measured_on,
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
        "prompts": _prompt_set(report.prompt_set),
        "replies": f"at most {limits['max_new_tokens']} tokens, timed runs of each: "
        f"{limits.get('repeats', 1)}"
        if "max_new_tokens" in limits
        else None,
        **{f"without {name}": why for name, why in report.left_out.items()},
    }
    found = [[term, words] for term, words in rows.items() if words]
    return {"kind": "facts", "rows": found, "command": report.command}


def _prompt_set(prompts: PromptSet) -> str:
    """Return the number of prompts, their file, and their categories if there are several."""
    path = prompts.path or "an unnamed set"
    words = f"{prompts.prompts} of {path}, SHA-256 {prompts.sha256[:12]}"
    if (benchmark := prompts.benchmark) is not None:
        words += f", from {benchmark.path} (licence {benchmark.license})"
    named = [name for name in prompts.categories if name]
    if len(named) > 1:
        words += f", {len(named)} categories: {', '.join(named)}"
    return words


def training(runs: Sequence[Training]) -> list[Block]:
    """Return the table of training runs, and charts over their steps: loss, tau, acceptance."""
    if (of := trainings(runs)) is None:
        return []
    blocks = [table(of)]
    for run in runs:
        axes: JsonObject = {"x": "step"}
        loss = points("loss", run.curve("loss"))
        made = [chart("lines", f"{run.name}: training loss", "", loss, y="loss", **axes)]
        estimated = run.curve("tau_estimated")
        rows = points("estimated", estimated, dashed=True)
        for step in run.curve("tau_measured"):
            value, (low, high) = run.tau(step)
            rows += points("measured", {step: value}, low=low, high=high, point=True)
        note = (
            "dashed: estimated by replay on known texts; points: measured by decoding, with 95% "
            "intervals"
        )
        level = (run.curve("tau_measured") or estimated).get(0)
        if level is not None:
            axes = axes | {"rule": level}
            note += "; dashed across: before training"
        made.append(chart("lines", f"{run.name}: held-out tau", note, rows, y=TAU, **axes))
        blocks += charts([*made, _positions(run)])
    return blocks


def _positions(run: Training) -> Block:
    """Return the chart of held-out acceptance by position over the steps of a training run."""
    rows: list[JsonObject] = []
    depth = 1
    while curve := run.curve(f"surv@{depth}", evaluated=True):
        rows += points(f"position {depth}", curve)
        depth += 1
    note = "share of held-out rounds that accept at least this many drafts"
    axes: JsonObject = {"x": "step", "y": "share", "low": 0, "high": 1}
    return chart("lines", f"{run.name}: acceptance by position", note, rows, **axes)
