"""Tables of a report, as HTML and as Markdown: the same cells in both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Report = dict[str, Any]
# typographic signs, escaped because they look like others
NOTHING, TO, TIMES = "\u2013", "\u2013", "\u00d7"
UNNAMED = "(none)"  # the category of prompts that have none


@dataclass(frozen=True)
class Training:
    """What a training run has logged."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every row that has a finite one; a step that was logged again after a
        restart counts once."""
        found = {
            row["step"]: row[key]
            for row in self.rows
            if isinstance(row.get(key), int | float) and math.isfinite(row[key])
        }
        return sorted(found.items())


@dataclass(frozen=True)
class Table:
    """Texts; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None
    """The row that is set in bold."""

    def markdown(self) -> str:
        def line(cells):
            return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"

        rule = "| --- |" + " ---: |" * (len(self.columns) - 1)
        return (
            "\n".join(
                [
                    f"**{_one_line(self.title)}**",
                    "",
                    line(self.columns),
                    rule,
                    *map(line, self.rows),
                ]
            )
            + "\n"
        )

    def html(self, colours: Mapping[str, int] | None = None) -> str:
        """`colours`: of the rows' names, so that a table is the legend of the charts below it."""
        heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = []
        for number, (name, *cells) in enumerate(self.rows):
            key = f'<i class="key c{colours[name]}"></i>' if colours and name in colours else ""
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            best = ' class="best"' if number == self.best else ""
            body.append(f'<tr{best}><th scope="row">{key}{escape(name)}</th>{values}</tr>')
        caption = f"<caption>{escape(self.title)}</caption>"
        table = (
            f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        )
        return (
            '<div class="wide" tabindex="0" role="region" '
            f'aria-label="{escape(self.title)}">{table}</div>'
        )


def number(value: Any, form: str = ".2f", scale: float = 1.0) -> str:
    """A number in that form; a dash where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NOTHING
    return format(value * scale, form)


def interval(pair: Sequence[float] | None) -> str:
    """`2.01-2.34`; a dash where it is not known."""
    known = finite_pair(pair)
    return NOTHING if known is None else f"{known[0]:.2f}{TO}{known[1]:.2f}"


def factor(value: Any) -> str:
    """A number of times."""
    return found if (found := number(value)) == NOTHING else found + TIMES


def finite_pair(pair: Sequence[float] | None) -> tuple[float, float] | None:
    """An interval of two numbers, or None."""
    if (
        pair is None
        or len(pair) != 2
        or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in pair)
    ):
        return None
    return pair[0], pair[1]


def size(count: int | None) -> str:
    """Bytes in the unit that suits them."""
    if not count:
        return NOTHING
    unit = min(int(math.log10(count)) // 3, 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


def caption(setting: Report) -> str:
    """`T = 0, batch 4`; a setting that does not keep the target's distribution says so."""
    lossy = "" if setting["lossless"] else ", LOSSY typical acceptance"
    return f"T = {setting['temperature']:g}, batch {setting['batch']}{lossy}"


def firsts(report: Report) -> list[Report]:
    """The setting of the smallest batch for each temperature (and each distribution)."""
    found: dict[Any, Report] = {}
    for setting in report["settings"]:
        key = setting["temperature"], setting["lossless"]
        if key not in found or setting["batch"] < found[key]["batch"]:
            found[key] = setting
    return list(found.values())


def loop_shares(report: Report) -> str:
    """How many replies of plain decoding go round in circles, for each temperature; empty where it
    was not counted."""
    shares = {
        caption(setting): setting["drafters"]["plain"].get("loop_share")
        for setting in firsts(report)
    }
    known = [f"{share:.0%} ({name})" for name, share in shares.items() if share is not None]
    return (
        f"Loop share (replies that repeat an 8-gram): {', '.join(known)}; loops flatter every "
        "drafter."
        if known
        else ""
    )


def drafting(setting: Report) -> dict[str, Report]:
    """The drafters of a setting that draft: all but plain decoding."""
    return {name: s for name, s in setting["drafters"].items() if name != "plain"}


def fastest(setting: Report) -> str | None:
    """The drafter of the highest speed-up, if one is faster than plain decoding."""
    gains = {name: s.get("speedup") for name, s in drafting(setting).items()}
    known = {
        name: gain for name, gain in gains.items() if isinstance(gain, int | float) and gain > 1
    }
    return max(known, key=lambda name: known[name]) if known else None


COLUMNS = (
    "drafter", "tau", "tau 95%", "tau untrunc.", "accept rate", "drafts/round", "tokens/s",
    "speed-up", "its 95%", "TTFT p50 ms",
    "ms/token p50", "p95", "drafter size", "identical",
)  # fmt: skip


def summary(setting: Report, sizes: Mapping[str, int]) -> Table:
    """One setting: a row for each way of decoding."""
    rows = []
    for name, s in setting["drafters"].items():
        drafts = bool(s.get("mean_n_draft"))
        first, each = s.get("ttft_quantiles_s") or {}, s.get("tpot_quantiles_s") or {}
        same = s.get("equal_to_ar")
        rows.append([
            name,
            number(s["tau_incl_bonus"]),
            interval(s["tau_ci95"]) if drafts else NOTHING,
            number(s.get("tau_untruncated")),
            number(s.get("accept_rate")) if drafts else NOTHING,
            number(s.get("mean_n_draft"), ".1f") if drafts else NOTHING,
            number(s["tokens_s"], ".0f" if (s["tokens_s"] or 0) >= 100 else ".1f"),
            factor(s.get("speedup")),
            interval(s.get("speedup_ci95")) if name != "plain" else NOTHING,
            number(first.get("p50"), ".1f", 1000),
            number(each.get("p50"), ".2f", 1000),
            number(each.get("p95"), ".2f", 1000),
            size(sizes.get(name)),
            NOTHING if same is None or name == "plain" else f"{same} of {s['requests']}",
        ])  # fmt: skip
    best = fastest(setting)
    return Table(
        caption(setting),
        COLUMNS,
        rows,
        None if best is None else list(setting["drafters"]).index(best),
    )


SERVER_COLUMNS = (
    "setting", "tau", "kept", "accepted 1", "2", "3", "accept rate", "tokens/s", "TTFT p50 ms",
    "its p95", "ms/token p50",
    "its p95", "identical",
)  # fmt: skip


def served(report: Report) -> Table | None:
    """What a live server did on the same prompts, a row for each temperature and concurrency; None
    if none was asked."""
    if (server := report.get("server")) is None:
        return None
    rows = []
    for s in server["settings"]:
        first, each = s.get("ttft_quantiles_s") or {}, s.get("tpot_quantiles_s") or {}
        depths = [*s["survival"], None, None, None][:3]
        same = s.get("equal_to_plain")
        rows.append([
            f"T = {s['temperature']:g}, {s['concurrency']} at once",
            number(s["tau_incl_bonus"]),
            number(s["tau_kept"]),
            *map(number, depths),
            number(s["accept_rate"]),
            number(s["tokens_s"], ".0f"),
            *(number(times.get(at), ".1f", 1000) for times in (first, each) for at in ("p50",
            "p95")),
            NOTHING if same is None else f"{same} of {s['compared']}",
        ])  # fmt: skip
    return Table(f"{server['engine']} {server['version']} at {server['url']}", SERVER_COLUMNS, rows)


def categories(setting: Report) -> Table | None:
    """Tau by category of the prompts, with intervals; None where there is one category only."""
    found = {
        name: s["by_category"] for name, s in drafting(setting).items() if s.get("by_category")
    }
    names = sorted({category for by in found.values() for category in by})
    if len(names) < 2:
        return None
    rows = []
    for category in names:
        there = [by.get(category) for by in found.values()]
        cells = [
            NOTHING if c is None else _with_interval(c["tau_incl_bonus"], c["tau_ci95"])
            for c in there
        ]
        rows.append([category or UNNAMED, *cells])
    return Table(f"Tau by category, {caption(setting)}", ["category", *found], rows)


def trainings(runs: Sequence[Training]) -> Table | None:
    """The end of each training run, and its best measured tau."""
    rows = []
    for run in runs:
        loss, estimated, measured = (
            run.curve("loss"),
            dict(run.curve("tau_estimated")),
            run.curve("tau_measured"),
        )
        best = max(measured, key=lambda point: point[1], default=None)
        last = max(row["step"] for row in run.rows)
        at = best[0] if best else max(estimated, key=lambda step: estimated[step], default=None)
        rows.append([
            run.name,
            f"{last:.0f}",
            number(loss[-1][1] if loss else None, ".3f"),
            NOTHING if best is None else _with_interval(best[1], bounds(run, best[0])),
            NOTHING if at is None else number(estimated.get(at)),
            NOTHING if at is None else f"{at:.0f}",
        ])  # fmt: skip
    columns = ["run", "steps", "last loss", "best tau, measured", "tau, estimated there", "at step"]
    return Table("Training runs", columns, rows) if rows else None


def bounds(run: Training, step: float) -> tuple[float, float] | None:
    """The 95% interval of the tau measured at that step."""
    low, high = (dict(run.curve(f"tau_measured_{edge}")).get(step) for edge in ("low", "high"))
    return None if low is None or high is None else (low, high)


def _with_interval(value: float, pair: Sequence[float] | None) -> str:
    known = interval(pair)
    return number(value) + (f" ({known})" if known != NOTHING else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())
