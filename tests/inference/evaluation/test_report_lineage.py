"""Several reports of one drafter on a page: one part, with the figures of `draftsmith compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.evaluation.compare import compared
from draftsmith.inference.evaluation.report.command import gather, html, markdown
from draftsmith.inference.evaluation.report.lineage import parts_of_page
from draftsmith.inference.evaluation.results import read_report
from tests.helpers.reports import Seen, answered, made

BEFORE, AFTER = [2, 4] * 6, [3, 3] * 6  # code gains, chat loses, together nothing changes


def written(folder: Path, **reports: dict[str, Any]) -> list[str]:
    paths = []
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
        paths.append(str(folder / f"{name}.json"))
    return paths


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    batches, temperatures = (1, 4), (0.0, 1.0)
    before, after = made(batches, temperatures), made(batches, temperatures)
    for setting in after["settings"]:
        setting["drafters"]["head"] |= {"tau_incl_bonus": 2.5, "speedup": 2.25}
    after["drafter_bytes"]["head"] = 5_000_000
    return written(tmp_path, before=answered(before, BEFORE), after=answered(after, AFTER))


def test_two_reports_of_a_lineage_become_one_section(pair: list[str]) -> None:
    seen = Seen(html(gather(pair)).decode())
    assert seen.headings[0] == "Before and after" and seen.headings.count("Summary") == 1
    assert len(seen.headings) == len(set(seen.headings)), "no section stands twice"
    (setting, *_) = compared([read_report(path) for path in pair], ["head"] * 2, pair, 0.0)
    assert [row.category for row in setting.rows] == ["all", "chat", "code"]
    table = seen.tables[0]
    for row in setting.rows:
        low, high = row.change_ci95
        (cells,) = [r for r in table["rows"] if r[0] == row.category and r[3:5] == ["0", "1"]]
        found = dict(zip(table["columns"], cells, strict=True))
        assert found["change"] == f"{row.change:+.1%}" and found["n"] == str(row.requests)
        assert found["before"].startswith(f"{row.tau_before:.2f} (")
        assert found["95%"] == f"{low:+.1%} to {high:+.1%}"
        assert found["outcome"] == (
            "regressed" if row.regressed else "gained" if low > 0 else "no clear change"
        )
    assert ["chat", "-25.0%"] in [row[:2] for row in seen.rows]
    assert "tau of head 3.00 → 3.00, +0.0%" in seen.words
    regressed = "Regressed: head, chat (T = 0, batch 1); head, chat (T = 0, batch 4)"
    assert seen.words.count(regressed) == 1
    change = seen.chart("Change of tau, T = 0, batch 1")
    assert [row["text"] for row in change["rows"] if row["group"] == "chat"] == ["-25.0%"]
    assert seen.chart("Change of tau, T = 1, batch 4")["rows"]


def test_the_parts_of_a_lineage_share_charts_and_the_table(pair: list[str]) -> None:
    seen = Seen(html(gather(pair)).decode())
    table = seen.tables[1]
    names = [row[0] for row in table["rows"]]
    assert names[:4] == ["head, before", "head, after", "plain", "ngram"] and len(names) == 16
    first = [c for c in seen.charts if c["title"] in ("Tau: tokens a round", "Speed-up")]
    drawn = [row["name"] for chart in first for row in chart["rows"]]
    assert drawn.count("head, before") == drawn.count("head, after") == 4
    rows = {row[0]: row for row in table["rows"] if row[2:4] == ["0", "1"]}
    assert rows["head, before"][4] == "3.14" and rows["head, after"][4] == "2.50"
    assert "3.94 MB" in rows["head, before"] and "5 MB" in rows["head, after"]
    conditions = [b["text"] for b in seen.of("heading") if b["text"] in ("before", "after")]
    assert conditions == ["before", "after"]
    assert [fact["rows"][0][1] for fact in seen.of("facts")[:2]] == pair
    shown = markdown(gather(pair))
    assert (
        shown.count("**Every setting**") == 1 and "| chat | -25.0% | regressed | 0 | 1 |" in shown
    )


def test_three_reports_are_compared_with_the_first(tmp_path: Path) -> None:
    paths = written(
        tmp_path,
        a=answered(made(), BEFORE),
        b=answered(made(), AFTER),
        c=answered(made(), [5, 5] * 6),
    )
    (part,) = parts_of_page(gather(paths).reports)
    assert part.labels == ["before", "after 1", "after 2"]
    assert list(part.report.settings[0].drafters)[2:] == [f"head, {name}" for name in part.labels]
    rows = Seen(html(gather(paths)).decode()).rows
    assert ["all", "+66.7%", "gained", "0", "1", "after 2", "12"] in [row[:7] for row in rows]


def test_incomparable_reports_are_shown_in_separate_sections(tmp_path: Path) -> None:
    first = answered(made(), BEFORE)
    prompts, sampling = (answered(made(), AFTER) for _ in range(2))
    prompts["prompt_set"]["sha256"] = "def" * 20
    sampling["sampling"] = {"top_p": 0.5}
    other_name = answered(made(), AFTER)
    drafters = other_name["settings"][0]["drafters"]
    drafters["another"] = drafters.pop("head")
    no_requests = made()
    for name, report in {
        "prompts": prompts,
        "sampling": sampling,
        "name": other_name,
        "requests": no_requests,
    }.items():
        paths = written(tmp_path, **{"first": first, name: report})
        parts = parts_of_page(gather(paths).reports)
        assert [len(part.reports) for part in parts] == [1, 1], name
        headings = Seen(html(gather(paths)).decode()).headings
        assert headings.count("Summary") == 2 and "Before and after" not in headings


def test_the_reports_of_a_folder_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    late = answered(made(), AFTER) | {"started_at": "2026-02-01T00:00:00+00:00"}
    written(tmp_path, z=answered(made(), BEFORE), a=late)
    (part,) = parts_of_page(gather([str(tmp_path)]).reports)
    assert [Path(path).stem for path, _ in part.reports] == ["z", "a"]
    (part,) = parts_of_page(gather([str(tmp_path / "a.json"), str(tmp_path)]).reports)
    assert [Path(path).stem for path, _ in part.reports] == ["a", "z"], "as it was named"
