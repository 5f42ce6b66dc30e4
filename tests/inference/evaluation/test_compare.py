"""Reports of a lineage side by side: pairs, categories, the flag and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.documents import convert
from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.compare import Options, compared, run
from draftsmith.inference.evaluation.results import Report, read_report

CODE, CHAT = [3, 4, 2], [2, 1, 2]


def written(
    code: list[int], chat: list[int], name: str = "head", temperature: float = 0.0, sha: str = "x"
) -> dict[str, Any]:
    """As `draftsmith evaluate` writes it: ten prompts of each category."""
    requests = [
        {
            "id": f"{category}{i}",
            "unit": start + i,
            "turn": 0,
            "category": category,
            "rounds": [[5, k - 1, k] for k in emitted],
        }
        for category, start, emitted in (("code", 0, code), ("chat", 10, chat))
        for i in range(10)
    ]
    figures = {
        "requests": 20,
        "tau_incl_bonus": 2.0,
        "tau_ci95": None,
        "tokens_s": 1.0,
        "mean_n_draft": 0.0,
    }
    plain: dict[str, Any] = {**figures, "per_request": []}
    drafters = {"plain": plain, "ngram": plain, name: {**figures, "per_request": requests}}
    setting = {"temperature": temperature, "batch": 1, "drafters": drafters}
    return {"settings": [setting], "prompt_set": {"sha256": sha, "prompts": 20}}


def report(code: list[int], chat: list[int], **facts: Any) -> Report:
    return convert(written(code, chat) | facts, Report)


def test_gains_and_regressions_are_reported_per_category() -> None:
    (setting,) = compared(
        [report(CODE, CHAT), report([5, 5, 2], [1, 1, 2])], ["head", "head"], ["a", "b"], 0.02
    )
    rows = {row.category: row for row in setting.rows}
    assert list(rows) == ["all", "chat", "code"]
    assert (
        rows["code"].tau_before == 3
        and rows["code"].tau_after == 4
        and rows["code"].change == pytest.approx(1 / 3)
    )
    assert (
        rows["chat"].change == pytest.approx(-0.2)
        and rows["chat"].regressed
        and not rows["code"].regressed
    )
    low, high = rows["chat"].change_ci95
    assert low == high == pytest.approx(-0.2), "pairs that all change alike leave no doubt"


def test_turns_of_a_prompt_are_drawn_together() -> None:
    """Every prompt has a turn that gains a half and one that loses as much: no doubt that nothing
    has changed."""
    before, after = report(CODE, CHAT), report(CODE, CHAT)
    for found in (before, after):
        for place, request in enumerate(found.settings[0].drafters["head"].per_request):
            request.unit, request.category, request.rounds = place // 2, "", [(5, 3, 4)]
    for place, request in enumerate(after.settings[0].drafters["head"].per_request):
        request.rounds = [(5, 1, 2)] if place % 2 else [(5, 5, 6)]
    (setting,) = compared([before, after], ["head", "head"], ["a", "b"], 0.0)
    assert [row.change_ci95 for row in setting.rows] == [(0.0, 0.0)]


def test_category_with_few_prompts_is_not_flagged() -> None:
    before, after = report(CODE, CHAT), report(CODE, [1, 1, 1])
    for found in (before, after):
        requests = found.settings[0].drafters["head"].per_request
        found.settings[0].drafters["head"].per_request = requests[:10] + requests[10:14]
    (setting,) = compared([before, after], ["head", "head"], ["a", "b"], 0.02)
    assert {row.category: row.regressed for row in setting.rows}["chat"] is False


def test_only_the_drafter_may_differ() -> None:
    for key, value in {
        "target": {"weights_hash": "y"},
        "options": {"max_new_tokens": 7},
        "sampling": {"top_k": 3},
    }.items():
        with pytest.raises(UserError, match="of different"):
            compared(
                [report(CODE, CHAT), report(CODE, CHAT, **{key: value})],
                ["head", "head"],
                ["a", "b"],
                0.0,
            )
    hotter = report(CODE, CHAT, sampling={"temperature": 1})
    assert compared(
        [report(CODE, CHAT, sampling={"temperature": 0}), hotter],
        ["head", "head"],
        ["a", "b"],
        0.0,
    )


def test_drop_within_the_interval_is_not_a_regression() -> None:
    """Five prompts gain what five lose, and one round more: -3%, with 0 inside."""
    before, after = report(CODE, CHAT), report(CODE, CHAT)
    for place, request in enumerate(after.settings[0].drafters["head"].per_request):
        shift = 1 if place % 2 else -1
        request.rounds = [(5, 0, max(1, count + shift)) for count in request.emitted]
    (setting,) = compared([before, after], ["head", "head"], ["a", "b"], 0.0)
    assert not any(row.regressed for row in setting.rows)
    assert all(row.change_ci95[0] < 0 < row.change_ci95[1] for row in setting.rows)


def test_the_rows_that_the_exit_code_rests_on_share_the_error() -> None:
    """A category that falls by a clear 95% interval is no regression where three rows could be
    one."""
    before, after = report(CODE, CHAT), report(CODE, CHAT)
    requests = after.settings[0].drafters["head"].per_request
    for request in requests[10:14]:  # four of ten fall from 5 tokens in three rounds to 4
        request.rounds = [(5, 0, 1), (5, 0, 1), (5, 1, 2)]
    (setting,) = compared([before, after], ["head", "head"], ["a", "b"], 0.0)
    rows = {row.category: row for row in setting.rows}
    assert setting.tests == 3 and setting.level == pytest.approx(1 - 0.05 / 3)
    assert rows["chat"].change_ci95[1] < 0 and not rows["chat"].regressed
    for found in (before, after):
        figures = found.settings[0].drafters["head"]
        figures.per_request = figures.per_request[10:]
    (alone,) = compared([before, after], ["head", "head"], ["a", "b"], 0.0)
    assert (alone.tests, alone.level) == (1, 0.95)
    assert [row.regressed for row in alone.rows] == [True]
    four = [*before.settings[0].drafters["head"].per_request[:4]]
    for found in (before, after):
        found.settings[0].drafters["head"].per_request = four
    (none,) = compared([before, after], ["head", "head"], ["a", "b"], 0.0)
    assert none.tests == 0 and not none.rows[0].regressed


def write(path: Path, value: dict[str, Any]) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def test_regression_beyond_the_given_limit_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (
        write(tmp_path / "a.json", written(CODE, CHAT)),
        write(tmp_path / "b.json", written(CODE, [1, 1, 2], "tuned")),
    )
    run(Options(reports=[a, b]))
    said = " ".join(capsys.readouterr().out.split())
    assert "REGRESSED: all, chat n: requests." in said, "flagged, but nobody asked to fail"
    assert "judged by intervals of 98.333%: 3 rows share an error of 5%" in said
    (setting,) = compared([read_report(a), read_report(b)], ["head", "tuned"], [a, b], 0.0)
    assert (setting.tests, setting.level) == (3, 1 - 0.05 / 3)
    run(Options(reports=[b], drafter=["tuned", "tuned"]))
    assert "compared: tuned" in capsys.readouterr().out, "two drafters of one report"
    with pytest.raises(SystemExit) as ended:
        run(Options(reports=[a, b], fail_on_regression="2%"))
    assert ended.value.code == 3
    assert "compared: head, then tuned" in capsys.readouterr().out
    run(Options(reports=[a, b], fail_on_regression="25%"))


def with_rows(code: list[int], *names: str) -> dict[str, Any]:
    """A report of which each drafter accepted as much as `code` says."""
    value = written(code, CHAT, names[0])
    drafters = value["settings"][0]["drafters"]
    return value | {"settings": [value["settings"][0] | {"drafters": drafters | {
        name: drafters[names[0]] for name in names
    }}]}  # fmt: skip


def test_the_table_fits_into_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    a = write(tmp_path / "a.json", written(CODE, CHAT))
    b = write(tmp_path / "b.json", written([4, 5, 3], [1, 1, 2]))
    run(Options(reports=[a, b]))
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if "before  " in line)
    assert head.split() == ["category", "n", "before", "after", "change", "95%"]
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)


def test_a_drafter_and_its_row_as_in_an_engine_are_compared_by_that_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in docs/from-logs.md, where both reports are made with --like."""
    like = " as in vllm:drafts=3"
    a = write(tmp_path / "a.json", with_rows(CODE, "public", f"public{like}"))
    b = write(tmp_path / "b.json", with_rows(CODE, f"tuned{like}", "tuned"))
    run(Options(reports=[a, b], fail_on_regression="2%"))
    assert f"compared: public{like}, then tuned{like}" in capsys.readouterr().out
    for others in (["tuned", "tuned as in vllm:drafts=5"], ["tuned", "second"], ["tuned"]):
        c = write(tmp_path / "c.json", with_rows(CODE, *others))
        with pytest.raises(UserError, match="such as --drafter public --drafter tuned$"):
            run(Options(reports=[a, c]))


@pytest.mark.parametrize(
    ("other", "options", "why"),
    [
        (written(CODE, CHAT, sha="y"), {}, "of different prompts"),
        (
            {
                "server": {"url": "x", "engine": "vllm", "version": "1", "settings": []},
                "settings": [],
                "prompt_set": {"sha256": "y", "prompts": 20},
            },
            {},
            "figures of a server only",
        ),
        (written(CODE, CHAT, temperature=1.0), {}, "no temperature and batch size in common"),
        (
            written(CODE, CHAT),
            {"drafter": ["head", "nobody"]},
            "has no drafter 'nobody'; there are: plain, ngram, head",
        ),
        (written(CODE, CHAT), {"drafter": ["head"]}, "once for each of the 2"),
        (written(CODE, CHAT), {"fail_on_regression": "much"}, "a share such as 2%"),
        ({}, {}, "not a report"),
        (written(CODE, CHAT, name="ngram"), {}, "0 drafters besides the baselines"),
    ],
)
def test_incomparable_reports_are_refused_with_the_reason(
    tmp_path: Path, other: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    paths = [write(tmp_path / "a.json", written(CODE, CHAT)), write(tmp_path / "b.json", other)]
    with pytest.raises(UserError, match=why):
        run(Options(reports=paths, **options))
    with pytest.raises(UserError, match="at least two"):
        run(Options(reports=paths[:1]))
