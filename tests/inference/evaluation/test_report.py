"""The page of `draftsmith report`: its numbers are the JSON's, no text breaks out of it, a browser
shows it without complaint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from draftsmith.heads.documents import convert
from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.report import charts, sections
from draftsmith.inference.evaluation.report.charts import (
    Axis,
    Bar,
    Series,
    Shares,
    bar_chart,
    line_chart,
    share_chart,
    spread,
    ticks,
)
from draftsmith.inference.evaluation.report.page import SCRIPT
from draftsmith.inference.evaluation.report.report import Options, gather, html, markdown, run
from draftsmith.inference.evaluation.report.tables import (
    Table,
    Training,
    fastest,
    size,
    summary,
    trainings,
)
from draftsmith.inference.evaluation.report.tables import served as tables_served
from draftsmith.inference.evaluation.results import Report, Sample, read_report

from tests.inference.evaluation.test_simulate import run_cli

EVIL = [
    "<script>alert(1)</script>",
    "</pre></div>",
    '"><img src=x onerror=alert(2)>',
    "&lt;b&gt;",
    "'",
    "\n  ",
    "",
    "\u202e",
    "\x00",
]


def drafter(tau: float, speedup: float, drafts: float = 4.0, **more: Any) -> dict[str, Any]:
    return {
        "requests": 6, "rounds": 20, "tau_incl_bonus": tau, "tau_ci95": [tau - 0.25, tau + 0.25],
        "tau_untruncated": tau + 0.125,
        "accept_rate": 0.43, "mean_n_draft": drafts, "tokens_s": 123.4 * speedup,
        "speedup": speedup,
        "speedup_ci95": [speedup - 0.11, speedup + 0.11], "predicted_speedup": speedup + 0.01,
        "equal_to_ar": 5,
        "ttft_quantiles_s": {"p50": 0.0123, "p95": 0.02, "p99": 0.02},
        "tpot_quantiles_s": {"p50": 0.0045, "p95": 0.0067},
        "cond_accept": [0.9, 0.8, 0.5], "cond_offered": [0.9, 0.85, 0.75], "survival": [0.9, 0.72,
        0.36],
        "by_category": {
            "code": {"requests": 3, "tau_incl_bonus": tau + 1, "tau_ci95": [tau + 0.9, tau + 1.1]},
            "chat": {"requests": 3, "tau_incl_bonus": tau - 1, "tau_ci95": [tau - 1.1, tau - 0.9]},
        },
        "split_s": {"draft": 0.05, "verify": 0.1, "accept": 0.02, "kv": 0.01, "host": 0.02},
        "per_request": [],
        "samples": [sample(["def", " add", "(", "a"], [-1, 1, 2, 0])], **more,
    }  # fmt: skip


def sample(tokens: list[str], came: list[int]) -> dict[str, Any]:
    return {
        "id": "q1", "turn": 0, "prompt": "write <b>add</b>", "tokens": tokens, "came": came,
        "p": [0.625] * len(tokens),
        "best": [[[token, 0.625], [" sub", 0.25], ["(x", 0.125]] for token in tokens],
    }  # fmt: skip


def made(
    batches: tuple[int, ...] = (1,), temperatures: tuple[float, ...] = (0.0,), lossless: bool = True
) -> dict[str, Any]:
    """A report as `draftsmith evaluate` writes it, with numbers that are easy to find again."""
    settings = []
    for temperature in temperatures:
        for batch in batches:
            plain = drafter(
                1.0, 1.0, 0.0, loop_share=0.5, cond_accept=[], cond_offered=[], survival=[]
            )
            drafters = {
                "plain": plain,
                "ngram": drafter(1.61, 0.83),
                "head": drafter(3.14, 2.71 - 0.1 * batch),
            }
            settings.append(
                {
                    "temperature": temperature,
                    "batch": batch,
                    "lossless": lossless,
                    "drafters": drafters,
                }
            )
    return {
        "schema_version": 3, "command": "draftsmith evaluate --target some/target",
        "started_at": "2026-01-02T03:04:05+00:00",
        "target": {"name": "some/target"}, "dtype": "float32", "device": "cpu", "threads": 2,
        "versions": {"torch": "9.9.9"},
        "options": {"max_new_tokens": 64, "repeats": 3},
        "left_out": {"early-exit": "no such layer"},
        "prompt_set": {"path": "held.jsonl", "sha256": "abc" * 20, "prompts": 6,
        "categories": {"code": 3, "chat": 3}},
        "drafter_bytes": {"plain": 0, "ngram": 0, "head": 3_940_000}, "settings": settings,
        "definitions": {"tau_incl_bonus": "tokens emitted per round"},
    }  # fmt: skip


def typed(report: dict[str, Any]) -> Report:
    return convert(report, Report)


def metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"step": 10 * i, "loss": 4.0 / i} for i in range(1, 5)]
    for step, tau in ((20, 1.5), (40, 2.25)):
        measured = {
            "tau_measured": tau,
            "tau_measured_low": tau - 0.5,
            "tau_measured_high": tau + 0.5,
        }
        rows.append({"step": step, "tau_estimated": tau + 0.125, **measured})
    return rows


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with a report, another JSON, and a training run."""
    (tmp_path / "a.json").write_text(json.dumps(made((1, 4), (0.0, 1.0))))
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "eagle").mkdir()
    (tmp_path / "eagle" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics())
    )
    return tmp_path


def page_of(report: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "made.json"
    path.write_text(json.dumps(report))
    return html(gather([str(path)])).decode()


def test_a_server_has_its_table(tmp_path: Path) -> None:
    setting = {
        "temperature": 0, "concurrency": 8, "tau_incl_bonus": 2.75, "tau_emitted": 2.5,
        "survival": [0.875], "accept_rate": 0.4375,
        "tokens_s": 321.4, "ttft_quantiles_s": {"p50": 0.0625, "p95": 0.125},
        "tpot_quantiles_s": None, "equal_to_plain": 5,
        "compared": 6,
    }  # fmt: skip
    server = {
        "engine": "vllm",
        "version": "0.0",
        "url": "http://127.0.0.1:1",
        "settings": [setting],
    }
    table = tables_served(typed(made() | {"server": server}))
    assert table is not None and tables_served(typed(made())) is None
    cells = [
        "T = 0, 8 at once",
        "2.75",
        "2.50",
        "0.88",
        "\u2013",
        "\u2013",
        "0.44",
        "321",
        "62.5",
        "125.0",
        "\u2013",
        "\u2013",
        "5 of 6",
    ]
    assert table.rows == [cells] and len(cells) == len(table.columns)
    assert table.html() in page_of(made() | {"server": server}, tmp_path)


class Seen(HTMLParser):
    """Elements with their attributes, the headings, and the cells of every table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("th", "td", "h2", "h3") else self._inside
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._inside in ("th", "td"):
            self.rows[-1][-1] += data
        elif self._inside in ("h2", "h3"):
            self.headings.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside


def test_reports_of_older_versions_are_read_with_a_notice(tmp_path: Path, caplog) -> None:
    setting = {
        "temperature": 0, "concurrency": 8, "tau_incl_bonus": 2.75, "tau_kept": 2.5,
        "survival": [0.875], "accept_rate": 0.4375, "tokens_s": 321.4,
    }  # fmt: skip
    server = {"engine": "vllm", "version": "0", "url": "http://127.0.0.1:1", "settings": [setting]}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(made() | {"server": server, "schema_version": 2}))
    report = read_report(str(path))
    assert report.server is not None and report.server.settings[0].tau_emitted == 2.5
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has the keys of an older version: tau_kept -> tau_emitted"
    ]
    written = report.to_json()
    assert "tau_kept" not in json.dumps(written) and convert(written, Report) == report


def test_the_numbers_of_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    rows = Seen(page_of(made(), tmp_path)).rows
    cells = [
        "3.14",
        "2.89\u20133.39",
        "3.27",
        "0.43",
        "4.0",
        "322",
        "2.61\u00d7",
        "2.50\u20132.72",
        "12.3",
        "4.50",
        "6.70",
        "3.94 MB",
        "5 of 6",
    ]
    assert next(row for row in rows if row[0] == "head")[1:] == cells
    assert next(row for row in rows if row[0] == "plain")[1] == "1.00"
    text = page_of(made(), tmp_path)
    for fact in (
        "some/target",
        "2026-01-02 03:04:05 UTC",
        "cpu, float32, threads: 2",
        "torch 9.9.9",
        "held.jsonl",
        "no such layer",
    ):
        assert fact in text
    assert (
        "✓ lossless" in text and "LOSSY" not in text and "<strong>head</strong> is fastest" in text
    )
    assert ">4.14</text>" in text and ">2.14</text>" in text, "tau by category, at the bars"
    assert ">10.00 ms<" in text, "0.2 s of 20 rounds"


def test_a_lossy_setting_is_flagged_loudly(tmp_path: Path) -> None:
    text = page_of(made(lossless=False), tmp_path)
    assert 'class="lossy" role="alert"' in text and "✓ lossless" not in text
    assert "LOSSY" in summary(typed(made(lossless=False)).settings[0], {}).title
    assert "LOSSY" in markdown(gather([str(tmp_path / "made.json")]))


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    every = [
        "Summary",
        "Acceptance by position",
        "Categories",
        "Speed-up",
        "Time of a round",
        "Replies token by token",
    ]
    assert Seen(page_of(made(), tmp_path)).headings == [*every, "Definitions"]
    report = made()
    for s in report["settings"][0]["drafters"].values():
        for name in (
            "samples",
            "split_s",
            "by_category",
            "speedup",
            "predicted_speedup",
            "cond_accept",
            "cond_offered",
            "survival",
        ):
            del s[name]
    del report["definitions"]
    assert Seen(page_of(report, tmp_path)).headings == ["Summary"]
    report = made()
    for s in report["settings"][0]["drafters"].values():
        s["by_category"] = {"": s["by_category"]["code"]}
        s |= {
            "tau_ci95": [float("nan")] * 2,
            "speedup": float("nan"),
            "ttft_quantiles_s": None,
            "tau_untruncated": float("nan"),
        }
        s["split_s"] = {"draft": 0, "verify": 0, "accept": 0, "kv": 0, "host": 0.5}
    seen = Seen(text := page_of(report, tmp_path))
    assert (
        "Categories" not in seen.headings
        and "Time of a round" not in seen.headings
        and "nan" not in text.lower()
    )
    assert "no drafter is faster" in text


def test_no_text_of_a_report_breaks_out_of_its_place(tmp_path: Path) -> None:
    clean = Seen(page_of(made((1, 2)), tmp_path)).elements
    report = made((1, 2))
    for setting in report["settings"]:
        head = setting["drafters"].pop("head")
        head["samples"] = [
            sample(EVIL, [-1, 1, 2, 3, 0, 1, 0, 1, 0]) | {"id": EVIL[0], "prompt": "".join(EVIL)}
        ]
        head["by_category"] = {
            EVIL[0]: head["by_category"]["code"],
            EVIL[2]: head["by_category"]["chat"],
        }
        setting["drafters"][EVIL[2]] = head
    report |= {
        "command": EVIL[0],
        "started_at": EVIL[1],
        "target": {"name": EVIL[0]},
        "left_out": {EVIL[2]: EVIL[0]},
    }
    report["definitions"] = {EVIL[0]: EVIL[2]}
    report["prompt_set"]["categories"] = {EVIL[0]: 1, EVIL[2]: 1}
    text = page_of(report, tmp_path)
    seen = Seen(text)
    assert {tag for tag, _ in seen.elements} == {tag for tag, _ in clean}, (
        "no element that a clean page has not"
    )
    assert not any(name.startswith("on") for _, attrs in seen.elements for name in attrs)
    assert sum(tag == "script" for tag, _ in seen.elements) == 1 and text.count("<script>") == 1
    assert "\u202e" not in text and "\x00" not in text
    assert "<script>" not in SCRIPT and "default-src 'none'" in text
    shown = markdown(gather([str(tmp_path / "made.json")]))
    assert (
        "\n|" in shown
        and Table("t", ["a", "b"], [["x|y\nz", "1"]]).markdown().splitlines()[-1]
        == "| x\\|y z | 1 |"
    )


def test_the_token_view_says_how_each_token_came() -> None:
    seen = Seen(sections.reply(convert(sample(["def", " add", "(", "\n"], [-1, 1, 9, 0]), Sample)))
    spans = [attrs for tag, attrs in seen.elements if tag == "i"]
    assert [s["class"] for s in spans] == ["first", "d1", "d6", "own"]
    titles = [(s["title"] or "").replace("\u2018", "[").replace("\u2019", "]") for s in spans]
    assert (
        titles[1]
        == "accepted draft, depth 1\n[ add]  p = 0.625\n1. [ add]  0.625\n2. [ sub]  0.250\n3. "
        "[(x]  0.125"
    )
    assert titles[3].startswith("the target's own\n[↵]") and titles[0].startswith(
        "from the prefill"
    )
    assert (
        sections.visible("a\nb <") == 'a<span class="nl">↵</span>\nb &lt;'
        and sections.visible("\x1b") == "\u241b"
    )


def test_every_drafter_keeps_its_colour_and_drafters_come_before_baselines() -> None:
    report = made()
    report["settings"][0]["drafters"] |= {f"more{i}": drafter(2, 1.5) for i in range(7)}
    colours = sections.colours_of([typed(report)], ("ngram",))
    assert (
        colours["plain"] == 0
        and colours["head"] == 1
        and colours["more0"] == 2
        and colours["more5"] == 7
    )
    assert colours["more6"] == 8 and colours["ngram"] == 9
    drawn = {((n - 1) % charts.COLOURS, charts.marker(n, 0, 0)) for n in range(1, charts.LOOKS + 1)}
    assert len(drawn) == charts.LOOKS == 28, "where the colours begin again, markers differ"
    assert fastest(typed(report).settings[0]) == "head"


def test_training_curves_and_their_table(inputs: Path) -> None:
    log = inputs / "eagle" / "metrics.jsonl"
    log.write_text(
        log.read_text()
        + json.dumps({"step": 40, "loss": 1.5})
        + "\n"
        + json.dumps({"step": 50, "loss": float("nan")})
        + '\n{"st'
    )
    (found,) = gather([str(inputs / "eagle")]).trainings
    assert found.curve("loss") == [(10, 4.0), (20, 2.0), (30, pytest.approx(4 / 3)), (40, 1.5)], (
        "logged again after a restart; nan left out"
    )
    table = trainings([found])
    assert table is not None and table.rows == [
        ["eagle", "50", "1.500", "2.25 (1.75\u20132.75)", "2.38", "40"]
    ]
    text = html(gather([str(inputs / "eagle")])).decode()
    assert (
        Seen(text).headings == ["Training"]
        and "eagle: held-out tau" in text
        and "eagle: training loss" in text
    )
    estimated_only = Training("x", [{"step": 1, "loss": 1.0}, {"step": 1, "tau_estimated": 2.5}])
    table = trainings([estimated_only])
    assert table is not None and table.rows[0][3:] == ["\u2013", "2.50", "1"]


def test_what_a_folder_holds_is_found_once(inputs: Path) -> None:
    found = gather(
        [
            str(inputs),
            str(inputs / "a.json"),
            str(inputs / "eagle"),
            str(inputs / "eagle" / "metrics.jsonl"),
        ]
    )
    assert [Path(path).name for path, _ in found.reports] == ["a.json"] and [
        run.name for run in found.trainings
    ] == ["eagle"]
    (inputs / "more" / "eagle").mkdir(parents=True)
    shutil.copy(inputs / "eagle" / "metrics.jsonl", inputs / "more" / "eagle")
    two = gather([str(inputs / "eagle"), str(inputs / "more" / "eagle")])
    assert [run.name for run in two.trainings] == [f"{inputs.name}/eagle", "more/eagle"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "does not exist; name a JSON"),
        ("{}", "is not a report of draftsmith evaluate"),
        ("{", "is not valid JSON"),
        (
            {**made(), "settings": [{"drafters": {"plain": {}}}]},
            "required field requests; write the report again",
        ),
        (
            {
                **made(),
                "settings": [{**made()["settings"][0], "drafters": {"plain": {"requests": 1}}}],
            },
            "field tau_incl_bonus",
        ),
    ],
)
def test_what_is_no_report_is_said(tmp_path: Path, content: Any, why: str) -> None:
    path, out = tmp_path / "in.json", tmp_path / "out.html"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=why):
        run(Options([str(path)], str(out)))
    assert not out.exists()


def test_wrong_runs_and_places_are_said(inputs: Path) -> None:
    empty = inputs / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="name at least one run"):
        run(Options())
    with pytest.raises(
        UserError, match="holds neither metrics.jsonl nor a JSON of draftsmith evaluate; name"
    ):
        run(Options([str(empty)]))
    for text, why in (
        ("", "holds no step yet; wait"),
        ('{"a": 1}\n{"step": 1}\n', "line 1 holds no step"),
        ("[1]\n[2]\n", "line 1"),
    ):
        (empty / "metrics.jsonl").write_text(text)
        with pytest.raises(UserError, match=why):
            run(Options([str(empty)]))
    before = (inputs / "a.json").read_text()
    for out, why in (
        (inputs / "a.json", "it is what the report is made of"),
        (empty, "it is a folder"),
    ):
        with pytest.raises(UserError, match=why):
            run(Options([str(inputs / "a.json")], str(out)))
    assert (inputs / "a.json").read_text() == before and not list(inputs.glob(".*"))


def test_the_command_takes_runs_without_an_options_name(inputs: Path) -> None:
    out = inputs / "made" / "r.html"
    done = run_cli("report", str(inputs / "a.json"), "--out", str(out), str(inputs / "eagle"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"report: {out}\n" and {"Summary", "Training"} <= set(
        Seen(out.read_text()).headings
    )
    done = run_cli("report", "--format", "md", str(inputs))
    assert (
        done.returncode == 0
        and "| head | 3.14 |" in done.stdout
        and "**Training runs**" in done.stdout
    )
    assert (
        "Tau by category" in done.stdout
        and "| code | 2.61 (2.51\u20132.71) | 4.14 (4.04\u20134.24) |" in done.stdout
    )
    done = run_cli("report", str(inputs / "nothing"))
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error:")
    ), done.stderr


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 3, [0, 1, 2, 3]),
        (0, 1404, [0, 250, 500, 750, 1000, 1250]),
        (0.93, 1.11, [0.95, 1, 1.05, 1.1]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round_numbers_within(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_labels_move_apart_and_keep_their_order() -> None:
    assert spread([10, 50], 15, 0, 100) == [10, 50]
    assert spread([50, 51, 49], 15, 0, 100) == [64, 79, 49]
    assert spread([95, 99, 2], 15, 0, 100) == [85, 100, 2], "none below the chart"
    assert charts.nudged(1, 2) == [0] and charts.nudged(3, 2) == [-1, 0, 1]
    assert [charts.shown(v) for v in (0.25, 1500, 25_000, 2.5e6)] == ["0.25", "1500", "25k", "2.5M"]
    assert charts.short("a-very-long-name-of-a-drafter") == "a-very-lon…a-drafter"
    assert [size(n) for n in (0, 999, 3_940_000, 2_000_000_000_000)] == [
        "\u2013",
        "999 B",
        "3.94 MB",
        "2e+03 GB",
    ]


def coordinates(svg: str, kind: str) -> list[list[float]]:
    """Numbers in the paths of that class."""
    return [
        [float(n) for n in re.findall(r"-?[\d.]+", d)]
        for d in re.findall(rf'<path class="{kind}[^"]*" d="([^"]*)"', svg)
    ]


def test_a_line_goes_where_its_numbers_are() -> None:
    """Between 0 and 1: half way up is half way between the grid's lines."""
    line = Series(
        "a",
        [(1, 0.0), (2, 0.5), (3, 1.0), (4, float("nan"))],
        1,
        [None, (0.25, 0.75), (float("nan"), 1.0), None],
    )
    svg = line_chart([line], Axis("x", 1, 3), Axis("y", 0, 1))
    ((x1, y1, x2, y2, x3, y3),) = coordinates(svg, "line")
    assert (
        x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
        and y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
        and y1 > y3
    )
    (whisker,) = coordinates(svg, "whisker")
    assert whisker[0] == x2 and sorted(whisker[1:3]) == pytest.approx(
        [(y2 + y3) / 2, (y1 + y2) / 2], abs=0.2
    )
    assert "nan" not in svg and line_chart([Series("a", [], 1)], Axis("x"), Axis("y")) == ""
    assert line_chart([Series("one", [(1, 2.0)], 1)], Axis("x"), Axis("y")), (
        "a single point is a chart too"
    )


def test_bars_are_as_long_as_their_numbers() -> None:
    svg = bar_chart(
        [("g", [Bar("a", 1.0, 1), Bar("b", 2.0, 2, (1.0, 3.0), 2.5), Bar("c", float("nan"), 3)])],
        "tau",
    )
    one, two = (float(w) for w in re.findall(r'class="bar[^>]* width="([\d.]+)"', svg))
    assert two == pytest.approx(2 * one, abs=0.2)
    (whisker,) = coordinates(svg, "whisker over")
    assert (
        whisker[2] - whisker[0] == pytest.approx(2 * one, abs=0.2)
        and len(coordinates(svg, "predicted")) == 1
    )
    assert bar_chart([("g", [])], "tau") == ""


def test_shares_fill_the_whole_and_a_part_below_nothing_is_none() -> None:
    svg = share_chart([Shares("a", [1.0, 3.0, -0.5], "8 ms")], ["x", "y", "z"])
    _, _, _, x, y, z = (
        float(w) for w in re.findall(r'<rect class="part[^>]* width="([\d.]+)"', svg)
    )
    assert (
        y == pytest.approx(3 * x, abs=0.05)
        and z == 0
        and ">25%<" in svg
        and ">75%<" in svg
        and ">8 ms<" in svg
    )
    assert share_chart([], ["x"]) == ""


# What a browser says. The page is shown from file://, where nothing but itself is at hand.

PROBE = """<script>{
document.querySelectorAll('details').forEach(d => d.open = true);
const page = document.documentElement, width = page.dataset.width;
if (width) page.style.width = width;
const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1
  || a.bottom <= b.top + 3 || b.bottom <= a.top + 3;
const found = { sizes: [], overlaps: [], outside: [] };
for (const svg of document.querySelectorAll('svg')) {
  const box = svg.getBoundingClientRect(); found.sizes.push([box.width, box.height]);
  const texts = [...svg.querySelectorAll('text')]
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([text, b], i) => {
    const inside = b.left > box.left - 2 && b.right < box.right + 2
      && b.top > box.top - 2 && b.bottom < box.bottom + 2;
    if (!inside) found.outside.push(text);
    for (const [other, c] of texts.slice(i + 1))
      if (!apart(b, c)) found.overlaps.push([text, other]);
  });
}
const main = document.querySelector('main');
found.wider = main.scrollWidth - Math.ceil(main.getBoundingClientRect().width);
const token = document.querySelector('.reply i:nth-child(2)');
const tip = document.getElementById('tip');
token.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
found.tip = tip.textContent;
token.parentElement.dispatchEvent(
  new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
found.next = tip.textContent;
found.back = token.title;
document.body.dataset.found = JSON.stringify(found);
}</script>"""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    if os.environ.get("CI"):
        pytest.fail("no chromium: CI must show the page in a browser, and .ci/run installs one")
    pytest.skip("no chromium")


def visit(page: Path, width: int = 1280) -> tuple[str, list[str], list[str]]:
    """The page's DOM as a browser leaves it, what it said on the console, and what the page asked
    the network for."""
    log, profile = page.with_suffix(".netlog"), page.with_suffix(".profile")
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    watch = [
        "--enable-logging=stderr",
        "--v=0",
        f"--log-net-log={log}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    shape = [
        f"--window-size={width},2000",
        f"--user-data-dir={profile}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(
        [chromium(), *quiet, *watch, *shape], capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    record = json.loads(log.read_text())
    start = record["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [
        event["params"]
        for event in record["events"]
        if event["type"] == start and "url" in event.get("params", {})
    ]
    # The browser asks for updates of its own, which no page has initiated.
    return (
        done.stdout,
        said,
        [params["url"] for params in asked if params["initiator"] != "not an origin"],
    )


def probed(page: Path, width: int, layout: str = "") -> dict[str, Any]:
    """What the probe finds in the page; its policy is taken away, which would refuse the probe."""
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text()).replace(
        "</body>", PROBE + "</body>"
    )
    copy = page.with_name(f"probed-{width}.html")
    copy.write_text(text.replace("<html ", f'<html data-width="{layout}" '))
    dom, said, _ = visit(copy, width)
    assert not said, said
    (found,) = re.findall(r'data-found="([^"]*)"', dom)
    return json.loads(unescape(found))


def test_a_browser_shows_the_page_without_complaint(inputs: Path) -> None:
    out = inputs / "r.html"
    run(Options([str(inputs)], str(out)))
    dom, said, asked = visit(out)
    assert not said and not asked
    assert (
        dom.count("<table") == 5
        and dom.count("<svg") == dom.count("</svg>") == 4 * 2 + 4 + 2 + 4 + 2
    )
    assert 'id="tip"' in dom, "the script ran, as the policy allows"
    assert not re.search(r'(src|href)="(?!#)|url\(|@import', out.read_text())
    for width, layout in ((1280, ""), (500, "390px")):
        found = probed(out, width, layout)
        assert len(found["sizes"]) == 20 and all(w > 250 and h > 60 for w, h in found["sizes"]), (
            width
        )
        assert not found["overlaps"] and not found["outside"] and found["wider"] <= 0, (
            width,
            found,
        )
        assert found["tip"].startswith("accepted draft, depth 1\n") and found["next"].startswith(
            "accepted draft, depth 2\n"
        )
        assert found["back"] == found["tip"], "its title is there again"


def test_the_browser_test_would_see_an_error_and_a_request(inputs: Path) -> None:
    out = inputs / "r.html"
    run(Options([str(inputs / "eagle")], str(out)))
    wrong = '<img src="http://report.invalid/x.png"><script>console.error("boom")</script></body>'
    open_page = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", out.read_text()
    ).replace("</body>", wrong)
    (inputs / "open.html").write_text(open_page)
    _, said, asked = visit(inputs / "open.html")
    assert asked == ["http://report.invalid/x.png"] and any("boom" in line for line in said)
    (inputs / "shut.html").write_text(out.read_text().replace("</body>", wrong))
    _, said, asked = visit(inputs / "shut.html")
    assert not asked and not any('"boom"' in line for line in said), "the policy refuses both"
    assert len(said) == 2 and all("Content Security Policy" in line for line in said)
