"""Benchmarks by name, read from a stand-in for the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from msgspec.structs import replace

from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.benchmarks import BENCHMARKS, benchmark_of
from draftsmith.inference.conversations.lines import words_or_conversations
from draftsmith.inference.evaluation.checks import check, prompts_of
from draftsmith.inference.evaluation.evaluate import facts_of
from draftsmith.inference.evaluation.options import EvaluateOptions
from draftsmith.inference.settings import RowSource, TargetConfig
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, ROOT
from tests.hub import DataHub
from tests.inference.conversations.test_sources import environment_of

SPEC = "/datasets/hemingkx/Spec-Bench/resolve/main/question.jsonl"


def parquet(folder: Path, rows: list[dict[str, Any]]) -> bytes:
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "rows.parquet"))
    return (folder / "rows.parquet").read_bytes()


def card(config: str, split: str) -> bytes:
    files = f"data_files: [{{split: {split}, path: '{config}/*'}}]"
    return f"---\nconfigs:\n- {{config_name: {config}, {files}}}\n---\n".encode()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataHub]:
    """The four benchmarks in the form of their repositories, with a few rows each."""
    folder = tmp_path_factory.mktemp("benchmarks")
    turns = [[f"def f{n}():", f"def g{n}():"] for n in range(6)]
    kinds = ["writing"] * 4 + ["math"] * 2
    mt = [
        {"prompt": one, "prompt_id": n, "category": kind, "reference": []}
        for n, (one, kind) in enumerate(zip(turns, kinds, strict=True))
    ]
    spec = [
        {"question_id": n, "category": kind, "turns": one[: 1 + n % 2]}
        for n, (one, kind) in enumerate(zip(turns, kinds, strict=True))
    ]
    socratic = b"- {config_name: socratic, data_files: [{split: test, path: 'x/*'}]}\n---\n"
    sums = parquet(folder, [{"question": "def f():", "answer": "#### 1"}] * 2)
    code = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "  return 1"}
    repositories: dict[str, dict[str, bytes]] = {
        "HuggingFaceH4/mt_bench_prompts": {"data/train-0.parquet": parquet(folder, mt)},
        "openai/gsm8k": {
            "README.md": card("main", "test")[:-4] + socratic,
            "main/test-0.parquet": sums,
            "x/test-0.parquet": sums,
        },
        "openai/openai_humaneval": {
            "README.md": card("openai_humaneval", "test"),
            "openai_humaneval/test-0.parquet": parquet(folder, [code]),
        },
        "hemingkx/Spec-Bench": {
            "question.jsonl": "".join(json.dumps(row) + "\n" for row in spec).encode()
        },
    }
    server = DataHub({name: {"main": files} for name, files in repositories.items()})
    yield server
    server.server.shutdown()


SCRIPT = """
import json, logging, sys
from draftsmith.inference.conversations.benchmarks import BENCHMARKS
logging.basicConfig(level=logging.INFO)
for name in ("mt-bench", "gsm8k", "humaneval"):
    print(json.dumps([*BENCHMARKS[name].rows()]))
assert "torch" not in sys.modules
"""


def test_each_benchmark_is_read_by_its_name(hub: DataHub, tmp_path: Path) -> None:
    environment = environment_of(hub.url, tmp_path) | {"HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    mt, sums, code = map(json.loads, done.stdout.splitlines())
    assert mt == [
        {"turns": [f"def f{n}():", f"def g{n}():"], "category": "math" if n > 3 else "writing"}
        for n in range(6)
    ]
    assert sums == ["def f():"] * 2 and code == ["def f():\n"]
    assert "gsm8k: openai/gsm8k, configuration main, split test (licence mit)" in done.stderr


def test_prompts_have_all_turns_and_the_report_says_where_they_are_from(
    hub: DataHub, quickstart: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(BENCHMARKS["spec-bench"], path=hub.url + SPEC)
    monkeypatch.setitem(BENCHMARKS, "spec-bench", spec)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    options = EvaluateOptions(TargetConfig(str(QUICKSTART)), "spec-bench")
    check(options)
    prompts = prompts_of(options, quickstart.tokenizer)
    assert [len(prompt.later) for prompt in prompts] == [0, 1] * 3
    assert quickstart.tokenizer.decode(prompts[5].token_ids).count("def f5():") == 1
    options.limit = 2
    drawn = prompts_of(options, quickstart.tokenizer)
    assert Counter(prompt.category for prompt in drawn) == {"writing": 1, "math": 1}
    noted = facts_of(None, quickstart.tokenizer, drawn, options, "").to_json()
    facts = noted["prompt_set"]["benchmark"]
    assert facts["path"] == hub.url + SPEC and facts["license"] == "apache-2.0"
    found = words_or_conversations("spec-bench", [])
    assert [len(one.later) for _, one in found if not isinstance(one, str)] == [0, 1] * 3


def test_without_the_hub_the_file_to_download_is_named(tmp_path: Path) -> None:
    """Offline, and where the package datasets is not installed."""
    code = """
import sys
from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.benchmarks import BENCHMARKS
assert "datasets" not in sys.modules
for absent in (False, True):
    if absent:
        sys.modules["datasets"] = None
    for benchmark in BENCHMARKS.values():
        try:
            list(benchmark.rows())
        except UserError as error:
            print(error)
"""
    environment = environment_of("http://127.0.0.1:9", tmp_path) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(BENCHMARKS)
    for line, benchmark in zip(said, [*BENCHMARKS.values()] * 2, strict=True):
        assert line.startswith(f"benchmark {benchmark.name} cannot be read: ")
        assert line.endswith(f"download {benchmark.file} and give its path")
    *on_hub, spec = said[: len(BENCHMARKS)]
    assert all("hub cannot be reached" in line for line in on_hub) and "HF_HUB_OFFLINE is" in spec
    # A file of a project is read without it, and is offline here.
    assert all("cannot be imported" in line for line in said[len(BENCHMARKS) : -1])


def test_a_name_that_is_a_path_too_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").write_text("{}")
    with pytest.raises(UserError, match=r"a path here; write \./gsm8k for the path"):
        benchmark_of("gsm8k")
    assert benchmark_of("./gsm8k") is None and benchmark_of("prompts.jsonl") is None
    with pytest.raises(UserError, match="no prompts 'MT_Bench'; did you mean mt-bench"):
        benchmark_of("MT_Bench")
    with pytest.raises(UserError, match=r"humaneval is a benchmark, which has no split"):
        benchmark_of(RowSource("humaneval", "train2"))
    found = benchmark_of(RowSource("humaneval", revision="v1"))
    assert found is not None and found.revision == "v1"
