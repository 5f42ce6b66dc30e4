"""Reports and logs as tests of `draftsmith report` need them, and what a page holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.heads.documents import convert
from draftsmith.inference.evaluation.report.command import gather, html
from draftsmith.inference.evaluation.results import Report

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
        "speedup_ci95": [speedup - 0.11, speedup + 0.11],
        "equal_to_ar": 5,
        "ttft_quantiles_s": {"p50": 0.0123, "p95": 0.02, "p99": 0.02},
        "tpot_quantiles_s": {"p50": 0.0045, "p95": 0.0067},
        "cond_accept": [0.9, 0.8, 0.5], "cond_offered": [0.9, 0.85, 0.75], "survival": [0.9, 0.72,
        0.36],
        "by_category": {
            "code": {"requests": 5, "tau_incl_bonus": tau + 1, "tau_ci95": [tau + 0.9, tau + 1.1]},
            "chat": {"requests": 5, "tau_incl_bonus": tau - 1, "tau_ci95": [tau - 1.1, tau - 0.9]},
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
    batches: tuple[int, ...] = (1,), temperatures: tuple[float, ...] = (0.0,)
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
                    "drafters": drafters,
                }
            )
    return {
        "schema_version": 3, "command": "draftsmith evaluate --target some/target",
        "started_at": "2026-01-02T03:04:05+00:00",
        "target": {"name": "some/target"}, "dtype": "float32", "device": "cpu", "threads": 2,
        "versions": {"torch": "9.9.9"},
        "options": {"max_new_tokens": 64, "repeats": 3},
        "left_out": {"small model": "no such layer"},
        "prompt_set": {"path": "held.jsonl", "sha256": "abc" * 20, "prompts": 6,
        "categories": {"code": 3, "chat": 3}},
        "drafter_bytes": {"plain": 0, "ngram": 0, "head": 3_940_000}, "settings": settings,
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


def write_inputs(tmp_path: Path) -> Path:
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


class Seen:
    """What a page shows, by its data: headings, tables, charts, and all of its texts."""

    def __init__(self, text: str) -> None:
        begin = text.index('<script id="data" type="application/json">')
        self.data = json.loads(text[text.index(">", begin) + 1 : text.index("</script>", begin)])
        self.blocks = [*_unfolded(self.data["blocks"])]
        self.headings = [b["text"] for b in self.of("heading") if b["level"] < 4]
        self.tables = self.of("table")
        self.rows = [row for t in self.tables for row in (t["columns"], *t["rows"])]
        self.charts = [chart for block in self.of("charts") for chart in block["charts"]]
        self.words = "\n".join(_texts(self.data))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [block for block in self.blocks if block["kind"] == kind]

    def chart(self, title: str) -> dict[str, Any]:
        (found,) = [chart for chart in self.charts if chart["title"] == title]
        return found


def _unfolded(blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        yield block
        yield from _unfolded(block.get("blocks", []))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _texts(inside)


def answered(report: dict[str, Any], emitted: list[int], name: str = "head") -> dict[str, Any]:
    """The report with one request for each number: two rounds that emitted so many tokens each.

    Requests are of the categories code and chat alternately.
    """
    for setting in report["settings"]:
        requests = []
        for place, tokens in enumerate(emitted):
            requests.append({
                "id": f"q{place}", "category": ("code", "chat")[place % 2], "turn": 0,
                "prompt": place, "unit": place, "rounds": [[4, tokens - 1, tokens]] * 2,
            })  # fmt: skip
        setting["drafters"][name]["per_request"] = requests
    return report
