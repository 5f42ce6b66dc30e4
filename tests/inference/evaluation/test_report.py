"""The page of `draftsmith report`: its numbers are the JSON's, and no text breaks out of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.figure_text import fastest
from draftsmith.inference.evaluation.report.command import Options, gather, html, markdown, run
from draftsmith.inference.evaluation.report.page import looks_of, training
from draftsmith.inference.evaluation.tables import FigureTable, server_table, size
from draftsmith.inference.evaluation.training_log import Training, trainings
from tests.conftest import ROOT
from tests.helpers.command_line import run_cli
from tests.helpers.reports import (
    EVIL,
    Seen,
    drafter,
    made,
    page_of,
    sample,
    typed,
    write_inputs,
)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


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
    table = server_table(typed(made() | {"server": server}))
    assert table is not None and server_table(typed(made())) is None
    cells = [
        "T = 0, 8 at once",
        "2.75",
        "2.50",
        ".88",
        "0.44",
        "321",
        "62.5",
        "125.0",
        "-",
        "-",
        "5 of 6",
    ]
    assert table.rows == [cells] and len(cells) == len(table.columns)
    assert cells in Seen(page_of(made() | {"server": server}, tmp_path)).rows


def test_the_numbers_of_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    seen = Seen(page_of(made(), tmp_path))
    cells = {
        "speed-up": "2.61x",
        "temperature": "0",
        "batch size": "1",
        "tau": "3.14",
        "identical replies": "5 of 6",
        "tau, 95% interval": "2.89-3.39",
        "speed-up, 95% interval": "2.50-2.72",
        "tokens a second": "322",
        "drafted tokens a round": "4.0",
        "share of them accepted": "0.43",
        "accepted 1-3": ".90 .72 .36",
        "time to first token, median, ms": "12.3",
        "time per later token, median, ms": "4.50",
        "95th percentile of that, ms": "6.70",
        "size of the drafter": "3.94 MB",
        "tau if no reply stopped inside a round": "3.27",
        "loops": "-",
    }
    few = [name for name in cells if name not in ("temperature", "batch size")][:7]
    table = seen.tables[0]
    assert table["columns"] == ["drafter", *cells]
    assert [table["columns"][place] for place in table["few"]] == ["drafter", *few]
    assert next(row for row in seen.rows if row[0] == "head") == ["head", *cells.values()]
    assert next(row for row in seen.rows if row[0] == "plain")[4] == "1.00"
    for fact in (
        "some/target",
        "2026-01-02 03:04:05 UTC",
        "cpu, float32, threads: 2",
        "torch 9.9.9",
        "held.jsonl",
        "no such layer",
    ):
        assert fact in seen.words
    assert "✓ lossless" in seen.words
    assert "batch 1: head is fastest, 2.61x" in seen.words
    bars = seen.chart("Tau by category, T = 0, batch 1")["rows"]
    of_head = {row["group"]: row["text"] for row in bars if row["name"] == "head"}
    assert of_head == {"code": "4.14", "chat": "2.14"}
    rounds = seen.chart("Time of a round, T = 0, batch 1")["rows"]
    assert {row["text"] for row in rounds} == {"10.00 ms"}, "0.2 s of 20 rounds"
    assert [row["value"] for row in rounds[:5]] == pytest.approx([0.25, 0.5, 0.1, 0.05, 0.1])
    assert [size(n) for n in (0, 999, 3_940_000, 2_000_000_000_000)] == [
        "-",
        "999 B",
        "3.94 MB",
        "2e+03 GB",
    ]


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    every = [
        "Summary",
        "Acceptance by position",
        "Categories",
        "Time of a round",
        "Replies token by token",
        "Measured on",
    ]
    assert Seen(page_of(made(), tmp_path)).headings == every
    report = made()
    for s in report["settings"][0]["drafters"].values():
        for name in (
            "samples",
            "split_s",
            "by_category",
            "speedup",
            "cond_accept",
            "cond_offered",
            "survival",
        ):
            del s[name]
    assert Seen(page_of(report, tmp_path)).headings == ["Summary", "Measured on"]
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
    seen = Seen(page_of(report, tmp_path))
    assert (
        "Categories" not in seen.headings
        and "Time of a round" not in seen.headings
        and "nan" not in json.dumps(seen.data).lower()
    )
    assert "no drafter is faster" in seen.words


def test_no_text_of_a_report_breaks_out_of_its_place(tmp_path: Path) -> None:
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
    report["prompt_set"]["categories"] = {EVIL[0]: 1, EVIL[2]: 1}
    report["target"] = {"name": "@DATA@</title><script>alert(3)</script>"}
    text = page_of(report, tmp_path)
    template = (ROOT / "inference/evaluation/report/page.html").read_text()
    clean = page_of(made(), tmp_path)
    for mark in ("<script", "</script", "<img", "<title", "</pre>"):
        assert text.count(mark) == clean.count(mark), mark
    assert clean.count("<script") == template.count("<script") + 2, "the chart library's two files"
    page_of(report, tmp_path)
    assert set(EVIL[:4]) <= {*Seen(text).words.splitlines()}, "texts are kept as they are"
    assert "default-src 'none'" in text and "innerHTML" not in template
    shown = markdown(gather([str(tmp_path / "made.json")]))
    assert (
        "\n|" in shown
        and FigureTable("t", ["a", "b"], [["x|y\nz", "1"]]).markdown().splitlines()[-1]
        == "| x\\|y z | 1 |"
    )


def test_every_drafter_keeps_its_look_and_drafters_come_before_baselines() -> None:
    report = made()
    report["settings"][0]["drafters"] |= {f"more{i}": drafter(2, 1.5) for i in range(7)}
    looks = looks_of([typed(report)])
    assert looks["plain"] == 0 and looks["head"] == 1 and looks["more0"] == 2
    assert looks["more6"] == 8 and looks["ngram"] == 9
    assert fastest(typed(report).settings[0]) == "head"


def test_training_curves_and_table_match_the_log(inputs: Path) -> None:
    log = inputs / "eagle" / "metrics.jsonl"
    log.write_text(
        log.read_text()
        + json.dumps({"step": 40, "loss": 1.5})
        + "\n"
        + json.dumps({"step": 50, "loss": float("nan")})
        + '\n{"st'
    )
    (found,) = gather([str(inputs / "eagle")]).trainings
    assert found.curve("loss") == {10: 4.0, 20: 2.0, 30: pytest.approx(4 / 3), 40: 1.5}, (
        "logged again after a restart; nan left out"
    )
    table = trainings([found])
    assert table is not None and table.rows == [
        ["eagle", "50", "1.500", "-", "2.25 (1.75-2.75)", "2.38", "40"]
    ]
    seen = Seen(html(gather([str(inputs / "eagle")])).decode())
    assert seen.headings == ["Training"]
    assert [row["y"] for row in seen.chart("eagle: training loss")["rows"]][:2] == [4.0, 2.0]
    measured = [row for row in seen.chart("eagle: held-out tau")["rows"] if row.get("point")]
    assert [(row["x"], row["y"], row["low"], row["high"]) for row in measured] == [
        (20, 1.5, 1.0, 2.0),
        (40, 2.25, 1.75, 2.75),
    ]
    estimated_only = Training("x", [{"step": 1, "loss": 1.0}, {"step": 1, "tau_estimated": 2.5}])
    table = trainings([estimated_only])
    assert table is not None and table.rows[0][4:] == ["-", "2.50", "1"]


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
def test_files_that_are_not_reports_are_refused(tmp_path: Path, content: Any, why: str) -> None:
    path, out = tmp_path / "in.json", tmp_path / "out.html"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=why):
        run(Options([str(path)], str(out)))
    assert not out.exists()


def test_invalid_runs_and_output_paths_are_refused(inputs: Path) -> None:
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


@pytest.mark.parametrize("name", ["r.md", "r.html", "r", "R.MARKDOWN", "r.txt"])
def test_the_ending_of_the_file_chooses_the_format(name: str, inputs: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / name, [str(inputs / "a.json")]
    if name == "r.txt":
        with pytest.raises(UserError, match="in neither .html nor .md; give --format"):
            run(Options(runs, str(out)))
        run(Options(runs, str(out), "md"))
    else:
        run(Options(runs, str(out)))
    assert out.read_text().startswith("<!doctype") == (name in ("r.html", "r"))


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
        and "| head | 2.61x | 0 | 1 | 3.14 |" in done.stdout
        and "**Training runs**" in done.stdout
    )
    assert (
        "Tau by category" in done.stdout
        and "| code | 2.61 (2.51-2.71) | 4.14 (4.04-4.24) |" in done.stdout
    )
    done = run_cli("report", str(inputs / "nothing"))
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error:")
    ), done.stderr


def test_the_page_begins_with_tau_and_speed_up_and_ends_with_the_facts(tmp_path: Path) -> None:
    seen = Seen(page_of(made((1, 4), (0.0, 1.0)), tmp_path))
    kinds = [block["kind"] for block in seen.blocks]
    assert kinds.index("charts") < kinds.index("heading") < kinds.index("table")
    for chart, value in zip(seen.charts[:2], ("3.14", "2.61x"), strict=True):
        of_head = [row for row in chart["rows"] if row["name"] == "head"]
        assert [row["group"] for row in of_head] == ["T = 0, batch 1", "T = 1, batch 1"]
        assert {row["text"] for row in of_head} == {value}
        assert all(row["low"] < row["value"] < row["high"] for row in of_head)
        assert [row["name"] for row in chart["rows"]] == ["head", "ngram"] * 2, "baselines last"
    assert seen.headings[-2:] == ["Replies token by token", "Measured on"]


def test_all_settings_are_shown_in_one_table(tmp_path: Path) -> None:
    table = Seen(page_of(made((1, 4), (0.0, 1.0)), tmp_path)).tables[0]
    assert len(table["rows"]) == 4 * 3 and len(table["best"]) == 4, "one of each setting"
    assert [row[2:4] for row in table["rows"][::3]] == [
        ["0", "1"],
        ["0", "4"],
        ["1", "1"],
        ["1", "4"],
    ]
    assert table["switches"] == ["temperature", "batch size"]
    shown = markdown(gather([str(tmp_path / "made.json")]))
    assert shown.count("| head | 2.61") == 2 and shown.count("| head | 2.31") == 2


def test_loop_share_and_categories_are_shown_for_every_setting(tmp_path: Path) -> None:
    report = made((1, 4), (0.0, 1.0))
    for number, (setting, share) in enumerate(
        zip(report["settings"], (0.5, 0.25, 0.0, 0.125), strict=True)
    ):
        setting["drafters"]["plain"]["loop_share"] = share
        setting["drafters"]["head"]["by_category"]["code"]["tau_incl_bonus"] = 4.5 + number
    settings = ["T = 0, batch 1", "T = 0, batch 4", "T = 1, batch 1", "T = 1, batch 4"]
    seen = Seen(page_of(report, tmp_path))
    shown = markdown(gather([str(tmp_path / "made.json")]))
    loops = [row[-1] for row in seen.tables[0]["rows"] if row[0] == "plain"]
    assert loops == ["50%", "25%", "0%", "12%"]
    for where in settings:
        assert seen.chart(f"Tau by category, {where}")["rows"]
        assert f"Tau by category, {where}" in shown


def test_the_page_speaks_plain_words(tmp_path: Path) -> None:
    server = {
        "engine": "vllm", "version": "0", "url": "http://127.0.0.1:1",
        "settings": [{"temperature": 0, "concurrency": 8, "tau_incl_bonus": 2.75,
        "tau_emitted": 2.5, "survival": [0.875], "accept_rate": 0.4375, "tokens_s": 321.4}],
    }  # fmt: skip
    report = made((1, 4), (0.0, 1.0)) | {"server": server}
    words = Seen(page_of(report, tmp_path)).words + markdown(gather([str(tmp_path / "made.json")]))
    for jargon in ("untrunc", "its 95%", "its p95", "foretold", "TTFT", "p50", "accept rate"):
        assert jargon not in words, jargon
    assert not re.search(r"\b(kv|host)\b", words)


def test_measured_speed_ups_are_over_batch_sizes(tmp_path: Path) -> None:
    report = made((1, 4))
    for setting, measured in zip(report["settings"], (2.0, 1.5), strict=True):
        setting["drafters"]["head"]["speedup"] = measured
    rows = Seen(page_of(report, tmp_path)).chart("Speed-up, T = 0")["rows"]
    assert [(row["x"], row["y"]) for row in rows if row["name"] == "head"] == [(1, 2.0), (4, 1.5)]


def test_curves_begin_before_training_where_that_was_evaluated() -> None:
    rows: list[dict[str, Any]] = []
    for step, tau in ((0, 2.0), (5, 2.5)):
        rows.append({"step": step, "tau_estimated": tau, "surv@1": tau / 4, "surv@2": tau / 8})
    rows.append({"step": 5, "loss": 2.0, "surv@1": 0.1, "alpha@1": 0.2})
    run = Training("x", rows)
    table = trainings([run])
    assert table is not None and table.rows[0][3:] == ["2.00", "-", "2.50", "5"]
    assert run.curve("surv@1", True) == {0: 0.5, 5: 0.625}, "not the training positions'"
    _, tau, accepted = training([run])[1]["charts"]
    assert tau["rule"] == 2.0 and "before training" in tau["note"]
    assert accepted["title"] == "x: acceptance by position" and "held-out" in accepted["note"]
    assert [(r["name"], r["x"], r["y"]) for r in accepted["rows"]] == [
        ("position 1", 0, 0.5),
        ("position 1", 5, 0.625),
        ("position 2", 0, 0.25),
        ("position 2", 5, 0.3125),
    ]
    late = training([Training("x", [row for row in rows if row["step"]])])[1]["charts"][1]
    assert "before training" not in late["note"] and "rule" not in late
    (loss,) = training([Training("x", [{"step": 5, "loss": 0.5}])])[1]["charts"]
    assert loss["title"] == "x: training loss"


def every_format(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """The report as each format shows it: the page, Markdown, and the line of Python."""
    path = folder / "r.json"
    path.write_text(json.dumps(report))
    found = gather([str(path)])
    page = Seen(html(found).decode()).words
    return {"html": page, "md": markdown(found), "python": str(found.reports[0][1])}


def test_a_page_says_what_the_speeds_were_measured_on(tmp_path: Path) -> None:
    conditions = {
        "processor": "Some CPU AVX9", "cores": 7, "load_before": 1.25, "load_after": 6.0,
        "layout": "packed", "packed_bytes": 12,
    }  # fmt: skip
    texts = every_format(made() | {"conditions": conditions}, tmp_path)
    for text in (texts["html"], texts["md"]):
        assert "cpu, float32, threads: 2, Some CPU AVX9, cores: 7, load before and after" in text
        assert ": 1.2, 6.0, matrices packed" in text


def test_few_prompts_have_figures_without_an_interval(tmp_path: Path) -> None:
    report = made()
    unknown = [float("nan")] * 2
    for figures in report["settings"][0]["drafters"].values():
        figures |= {"requests": 4, "tau_ci95": unknown, "speedup_ci95": unknown}
        for of_one in figures["by_category"].values():
            of_one["tau_ci95"] = unknown
        for place in range(4):
            figures["per_request"].append(
                {"id": place, "unit": place % 2, "category": "code", "turn": 0, "rounds": []}
            )
    texts = every_format(report, tmp_path)
    assert "Intervals are over prompts, and given for 5 of them or more" in texts["html"]
    assert "2.89-3.39" not in texts["html"] + texts["md"] and "| 3.14 |" in texts["md"]


def widths(text: str) -> list[int]:
    """Columns of each Markdown table."""
    return [line.count("|") - 1 for line in text.splitlines() if line.startswith("| ---")]


def test_markdown_tables_have_eight_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made((1, 4), (0.0, 1.0))
    for setting in report["settings"]:
        setting["drafters"] |= {f"head-{i}": setting["drafters"]["head"] for i in range(9)}
    (tmp_path / "a.json").write_text(json.dumps(report))
    run(Options([str(tmp_path / "a.json")], format="md"))
    few = capsys.readouterr().out
    assert max(widths(few)) == 8
    heads = [line for line in few.splitlines() if line.startswith("| category")]
    assert all(any(f"head-{i} |" in line for line in heads) for i in range(9))
    assert "| drafter | speed-up | temperature | batch size | tau |" in few
    assert "size of the drafter" not in few
