"""Benchmarks by name, read from a stand-in for the network."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from msgspec.structs import replace

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import RowSource, TargetConfig
from draftsmith.inference.conversations.prompts import words_or_rows
from draftsmith.inference.conversations.sources import BENCHMARKS, RAW, benchmark_of
from draftsmith.inference.evaluation.evaluate import check, facts_of, prompts_of
from draftsmith.inference.evaluation.options import EvaluateOptions
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART


def turns_of(count: int) -> list[list[str]]:
    return [[f"def f{n}():", f"def g{n}():"][: 1 + n % 2] for n in range(count)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The four benchmarks with a few rows each, at the address of a stand-in."""
    kinds = ["writing"] * 4 + ["math"] * 2
    turns = [
        {"question_id": n, "category": kind, "turns": one}
        for n, (one, kind) in enumerate(zip(turns_of(6), kinds, strict=True))
    ]
    rows = {
        "question.jsonl": turns,
        "test.jsonl": [{"question": "def f():", "answer": "#### 1\u2028"}] * 2,
        "HumanEval.jsonl.gz": [{"task_id": "HumanEval/0", "prompt": "def f():\n"}],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[name])
            body = gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name, benchmark in list(BENCHMARKS.items()):
        there = replace(benchmark, path=benchmark.path.replace(RAW, url))
        monkeypatch.setitem(BENCHMARKS, name, there)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    yield url
    server.shutdown()


def test_each_benchmark_is_read_by_its_name(served: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        mt, sums, code, spec = ([*benchmark.rows()] for benchmark in BENCHMARKS.values())
    assert (
        mt
        == spec
        == [
            {"turns": one, "category": "math" if n > 3 else "writing"}
            for n, one in enumerate(turns_of(6))
        ]
    )
    assert sums == ["def f():"] * 2 and code == ["def f():\n"]
    assert "test.jsonl (licence mit)" in caplog.text


def test_prompts_have_all_turns_and_the_report_says_where_they_are_from(
    served: str, quickstart: Target
) -> None:
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
    assert facts["path"].startswith(served) and facts["license"] == "apache-2.0"
    assert [len(row["turns"]) for _, row in words_or_rows("spec-bench")] == [1, 2] * 3


def test_without_the_network_the_file_to_download_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    for benchmark in BENCHMARKS.values():
        with pytest.raises(UserError) as refusal:
            list(benchmark.rows())
        said = str(refusal.value)
        assert said.startswith(f"benchmark {benchmark.name} cannot be read: HF_HUB_OFFLINE is set")
        assert said.endswith(f"download {benchmark.path} and give its path")
    nowhere = replace(BENCHMARKS["gsm8k"], path="http://127.0.0.1:9/test.jsonl")
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    with pytest.raises(UserError, match="check HF_HUB_OFFLINE and the network, or download"):
        list(nowhere.rows())


def test_a_name_that_is_a_path_too_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").write_text("{}")
    with pytest.raises(UserError, match=r"a path here; write \./gsm8k for the path"):
        benchmark_of("gsm8k")
    assert benchmark_of("./gsm8k") is None and benchmark_of("prompts.jsonl") is None
    with pytest.raises(UserError, match=r"humaneval is a benchmark, which has no split"):
        benchmark_of(RowSource("humaneval", "train2"))
    assert benchmark_of("humaneval") == BENCHMARKS["humaneval"]
