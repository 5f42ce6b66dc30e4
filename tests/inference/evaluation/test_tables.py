"""Tables of an evaluation in the terminal: one of all settings, at 80 and at 120 columns."""

from __future__ import annotations

import io
import re

import pytest

from draftsmith.inference.base.console import OutputConsole
from draftsmith.inference.evaluation.figure_text import busy, of_setting
from draftsmith.inference.evaluation.report.command import ReportInputs, html, markdown
from draftsmith.inference.evaluation.results import (
    NAN,
    CategoryFigures,
    Conditions,
    DrafterFigures,
    PromptSet,
    Report,
    SettingFigures,
)
from draftsmith.inference.evaluation.tables import by_speed, show

LONG = "draft-model as in vllm:drafts=3,draws=probabilistic"


def figures(tau: float, speedup: float, loops: float, by_category: float) -> DrafterFigures:
    drafts = tau > 1
    return DrafterFigures(
        requests=4, tau_incl_bonus=tau, tau_ci95=(tau - 0.1, tau + 0.1), mean_n_draft=4 * drafts,
        survival=[0.7, 0.5, 0.25] if drafts else [], tokens_s=speedup * 1000, speedup=speedup,
        equal_to_ar=4, loop_share=loops,
        by_category={"io": CategoryFigures(tau_incl_bonus=by_category, tau_ci95=(1.0, 2.0))},
    )  # fmt: skip


def report_of(name: str = "eagle3") -> Report:
    """T = 0 and T = 1 with batches of 1 and 2. A drafter gains at T = 0, nothing does at T = 1."""
    settings = []
    for temperature in (0.0, 1.0):
        for batch in (1, 2):
            gain = 1.5 if temperature == 0 else 0.7
            drafters = {
                "plain": figures(1, 1, 0.25 * batch, 1),
                "ngram": figures(1.2, gain - 0.1, 0.5, 1.3 + temperature),
                name: figures(3.4, gain, 0.75, 2.6 + temperature),
            }
            settings.append(SettingFigures(temperature=temperature, batch=batch, drafters=drafters))
    prompt_set = PromptSet(sha256="", prompts=4, categories={"io": 2, "math": 2})
    return Report(prompt_set=prompt_set, settings=settings, dtype="float32")


def shown(report: Report, width: int) -> list[str]:
    console = OutputConsole(width=width, file=io.StringIO())
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["eagle3", LONG])
def test_tables_fit_the_terminal(width: int, name: str) -> None:
    lines = shown(report_of(name), width)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "\u2026" in line], "a cell is cut"
    (head,) = (line for line in lines if line.startswith(" drafter"))
    assert all(column in head for column in ("speed-up", "temperature", "size", "tau", "replies"))


def test_narrow_terminal_drops_the_least_important_columns() -> None:
    (head,) = (line for line in shown(report_of(), 56) if line.startswith(" drafter"))
    assert head.split() == ["drafter", "speed-up", "temperature", "batch", "size", "tau"]


def test_a_setting_is_sorted_by_speed_and_its_fastest_is_marked() -> None:
    lines = shown(report_of(), 120)
    start = next(i for i, line in enumerate(lines) if line.startswith(" drafter"))
    rows = [line.split() for line in lines[start:] if "x  " in line]
    assert [row[-7:][1:3] for row in rows[::3]] == [["0", "1"], ["0", "2"], ["1", "1"], ["1", "2"]]
    assert [row[:2] for row in rows[:3]] == [
        ["*", "eagle3"],
        ["ngram", "1.40x"],
        ["plain", "1.00x"],
    ]
    assert rows[9][:2] == ["plain", "1.00x"], "nothing is faster"
    assert sum(line.lstrip().startswith("* ") for line in lines) == 2


def test_what_has_no_speed_up_comes_last_and_wins_nothing() -> None:
    drafters = {"plain": figures(1, NAN, 0, 1), "a": figures(2, NAN, 0, 1)}
    setting = SettingFigures(temperature=0, batch=1, drafters=drafters)
    prompts = PromptSet(sha256="", prompts=1)
    lines = shown(Report(prompt_set=prompts, settings=[setting]), 80)
    assert not [line for line in lines if "nan" in line or line.lstrip().startswith("* ")]
    drafters["b"] = figures(1.5, 0.5, 0, 1)
    assert by_speed(setting) == ["b", "plain", "a"]


def test_tau_by_category_is_of_each_setting() -> None:
    """Batch sizes of one temperature with the same figures are one group."""
    report = report_of()
    lines = shown(report, 80)
    start = next(i for i, line in enumerate(lines) if "Tau by category" in line)
    assert [line.split() for line in lines[start:] if line.startswith(" io")] == [
        ["io", "1.30", "2.60"],
        ["io", "2.30", "3.60"],
    ]
    title = "Tau by category, "
    assert [line.strip() for line in lines[start:] if title in line] == [
        f"{title}T = 0, batch 1, 2",
        f"{title}T = 1, batch 1, 2",
    ]
    report.settings[1].drafters["eagle3"].by_category["io"].tau_incl_bonus = 2.5
    found = [line.strip().removeprefix(title) for line in shown(report, 80) if title in line]
    assert found == ["T = 0, batch 1", "T = 0, batch 2", "T = 1, batch 1, 2"]


def test_many_drafters_go_into_several_tables_of_categories() -> None:
    report = report_of()
    for setting in report.settings:
        for number in range(8):
            setting.drafters[f"{LONG}-{number}"] = figures(2, 1.1, 0, 1.5)
    lines = shown(report, 80)
    assert max(map(len, lines)) <= 80 and not [line for line in lines if "\u2026" in line]
    assert sum("further columns" in line for line in lines) >= 1


def test_warnings_name_their_setting() -> None:
    report = report_of()
    report.settings[2].drafters["eagle3"].warnings = ["2 replies were cut"]
    said = " ".join(" ".join(shown(report, 80)).split())
    assert "warning, T = 1, batch 1, eagle3: 2 replies were cut" in said


def test_a_name_is_whole_where_there_is_space() -> None:
    name = "a-drafter-of-37-characters-with-words"
    out = io.StringIO()
    show(report_of(name), OutputConsole(file=out, width=140))
    assert re.search(rf"\* {name} +1.50x", out.getvalue()), "its speed-up stands in the same line"


def test_the_headline_says_what_drafts_what_loses_and_how_busy_the_machine_was() -> None:
    report = report_of()
    lines = shown(report, 160)
    assert lines[0] == "4 prompts" and lines[1].startswith("T = 0, batch 1: eagle3 is fastest, ")
    lost = "no drafter is faster than plain decoding; slower than plain decoding: "
    assert lines[4] == (
        f"T = 1, batch 2: {lost}ngram (0.60x), eagle3 (0.70x); 50% of the replies loop, which "
        "raises tau"
    )
    assert "slower" not in lines[1] and "50% of the replies loop" in lines[2]
    report.conditions = Conditions(cores=1, machine_cores=2, load_before=0.8, load_after=1.2)
    assert shown(report, 120)[0] == "4 prompts; load before and after 0.8 and 1.2 on 2 cores"
    report.conditions.load_after = 6.2
    line = "4 prompts; the machine was busy (load 6.2 on 2 cores): read tau, not speed"
    assert shown(report, 120)[0] == line
    page = html(ReportInputs([("r.json", report)], [])).decode()
    text = markdown(ReportInputs([("r.json", report)], []))
    for document in (page, text):
        assert line in document and f"{lost}ngram (0.60x), eagle3 (0.70x)" in document


def test_the_headline_does_not_give_the_win_of_a_lookup_to_what_was_trained() -> None:
    def said(**gains: float) -> str:
        drafters = {name: figures(2, gain, 0, 1) for name, gain in gains.items()}
        drafters = {"plain": figures(1, 1, 0, 1)} | drafters
        for name in drafters:
            drafters[name].kind = name
        return of_setting(SettingFigures(temperature=0, batch=1, drafters=drafters))

    assert said(ngram=2.49, eagle=1.34, medusa=0.92) == (
        "ngram (untrained) is fastest, 2.49x plain decoding, tau 2.00; the fastest trained drafter "
        "by itself is eagle, 1.34x plain decoding, tau 2.00; slower than plain decoding: medusa "
        "(0.92x)"
    )
    both, named = {"eagle3:lookup=3": 1.5, "eagle": 0.9}, {"eagle + lookup": 1.5, "eagle": 0.9}
    for gains in (both, named):
        assert "lookup is untrained) is fastest, 1.50x" in said(**gains)
        assert "no trained drafter by itself is faster than plain decoding" in said(**gains)
    assert said(eagle=1.2, ngram=1.1).startswith("eagle is fastest, 1.20x plain decoding, tau 2.00")
    assert said(eagle=1.004).startswith("no drafter is faster"), "1.00x is no gain"
    unsure = {"plain": figures(1, 1, 0, 1), "eagle": figures(2, 1.3, 0, 1)}
    unsure["eagle"].speedup_ci95 = (0.8, 2.1)
    one = of_setting(SettingFigures(temperature=0, batch=1, drafters=unsure))
    assert "(95%: 0.80-2.10), tau 2.00, but too few prompts to be sure of it" in one


def test_own_threads_do_not_count_as_other_load() -> None:
    assert not busy([2.1, 2.4], 2, 2) and not busy([8.3], 2, 8) and not busy([None], 2, 2)
    assert busy([0.0, 3.0], 2, 1) and busy([9.0], 2, 8)
