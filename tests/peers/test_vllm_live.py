"""`evaluate --server` against a real vLLM on a CPU that speculates with n-grams, and with a draft
model. Not in the default run:

VLLM_PYTHON=/path/to/venv/bin/python python -m pytest -m peers tests/peers/test_vllm_live.py

Greedy only: where vLLM 0.32 speculates on a CPU it samples wrongly. At T = 0.01 its replies to six
prompts left the greedy ones within 7 tokens (without speculation five of the six stayed equal), and
it accepted next to nothing beyond the first draft.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import vllm
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.evaluation.evaluate import Options, run
from draftsmith.inference.evaluation.server_counters import Counters, read_counters
from tests.conftest import QUICKSTART

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM"
    ),
]
DRAFT_MODEL_FOLDER = QUICKSTART.parent / "draft_model"
LENGTH, REPLY, PROMPTS = 4, 40, 6
NGRAM = {
    "method": "ngram",
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "num_speculative_tokens": LENGTH,
}
DRAFT_MODEL = {
    "method": "draft_model",
    "model": str(DRAFT_MODEL_FOLDER),
    "num_speculative_tokens": LENGTH,
}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
Serving = tuple[str, subprocess.Popen[bytes]]


@contextmanager
def serving(speculation: dict[str, Any] | None) -> Iterator[Serving]:
    """Address and process of a vLLM in fp32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
    ]
    options += [
        "--no-enable-prefix-caching",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--model",
        str(QUICKSTART),
    ]
    options += ["--speculative-config", json.dumps(speculation)] if speculation else []
    environment = {**os.environ, **CPU, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", *options]
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < until
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield url, process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def ngram() -> Iterator[Serving]:
    with serving(NGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def draft_model() -> Iterator[Serving]:
    with serving(DRAFT_MODEL) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Signatures, as the target was trained on."""
    names = ("add", "read_lines", "is_empty", "get", "close", "parse_args")
    rows = [
        f'def {name}(self, value=None):\n    """Return the {name} of value."""' for name in names
    ]
    path = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"id": str(i), "messages": [{"role": "user", "content": row}]}) + "\n"
        for i, row in enumerate(rows)
    ]
    path.write_text("".join(lines))
    return path


def evaluate(url: str, prompts: Path, drafter: str, **more: Any) -> dict[str, Any]:
    out = prompts.with_name("out.json")
    given: dict[str, Any] = {
        "concurrency": [1, 8],
        "repeats": 1,
        "max_new_tokens": REPLY,
        "baselines": False,
        **more,
    }
    config = TargetConfig(str(QUICKSTART), dtype="float32", device="cpu")
    run(
        Options(
            config,
            str(prompts),
            server=url,
            drafter=[drafter] if drafter else [],
            json=str(out),
            **given,
        )
    )
    return json.loads(out.read_text())


def check_sums(s: dict[str, Any]) -> None:
    """What the counters and our chunks say of each other."""
    assert s["warnings"] == []
    assert (
        s["tau_incl_bonus"]
        == pytest.approx(1 + sum(s["survival"]))
        == pytest.approx(1 + s["accepted"] / s["drafts"])
    )
    assert s["drafts"] <= s["rounds"] and s["drafts"] <= s["drafted"] <= LENGTH * s["drafts"]
    # A prefill's token, what was accepted and one more a step: all our tokens, and what lay behind
    # the replies' ends.
    assert 0 <= s["requests"] + s["accepted"] + s["rounds"] - s["tokens"] <= LENGTH * s["requests"]
    assert s["chunks"] - s["requests"] <= s["rounds"], "a step is a chunk, unless we read late"


def test_a_draft_model_drafts_there_what_it_drafts_here(
    draft_model: Serving, prompts: Path
) -> None:
    """Greedy, fp32: the same replies; as many rounds, drafts and accepted drafts, at one request
    and at eight."""
    report = evaluate(draft_model[0], prompts, f"{DRAFT_MODEL_FOLDER}:length={LENGTH}")
    (local,) = report["settings"]
    (ours,) = (s for name, s in local["drafters"].items() if name != "plain")
    rounds = [r for request in ours["per_request"] for r in request["rounds"]]
    for s in report["server"]["settings"]:
        check_sums(s)
        assert s["equal_to_plain"] == s["compared"] == s["requests"] and s["largest_gap"] is None
        passes = s["requests"] // PROMPTS
        assert s["tokens"] == passes * sum(request["n_out"] for request in ours["per_request"])
        assert s["drafts"] == s["rounds"] == passes * len(rounds)
        assert s["drafted"] == passes * sum(drafted for drafted, _, _ in rounds)
        assert s["accepted"] == passes * sum(accepted for _, accepted, _ in rounds)
        assert s["tau_incl_bonus"] == pytest.approx(ours["tau_untruncated"])
        assert s["tau_emitted"] == pytest.approx(ours["tau_incl_bonus"])
        assert s["survival"] == pytest.approx(ours["survival"])


def test_ngram_speculation_gives_plain_text_and_consistent_sums(
    ngram: Serving, prompts: Path
) -> None:
    """Greedy replies are ours; vLLM's tau leaves out the steps that found no n-gram, and the tokens
    a step do not."""
    report = evaluate(ngram[0], prompts, "ngram")
    assert (report["server"]["engine"], report["server"]["context"]) == ("vllm", 512)
    for s in report["server"]["settings"]:
        check_sums(s)
        assert s["equal_to_plain"] == s["compared"] == s["requests"] and s["largest_gap"] is None
        assert s["drafts"] < s["rounds"] and s["tau_emitted"] < s["tau_incl_bonus"]


def counters_at(url: str) -> Counters:
    return read_counters(httpx.get(f"{url}/metrics").text, vllm.COUNTERS)


def test_tau_equals_count_from_streamed_chunks(ngram: Serving, prompts: Path) -> None:
    """By hand, one request after the other: accepted drafts are what chunks hold beyond one token,
    and what an end cut off."""
    url = ngram[0]
    before = counters_at(url)
    sizes: list[list[int]] = []
    for prompt in read_prompts(prompts, AutoTokenizer.from_pretrained(QUICKSTART), "x"):
        body = {
            "model": str(QUICKSTART),
            "prompt": prompt.token_ids,
            "max_tokens": REPLY,
            "temperature": 0,
            "stream": True,
        }
        sizes.append([])
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and (
                    ids := json.loads(line[6:])["choices"][0]["token_ids"]
                ):
                    sizes[-1].append(len(ids))
    time.sleep(0.5)
    found = counters_at(url).since(before)
    assert (
        found.generated == sum(map(sum, sizes))
        and found.drafts
        and all(reply[0] == 1 for reply in sizes)
    )
    emitted = sum(size - 1 for reply in sizes for size in reply)
    assert 0 <= found.accepted - emitted <= LENGTH * len(sizes)
    whole = sum(size - 1 for reply in sizes for size in reply[:-1])
    assert (
        whole <= found.accepted <= whole + LENGTH * len(sizes)
        and sum(found.by_position) == found.accepted
    )


def test_concurrent_foreign_requests_cause_a_warning(ngram: Serving, prompts: Path) -> None:
    stop = threading.Event()

    def others() -> None:
        body = {
            "model": str(QUICKSTART),
            "prompt": [5, 6, 7],
            "max_tokens": 20,
            "temperature": 1,
            "ignore_eos": True,
        }
        while not stop.is_set():
            httpx.post(f"{ngram[0]}/v1/completions", json=body, timeout=60)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        (s,) = evaluate(ngram[0], prompts, "", concurrency="2")["server"]["settings"]
    finally:
        stop.set()
        thread.join()
    assert len(s["warnings"]) == 1 and "other" in s["warnings"][0] and s["tau_emitted"] is None


def test_prompt_longer_than_server_context_is_refused(ngram: Serving, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "prompt": "value " * 600}) + "\n")
    with pytest.raises(UserError, match="prompt long has [0-9]+ tokens, the server's context 512"):
        evaluate(ngram[0], path, "")


def test_killed_server_is_one_line_and_no_report(ngram: Serving, prompts: Path) -> None:
    """The last test of this server."""
    threading.Timer(1.5, ngram[1].kill).start()
    with pytest.raises(UserError, match="(failed while it wrote|does not answer)") as caught:
        evaluate(ngram[0], prompts, "", concurrency="4", repeats=500)
    assert "\n" not in str(caught.value) and not prompts.with_name("out.json").exists()


def test_server_without_speculation_reports_tau_one(prompts: Path) -> None:
    with serving(None) as (url, _):
        report = evaluate(url, prompts, "ngram", concurrency="8")
        (s,) = report["server"]["settings"]
        assert (
            s["tau_incl_bonus"] == 1
            and s["speculates"] is False
            and s["drafts"] is None
            and not s["warnings"]
        )
        assert s["equal_to_plain"] == s["requests"] == 18
