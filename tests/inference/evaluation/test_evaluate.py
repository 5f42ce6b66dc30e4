"""The report of `draftsmith evaluate`: sums recounted from its own records, settings, turns,
baselines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from draftsmith.command_line.parse import options_from
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.console import ProgressReporter
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import next_turn, read_prompts
from draftsmith.inference.evaluation import evaluate
from draftsmith.inference.evaluation.evaluate import Options, check
from draftsmith.inference.metrics import quantiles
from draftsmith.inference.targets.packed import processor
from draftsmith.inference.targets.target import load_target
from tests.conftest import QUICKSTART
from tests.helpers.command_line import run_cli

DRAFTERS = QUICKSTART.parent / "drafters"


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two turns each, two categories, T = 0 and 1, batches of 1 and 2."""
    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.jsonl"
    rows = [
        {
            "question_id": i,
            "category": "ab"[i % 2],
            "turns": [f"def add{i}(a, b):", "def sub(a, b):"][: 1 + (i < 2)],
        }
        for i in range(3)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = [
        "--target",
        QUICKSTART,
        "--prompts",
        prompts,
        "--drafter",
        DRAFTERS / "eagle3",
        "--max-new-tokens",
        10,
    ]
    sweep = ["--temperature", "0,1", "--batch-size", "1,2", "--repeats", "2"]
    done = run_cli(
        "evaluate",
        *map(str, shared),
        *sweep,
        "--json",
        str(folder / "o.json"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n drafter ") == 1, "one table"
    labels = re.findall(r"^ [ *] eagle3 +[\d.]+x +(\d) +(\d) ", done.stdout, flags=re.MULTILINE)
    assert labels == [(t, size) for t in "01" for size in "12"]
    titles = re.findall(r"Tau by category, (T = .+?) *$", done.stdout, flags=re.MULTILINE)
    assert titles == ["T = 0, batch 1, 2", "T = 1, batch 1, 2"]
    return json.loads((folder / "o.json").read_text()), folder


def test_one_bar_counts_the_prompts_of_all_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[ProgressReporter] = []
    said: list[str] = []

    class Bar(ProgressReporter):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            bars.append(self)

        def now(self, detail: str) -> None:
            super().now(detail)
            said.append(self.line(self._began + 10))

    monkeypatch.setattr(evaluate, "ProgressReporter", Bar)
    (tmp_path / "p.jsonl").write_text('{"prompt": "def add(a, b):"}\n' * 2)
    evaluate.run(
        Options(
            target=TargetConfig(str(QUICKSTART), device="cpu"), prompts=str(tmp_path / "p.jsonl"),
            temperature=[0, 1], batch_size=[1, 2], max_new_tokens=4, repeats=1, baselines=False,
        )
    )  # fmt: skip
    assert [bar._done for bar in bars] == [8], "two prompts in four settings"
    assert said[0] == "evaluating: 0 of 8 prompts after 10 s (1/4: T = 0, batch 1)"
    assert said[3].endswith("6 of 8 prompts after 10 s, about 3 s left (4/4: T = 1, batch 2)")


def test_every_setting_and_every_drafter_is_there(report: tuple[dict[str, Any], Path]) -> None:
    found, _ = report
    assert [(s["temperature"], s["batch"]) for s in found["settings"]] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
    ]
    for setting in found["settings"]:
        assert list(setting["drafters"]) == ["plain", "ngram", "eagle3"]
        assert all(s["equal_to_ar"] == s["requests"] == 5 for s in setting["drafters"].values()), (
            "three questions, two of two turns"
        )
    sizes = found["drafter_bytes"]
    assert sizes["plain"] == sizes["ngram"] == 0 < sizes["eagle3"]
    assert found["prompt_set"]["categories"] == {"a": 2, "b": 1} and found["command"].startswith(
        "draftsmith evaluate"
    )


def test_report_figures_equal_sums_over_recorded_rounds(
    report: tuple[dict[str, Any], Path],
) -> None:
    for setting in report[0]["settings"]:
        for s in setting["drafters"].values():
            rounds = [r for request in s["per_request"] for r in request["rounds"]]
            assert s["rounds"] == len(rounds)
            assert s["tau_incl_bonus"] == pytest.approx(
                sum(emitted for _, _, emitted in rounds) / len(rounds)
            )
            assert s["tau_untruncated"] == pytest.approx(1 + sum(s["survival"]))
            product, total = 1.0, 1.0
            for c in s["cond_accept"]:
                product *= c
                total += product
            assert (
                s["tau_untruncated"]
                == pytest.approx(total)
                == pytest.approx(1 + sum(a for _, a, _ in rounds) / len(rounds))
            )
            taus = {
                name: row["tau_incl_bonus"] * row["requests"]
                for name, row in s["by_category"].items()
            }
            assert taus.keys() == {"a", "b"}
            assert sum(row["requests"] for row in s["by_category"].values()) == s["requests"]


def test_the_time_split_sums_to_the_wall_time(report: tuple[dict[str, Any], Path]) -> None:
    """Medians over drafters and temperatures: one pause of the process between two rounds adds to
    one wall time."""
    for batch in (1, 2):
        summaries = [
            s for x in report[0]["settings"] if x["batch"] == batch for s in x["drafters"].values()
        ]
        shares = [sum(s["split_s"].values()) / s["decode_s"] for s in summaries]
        assert max(shares) <= 1 + 1e-9, "time is counted twice"
        assert median(shares) == pytest.approx(1, rel=0.03), batch
        explained = [s["tau_incl_bonus"] / s["round_cost"] / s["speedup"] for s in summaries]
        assert median(explained) == pytest.approx(1, rel=0.05), batch


def test_a_later_turn_follows_the_reply(tmp_path: Path) -> None:
    target = load_target(TargetConfig(str(QUICKSTART), device="cpu"))
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["def a():", "def b():", "def c():"]}) + "\n")
    (first,) = read_prompts(path, target.tokenizer, target.name)
    reply = target.tokenizer("return 1")["input_ids"]
    about = target.tokenizer, target.name, target.eos_ids
    second = next_turn(first, [*reply, *target.eos_ids][: len(reply) + 1], *about, 500)
    assert second is not None and second.later == ["def c():"]
    said = target.tokenizer.decode(second.token_ids)
    assert said.index("def a():") < said.index("return 1") < said.index("def b():")
    assert next_turn(first, reply, *about, 8) is None, "no room"
    third = next_turn(second, reply, *about, 500)
    assert third is not None and next_turn(third, reply, *about, 500) is None


def test_quantiles_use_the_nearest_rank() -> None:
    assert quantiles([3.0, 1.0, None, 2.0, 4.0]) == {"p50": 2.0, "p95": 4.0, "p99": 4.0}
    assert quantiles([float(i) for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert quantiles([None]) is None


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A draft model, as in an engine, under a rule that keeps the distribution; six prompts."""
    folder = tmp_path_factory.mktemp("second")
    rows = [{"prompt": f"def add{i}(a, b):\n    # Add two numbers."} for i in range(6)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = [
        "--target",
        QUICKSTART,
        "--prompts",
        folder / "p.jsonl",
        "--max-new-tokens",
        14,
        "--repeats",
        1,
    ]
    ways = [
        "--drafter",
        QUICKSTART.parent / "draft_model",
        "--like",
        "vllm:drafts=2",
        "--like",
        "sglang",
        "--drafter",
        "ngram:longest=5,name=longer",
    ]
    sweep = ["--temperature", "0,1", "--batch-size", "1,3", "--rule", "rejection"]
    done = run_cli("evaluate", *map(str, shared + ways), *sweep, "--json", str(folder / "o.json"))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "longer as in sglang is left out" in said
    return json.loads((folder / "o.json").read_text())


@pytest.mark.full
def test_rows_as_in_an_engine_use_its_draft_length(second: dict[str, Any]) -> None:
    for setting in second["settings"]:
        vllm, sglang = (
            setting["drafters"][f"draft_model as in {name}"] for name in ("vllm:drafts=2", "sglang")
        )
        assert vllm["setting"] == {"length": 2, "width": 1} and vllm["mean_n_draft"] == 2
        assert sglang["setting"] == {"length": 3, "width": 1} and sglang["mean_n_draft"] == 3
        assert vllm["equal_to_ar"] == 6, "greedy drafts write what plain sampling writes"


@pytest.mark.full
def test_text_is_compared_only_where_it_must_be_equal(second: dict[str, Any]) -> None:
    greedy, _, sampled, _ = second["settings"]
    assert (
        greedy["drafters"]["draft_model"]["equal_to_ar"] == 6
        and sampled["drafters"]["draft_model"]["equal_to_ar"] is None
    )
    assert sampled["drafters"]["longer"]["verify_mode"] == ["match"]


@pytest.mark.full
def test_report_records_drafter_origin_and_machine_conditions(second: dict[str, Any]) -> None:
    drafters = second["drafters"]
    assert list(drafters) == ["plain", "ngram", "draft_model", "longer"]
    assert (
        drafters["draft_model"]["spec"].endswith("draft_model")
        and len(drafters["draft_model"]["sha256"]) == 64
    )
    assert drafters["longer"] == {"spec": "ngram:longest=5,name=longer", "sha256": None}
    assert second["machine"]["device"] == "cpu"
    where = second["conditions"]
    assert where["processor"] == processor() and where["cores"] >= 1
    assert where["load_before"] >= 0 and where["load_after"] >= 0
    assert where["layout"] == ("packed" if where["packed_bytes"] else "as stored")


@pytest.mark.full
def test_intervals_of_too_few_batches_are_not_given(second: dict[str, Any]) -> None:
    one, three = second["settings"][:2]
    assert all(x == x for x in one["drafters"]["ngram"]["speedup_ci95"])
    assert all(x != x for x in three["drafters"]["ngram"]["speedup_ci95"]), "two batches"


def test_one_token_replies_pass_and_overlong_prompts_fail(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    shared = ["--target", str(QUICKSTART), "--drafter", "ngram", "--no-baselines", "--repeats", "1"]
    done = run_cli(
        "evaluate", *shared, "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "1"
    )
    assert done.returncode == 0 and "without a round" in done.stdout, done.stderr
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "long", "prompt": "word " * 2000}) + "\n")
    done = run_cli("evaluate", *shared, "--prompts", str(tmp_path / "p.jsonl"))
    assert (
        done.returncode == 2
        and "prompt long has" in done.stderr
        and "leaves no room" in done.stderr
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": [1, "x"]}, "--batch-size takes whole numbers with commas"),
        ({"batch_size": 0}, "at least 1"),
        ({"temperature": "hot"}, "--temperature takes numbers with commas"),
        ({"temperature": [0, 0.5], "top_k": 3}, "top_k means nothing at temperature 0"),
    ],
)
def test_invalid_evaluation_settings_are_refused_before_loading(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("{}")
    with pytest.raises(UserError, match=why):
        check(options_from(Options, {"target": "t", "prompts": prompts, **options}))
