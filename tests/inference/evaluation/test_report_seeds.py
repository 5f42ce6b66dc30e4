"""Figures of several seeds as one table: means, intervals over seeds, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.report.options import ReportOptions as Options
from draftsmith.inference.evaluation.report.report import run
from tests.inference.evaluation.reports import made

TAUS, GAINS = (3.0, 3.25, 3.5), (2.0, 2.5, 2.25)
T_95 = 4.302653  # Student's t at 97.5% with two degrees of freedom, from a printed table


@pytest.fixture
def seeds(tmp_path: Path) -> list[str]:
    paths = []
    for seed, (tau, gain) in enumerate(zip(TAUS, GAINS, strict=True)):
        report = made()
        drafters = report["settings"][0]["drafters"]
        drafters["head"] |= {"tau_incl_bonus": tau, "speedup": gain}
        drafters["a_b & 50%"] = drafters["head"]
        report["drafters"] = {"head": {"spec": f"runs/{seed}", "sha256": f"{seed}"}}
        paths.append(str(tmp_path / f"seed-{seed}.json"))
        Path(paths[-1]).write_text(json.dumps(report))
    return paths


def change(path: str, change: Any) -> None:
    report = json.loads(Path(path).read_text())
    change(report)
    Path(path).write_text(json.dumps(report))


def test_the_mean_over_seeds_has_a_t_interval(seeds: list[str], tmp_path: Path) -> None:
    out = tmp_path / "made" / "table.csv"
    run(Options(seeds, str(out), over_seeds=True))
    rows = {row["drafter"]: row for row in csv.DictReader(out.open())}
    head = rows["head"]
    for key, values in (("tau", TAUS), ("speedup", GAINS)):
        reach = T_95 * statistics.stdev(values) / 3**0.5
        mean = statistics.mean(values)
        expected = [mean, mean - reach, mean + reach]
        found = [float(head[name]) for name in (key, f"{key}_low", f"{key}_high")]
        assert found == pytest.approx(expected, rel=1e-5)
    assert (head["seeds"], head["interval_over"], head["report"]) == ("3", "seeds", "")
    # what was not trained anew is no sample of seeds
    assert rows["ngram"]["seeds"] == rows["plain"]["seeds"] == "1"
    assert rows["ngram"]["tau"] == "1.61" and rows["ngram"]["tau_low"] == ""


def test_markdown_and_latex_have_the_same_cells(
    seeds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(Options(seeds, over_seeds=True))
    text = capsys.readouterr().out
    assert "means over 3 seeds with 95% t intervals over seeds" in text
    assert "| head | 3 | 3.25 | 2.63\u20133.87 | 2.25\u00d7 | 1.63\u20132.87 |" in text
    run(Options(seeds, format="tex", over_seeds=True))
    text = capsys.readouterr().out
    assert r"    head & 3 & 3.25 & 2.63--3.87 & 2.25$\times$ & 1.63--2.87 \\" in text
    assert r"    a\_b \& 50\% & 3 &" in text and r"95\% t intervals" in text
    rules = [line.strip() for line in text.splitlines() if "rule" in line]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"\begin{tabular}{lrrrrr}" in text


def test_one_seed_and_several_reports_have_a_table_as_well(
    seeds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mean in (False, True):
        out = tmp_path / "one.csv"
        run(Options(seeds[:1], str(out), over_seeds=mean))
        (head,) = (row for row in csv.DictReader(out.open()) if row["drafter"] == "head")
        assert (head["tau"], head["tau_low"], head["interval_over"]) == ("3.0", "2.89", "prompts")
    capsys.readouterr()
    run(Options(seeds[:1], format="tex"))
    assert r"head & 3.00 & 2.89--3.39 & 2.00$\times$" in capsys.readouterr().out
    run(Options(seeds, format="csv"))
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["report"] for row in rows if row["drafter"] == "head"] == seeds


def test_drafters_of_other_folders_are_matched_by_method(
    seeds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, path in enumerate(seeds):

        def rename(report: dict[str, Any], seed: int = seed) -> None:
            drafters = report["settings"][0]["drafters"]
            drafters[f"seed-{seed}"] = drafters.pop("head") | {"kind": "eagle3"}
            report["drafters"] = {}

        change(path, rename)
    run(Options(seeds, over_seeds=True))
    assert "| eagle3 | 3 | 3.25 |" in capsys.readouterr().out


def test_what_is_no_series_of_seeds_is_refused(seeds: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="makes one table, not a page"):
        run(Options(seeds, str(tmp_path / "r.html"), over_seeds=True))
    change(seeds[1], lambda report: report["drafters"]["head"].update(sha256="0"))
    with pytest.raises(UserError, match=r"seed-0.json is given twice; --over-seeds takes one"):
        run(Options([*seeds, seeds[0]], over_seeds=True))
    with pytest.raises(UserError, match=r"seed-1.json have the same weights of head; give one"):
        run(Options(seeds, over_seeds=True))
    change(seeds[1], lambda report: report["prompt_set"].update(sha256="other"))
    with pytest.raises(UserError, match="of different prompts"):
        run(Options(seeds, over_seeds=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    with pytest.raises(UserError, match="no figures of drafters"):
        run(Options([str(tmp_path / "run")], format="csv"))
