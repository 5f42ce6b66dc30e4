"""The page of `draftsmith report`: its numbers are the JSON's, and no text breaks out of it."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.documents import convert
from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.report import charts, replies, sections, speed
from draftsmith.inference.evaluation.report.report import Options, gather, html, markdown, run
from draftsmith.inference.evaluation.report.script import SCRIPT
from draftsmith.inference.evaluation.report.tables import Table, fastest, loop_shares, summary
from draftsmith.inference.evaluation.report.tables import served as tables_served
from draftsmith.inference.evaluation.report.training import Training, curves, trainings
from draftsmith.inference.evaluation.results import Sample
from tests.inference.evaluation.reports import (
    EVIL,
    Seen,
    drafter,
    made,
    page_of,
    sample,
    typed,
    write_inputs,
)
from tests.inference.evaluation.test_simulate import run_cli


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


def test_the_numbers_of_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    rows = Seen(page_of(made(), tmp_path)).rows
    cells = {
        "speed-up": "2.61\u00d7",
        "temperature": "0",
        "batch size": "1",
        "tau": "3.14",
        "replies equal to plain decoding's": "5 of 6",
        "tau, 95% interval": "2.89\u20133.39",
        "speed-up, 95% interval": "2.50\u20132.72",
        "tokens a second": "322",
        "drafted tokens a round": "4.0",
        "share of them accepted": "0.43",
        "time to first token, median, ms": "12.3",
        "time per later token, median, ms": "4.50",
        "95th percentile of that, ms": "6.70",
        "size of the drafter": "3.94 MB",
        "tau if no reply stopped inside a round": "3.27",
    }
    few = [name for name in cells if name not in ("temperature", "batch size")][:7]
    assert rows[0][1:] == few, "the second column is what a phone shows"
    first, whole = [row[1:] for row in rows if row[0] == "head"][:2]
    assert first == [cells[name] for name in few] and whole == list(cells.values())
    assert list(cells) in [row[1:] for row in rows], "all columns follow, folded"
    assert next(row for row in rows if row[0] == "plain")[2] == "1.00"
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
        "✓ lossless" in text and "LOSSY" not in text and "batch 1: head is fastest, 2.61x" in text
    )
    assert ">4.14</text>" in text and ">2.14</text>" in text, "tau by category, at the bars"
    assert ">10.00 ms<" in text, "0.2 s of 20 rounds"


def test_a_lossy_setting_is_flagged_loudly(tmp_path: Path) -> None:
    text = page_of(made(lossless=False), tmp_path)
    assert 'class="lossy" role="alert"' in text and "✓ lossless" not in text
    assert "LOSSY" in summary(typed(made(lossless=False))).title
    assert "LOSSY" in markdown(gather([str(tmp_path / "made.json")]))


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    every = [
        "Summary",
        "Acceptance by position",
        "Categories",
        "Speed-up",
        "Time of a round",
        "Replies token by token",
        "Measured on",
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
    seen = Seen(replies.reply(convert(sample(["def", " add", "(", "\n"], [-1, 1, 9, 0]), Sample)))
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
        replies.visible("a\nb <") == 'a<span class="nl">↵</span>\nb &lt;'
        and replies.visible("\x1b") == "\u241b"
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
        ["eagle", "50", "1.500", "\u2013", "2.25 (1.75\u20132.75)", "2.38", "40"]
    ]
    text = html(gather([str(inputs / "eagle")])).decode()
    assert (
        Seen(text).headings == ["Training"]
        and "eagle: held-out tau" in text
        and "eagle: training loss" in text
    )
    estimated_only = Training("x", [{"step": 1, "loss": 1.0}, {"step": 1, "tau_estimated": 2.5}])
    table = trainings([estimated_only])
    assert table is not None and table.rows[0][4:] == ["\u2013", "2.50", "1"]


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


@pytest.mark.parametrize("name", ["r.md", "r.html", "r", "R.MARKDOWN", "r.txt"])
def test_the_ending_of_the_file_chooses_the_format(name: str, inputs: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / name, [str(inputs / "a.json")]
    if name == "r.txt":
        with pytest.raises(UserError, match="in none of .html, .md, .csv and .tex; give --format"):
            run(Options(runs, str(out)))
        run(Options(runs, str(out), "md"))
    else:
        run(Options(runs, str(out)))
    assert out.read_text().startswith("<!doctype") == (name in ("r.html", "r"))
    other = "html" if name == "r.md" else "md"
    if name in ("r.md", "r.html"):
        with pytest.raises(UserError, match=f"another format than --format {other}"):
            run(Options(runs, str(out), other))


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
        and "| head | 2.61\u00d7 | 0 | 1 | 3.14 |" in done.stdout
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


def test_the_page_begins_with_tau_and_speed_up_and_ends_with_the_facts(tmp_path: Path) -> None:
    text = page_of(made((1, 4), (0.0, 1.0)), tmp_path)
    first, second = re.findall("<svg.*?</svg>", text, re.DOTALL)[:2]
    assert text.index(first) < text.index(second) < text.index("<h2") < text.index("<table")
    assert [svg.count(">head</text>") for svg in (first, second)] == [2, 2], "T = 0 and T = 1"
    assert first.count(">3.14<") == second.count(">2.61<") == 2 and "whisker" in first + second
    assert text.index(">head</text>") < text.index(">ngram</text>"), "baselines come last"
    replies_at, facts_at = text.index('id="replies-0"'), text.index('<dl class="facts">')
    assert replies_at < text.index('id="measured-0"') < facts_at < text.index('id="definitions"')


def test_a_report_that_is_not_whole_says_so_first(tmp_path: Path) -> None:
    text = page_of(made() | {"partial": "3 of 6 prompts"}, tmp_path)
    assert text.index("only 3 of 6 prompts so far") < text.index("<svg")


def test_all_settings_stand_in_one_table(tmp_path: Path) -> None:
    text = page_of(made((1, 4), (0.0, 1.0)), tmp_path)
    rows = [row for row in Seen(text).rows if row[0] in ("plain", "ngram", "head")]
    assert text.count("<table") == 2 and len(rows) == 2 * 4 * 3, "and folded with all columns"
    assert text.count('<tr class="best">') == 2 * 4, "one of each setting"
    assert [row[2:4] for row in rows[:12:3]] == [["0", "1"], ["0", "4"], ["1", "1"], ["1", "4"]]
    assert '<table data-switches="2 3">' in text
    shown = markdown(gather([str(tmp_path / "made.json")]))
    assert shown.count("| head | 2.61") == 2 and shown.count("| head | 2.31") == 2


def test_loop_share_and_categories_are_shown_for_every_setting(tmp_path: Path) -> None:
    report = made((1, 4), (0.0, 1.0))
    for setting, share in zip(report["settings"], (0.5, 0.25, 0.0, 0.125), strict=True):
        setting["drafters"]["plain"]["loop_share"] = share
    settings = ["T = 0, batch 1", "T = 0, batch 4", "T = 1, batch 1", "T = 1, batch 4"]
    percent = ("50%", "25%", "0%", "12%")
    shares = [f"{share} ({where})" for share, where in zip(percent, settings, strict=True)]
    assert ", ".join(shares) in loop_shares(typed(report))
    text = page_of(report, tmp_path)
    shown = markdown(gather([str(tmp_path / "made.json")]))
    for share, where in zip(shares, settings, strict=True):
        assert share in text and f"Tau by category, {where}" in text
        assert f"Tau by category, {where}" in shown


def test_the_page_speaks_plain_words(tmp_path: Path) -> None:
    server = {
        "engine": "vllm", "version": "0", "url": "http://127.0.0.1:1",
        "settings": [{"temperature": 0, "concurrency": 8, "tau_incl_bonus": 2.75,
        "tau_emitted": 2.5, "survival": [0.875], "accept_rate": 0.4375, "tokens_s": 321.4}],
    }  # fmt: skip
    report = made((1, 4), (0.0, 1.0)) | {"server": server}
    del report["definitions"]
    text = page_of(report, tmp_path)
    words = re.sub("<[^>]*>", " ", re.sub("<(style|script)>.*?</", "", text, flags=re.DOTALL))
    words += markdown(gather([str(tmp_path / "made.json")]))
    for jargon in ("untrunc", "its 95%", "its p95", "foretold", "TTFT", "p50", "accept rate"):
        assert jargon not in words, jargon
    assert not re.search(r"\b(kv|host)\b", words)


def test_a_prediction_begins_at_the_point_that_was_measured() -> None:
    """Measured 2.0 and 1.5; the model says half of it, and too much of the second."""
    report = made((1, 4))
    for setting, measured, modelled in zip(report["settings"], (2.0, 1.5), (1.0, 0.9), strict=True):
        setting["drafters"]["head"] |= {"speedup": measured, "modelled_speedup": modelled}
        setting["drafters"]["ngram"] |= {"speedup": 1.0, "modelled_speedup": 1.1}
    ngram, head = speed.growths(typed(report).settings)
    assert head.scale == 2 and head.drawn == [2.0, 1.8]
    assert speed.misfits(head) == [
        "batch 1, head: 1.00\u00d7 predicted, 2.00\u00d7 measured, off by 50%",
        "batch 4, head: 1.80\u00d7 predicted by the dashed line, 1.50\u00d7 measured, off by 20%",
    ]
    assert ngram.drawn == [pytest.approx(1.0)] * 2 and speed.misfits(ngram) == [], "10% is near"
    text = speed.speed(typed(report), {"ngram": 2, "head": 1})
    assert "The cost model is off by more than 15%" in text
    assert "<li>T = 0, batch 1, head: 1.00" in text
    line, *_ = re.findall(r'<path class="line c1 dashed" d="M([\d.]+) ([\d.]+)L', text)
    marks = re.findall(r'<path class="mark c1" d="M([\d.]+) ([\d.]+)a', text)
    assert float(line[0]) - 3.6 == pytest.approx(float(marks[0][0]), abs=0.11)
    assert float(line[1]) == pytest.approx(float(marks[0][1]), abs=0.11), "at the first point"
    for setting in report["settings"]:
        setting["drafters"]["head"]["modelled_speedup"] = float("nan")
    assert "cost model is off" not in speed.speed(typed(report), {"ngram": 2, "head": 1})


def test_curves_begin_before_training_where_that_was_evaluated() -> None:
    rows: list[dict[str, Any]] = []
    for step, tau in ((0, 2.0), (5, 2.5)):
        rows.append({"step": step, "tau_estimated": tau, "surv@1": tau / 4, "surv@2": tau / 8})
    rows.append({"step": 5, "loss": 2.0, "surv@1": 0.1, "alpha@1": 0.2})
    run = Training("x", rows)
    table = trainings([run])
    assert table is not None and table.rows[0][3:] == ["2.00", "\u2013", "2.50", "5"]
    assert run.curve("surv@1", True) == [(0, 0.5), (5, 0.625)], "not the training positions'"
    text = curves([run])
    assert "dotted: before training" in text and 'class="rule"' in text
    assert "x: acceptance by position" in text and text.count(">position 2</text>") == 2
    assert "position 2 at 0: 0.25</title>" in text and "position 1 at 5: 0.625</title>" in text
    late = curves([Training("x", [row for row in rows if row["step"]])])
    assert "before training" not in late and 'class="rule"' not in late
    assert "overlap of target" in curves([Training("x", [{"step": 5, "alpha@1": 0.5}])])
    assert "acceptance by position" not in curves([Training("x", [{"step": 5, "loss": 0.5}])])


def test_texts_from_right_to_left_stay_in_their_place(tmp_path: Path) -> None:
    report = made()
    hebrew = sample(["שלום", " 世界", "x"], [-1, 1, 0]) | {"prompt": "مرحبا"}
    report["settings"][0]["drafters"]["head"]["samples"] = [hebrew]
    text = page_of(report, tmp_path)
    assert '<div class="prompt" dir="auto">مرحبا</div>' in text
    assert '<div class="reply" dir="auto"' in text and "unicode-bidi: plaintext" in text
    isolated = "\u2018\u2068\u05d0\u05d1\u2069\u2019"
    assert replies.quoted("\u05d0\u05d1") == isolated, "numbers behind it stay there"
    assert replies.quoted("世界") == "\u2018世界\u2019"
    assert '<th scope="row"><i class="key c1"></i><bdi>head</bdi></th>' in text


def every_format(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """The report as each format shows it: the page, Markdown, and the line of Python."""
    path = folder / "r.json"
    path.write_text(json.dumps(report))
    found = gather([str(path)])
    page = unescape(html(found).decode())
    return {"html": page, "md": markdown(found), "python": str(found.reports[0][1])}


def test_a_partial_report_says_what_was_measured(tmp_path: Path) -> None:
    report: dict[str, Any] = made() | {"partial": "30 of 88 prompts in setting 1 of 2"}
    report["prompt_set"]["prompts"] = 88
    texts = every_format(report, tmp_path)
    for text in texts.values():
        assert "only 30 of 88 prompts in setting 1 of 2 so far" in text
        assert not re.search(r"(?<!of )88 prompts", text), "no format says that 88 were measured"
    texts = every_format(report | {"partial": "1 of 2 settings"}, tmp_path)
    assert "88 prompts, only 1 of 2 settings so far" in texts["md"]
    del report["partial"]
    assert "\n88 prompts, " in every_format(report, tmp_path)["md"]


def test_a_page_says_what_the_speeds_were_measured_on(tmp_path: Path) -> None:
    conditions = {
        "processor": "Some CPU AVX9", "cores": 7, "load_before": 1.25, "load_after": 6.0,
        "layout": "packed", "packed_bytes": 12, "four_tokens": 1.213,
    }  # fmt: skip
    texts = every_format(made() | {"conditions": conditions}, tmp_path)
    for text in (texts["html"], texts["md"]):
        assert "cpu, float32, threads: 2, Some CPU AVX9, cores: 7, load before and after" in text
        assert ": 1.2, 6.0, matrices packed, four tokens cost 1.21 of one" in text


def test_the_page_says_what_a_profile_gains(tmp_path: Path) -> None:
    report = made()
    figures = report["settings"][0]["drafters"]
    gains = {"untuned": "head", "gain_over_default": 1.25, "gain_ci95": [1.1, 1.4]}
    figures["head:tuned"] = figures["head"] | gains
    page = every_format(report, tmp_path)["html"]
    assert "head:tuned: 1.25x (95%: 1.10 to 1.40) the tokens per second of head." in page


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
    assert "No interval is given for figures of fewer than 5 prompts (here 2;" in texts["html"]
    assert "no intervals, of fewer than 5 prompts" in texts["html"]
    assert 'class="whisker' not in texts["html"].partition("</style>")[2]
    assert "2.89\u20133.39" not in texts["html"] + texts["md"] and "| 3.14 |" in texts["md"]


def test_a_phone_shows_the_columns_that_matter_and_says_that_there_are_more(
    tmp_path: Path,
) -> None:
    page = page_of(made((1, 2)), tmp_path)
    table = page[page.index("<table") : page.index("</table>")]
    *shown, equal = re.findall(r'<th scope="col">([^<]*)<', unescape(table))
    assert shown == ["drafter", "speed-up", "batch size", "tau"] and equal.startswith("replies")
    hidden = re.findall(r'<th scope="col" class="more">', table)
    assert f"{len(hidden)} more columns are shown where the window is wider" in page


def widths(text: str) -> list[int]:
    """Columns of each Markdown table."""
    return [line.count("|") - 1 for line in text.splitlines() if line.startswith("| ---")]


def test_tables_have_eight_columns_unless_all_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made((1, 4), (0.0, 1.0))
    for setting in report["settings"]:
        setting["drafters"] |= {f"head-{i}": setting["drafters"]["head"] for i in range(9)}
    (tmp_path / "a.json").write_text(json.dumps(report))
    run(Options([str(tmp_path / "a.json")], format="md"))
    few = capsys.readouterr().out
    run(Options([str(tmp_path / "a.json")], format="md", columns="all"))
    every = capsys.readouterr().out
    assert max(widths(few)) == 8 and max(widths(every)) == 16
    heads = [line for line in few.splitlines() if line.startswith("| category")]
    assert all(any(f"head-{i} |" in line for line in heads) for i in range(9))
    assert "| drafter | speed-up | temperature | batch size | tau |" in few
    assert "size of the drafter" in every and "size of the drafter" not in few
