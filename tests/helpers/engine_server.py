"""A server that answers as vLLM, SGLang or llama.cpp does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.evaluation.evaluate import Options, run

# The worked example of docs/metrics.md#servers-counters: chains of 3 of which 0, 2 and 3 are
# accepted, behind the prefill's token and before a step without a draft: 1 + (1 + 3 + 4) + 1
# tokens. (tokens of the chunk, tokens drafted)
STEPS = [(1, 0), (1, 3), (3, 3), (4, 3), (1, 0)]

TOKENS = 10


@dataclass
class Plan:
    """How a server behaves."""

    engine: str = "vllm"
    speculates: bool = True
    foreign: int = 0
    """Tokens (and drafts) that somebody else gets while one of our requests runs."""
    running: int = 0
    """Requests of others under way all the time."""
    dies_after: int | None = None
    """Requests that it answers whole before it breaks off within one."""
    most: int | None = None
    """Requests that it takes at once."""
    refuses: int | None = None
    """Status of every answer to a request."""
    models: tuple[str, ...] = ("m",)
    context: int = 200
    pause: float = 0.0
    """Seconds before each chunk."""
    gone: tuple[str, ...] = ()
    """Paths that are not there."""
    metrics: str | None = None
    """What /metrics says, in place of the counts."""
    probe: list[int] | None = None
    """What /tokenize says."""
    incremental: bool = False
    """SGLang: chunks hold their own ids instead of all so far."""
    replies: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Replies to prompts, a token a chunk; others get `STEPS`."""
    together: threading.Barrier | None = None
    """Requests wait here for each other."""
    key: str | None = None
    """API key that every request has to carry."""

    lock: Any = field(default_factory=threading.Lock)
    asked: list[dict[str, Any]] = field(default_factory=list)
    flying: int = 0
    peak: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drafts", "drafted", "accepted", "generated"), 0)
    )
    positions: list[int] = field(default_factory=lambda: [0, 0, 0])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plan: Plan

    def log_message(self, *arguments: Any) -> None: ...

    def answer(self, value: Any, status: int = 200) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def keyless(self) -> bool:
        """Return True if the request was refused since it lacks the key."""
        given = self.headers.get("authorization")
        if refused := self.plan.key is not None and given != f"Bearer {self.plan.key}":
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.answer({"error": "Unauthorized"}, 401)
        return refused

    def do_GET(self) -> None:
        plan, path = self.plan, self.path
        if self.keyless():
            return
        if path in plan.gone:
            return self.answer({"detail": "Not Found"}, 404)
        if path == "/v1/models":
            return self.answer(
                {"data": [{"id": name, "max_model_len": plan.context} for name in plan.models]}
            )
        if path == "/metrics" and plan.engine == "vllm":
            return self.answer(plan.metrics if plan.metrics is not None else self.prometheus())
        if path == "/version" and plan.engine == "vllm":
            return self.answer({"version": "0.32.0"})
        if path == "/get_server_info" and plan.engine == "sglang":
            algorithm = "EAGLE3" if plan.speculates else None
            return self.answer(
                {"version": "0.5.9", "speculative_algorithm": algorithm, "internal_states": [{}]}
            )
        self.answer({"detail": "Not Found"}, 404)

    def prometheus(self) -> str:
        plan, label = self.plan, 'engine="0",model_name="m"'
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
        lines += [f"vllm:generation_tokens_total{{{label}}} {float(plan.counts['generated'])}"]
        lines += [
            f"vllm:num_requests_running{{{label}}} {float(plan.running)}",
            "python_gc_objects_collected_total 3.0",
        ]
        if plan.speculates:
            names = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
            lines += [
                f"vllm:spec_decode_num_{name}_total{{{label}}} {float(plan.counts[ours])}"
                for name, ours in names.items()
            ]
            lines += [f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7952964877464201e+09"]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [
                f'{name}{{{label},position="{i}"}} {float(n)}' for i, n in enumerate(plan.positions)
            ]
        return "\n".join(lines) + "\n"

    def do_POST(self) -> None:
        plan = self.plan
        if self.keyless():
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize" and plan.probe is not None:
            return self.answer({"tokens": plan.probe})
        if self.path != ("/v1/completions" if plan.engine == "vllm" else "/generate"):
            return self.answer({"detail": "Not Found"}, 404)
        with plan.lock:
            plan.asked.append(body)
            plan.flying += 1
            plan.peak = max(plan.peak, plan.flying)
            number, crowded = len(plan.asked), plan.most is not None and plan.flying > plan.most
        try:
            if crowded:
                time.sleep(0.05)
                return self.answer({"error": {"message": "too many requests", "code": 503}}, 503)
            if plan.refuses is not None:
                return self.answer(
                    {"error": {"message": "max_tokens is\ntoo large", "code": plan.refuses}},
                    plan.refuses,
                )
            if plan.together is not None and number > 1:  # the first is the warm-up
                plan.together.wait(10)
            self.reply(body, plan.dies_after is not None and number > plan.dies_after)
        finally:
            with plan.lock:
                plan.flying -= 1
        # behind the count: the client's next request may come before this one's end
        if not self.close_connection:
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

    def reply(self, body: dict[str, Any], dies: bool) -> None:
        plan = self.plan
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        prompt = body["prompt" if plan.engine == "vllm" else "input_ids"]
        own = plan.replies.get(tuple(prompt))
        steps, ids = (
            (STEPS, list(range(5, 5 + TOKENS))) if own is None else ([(1, 0)] * len(own), own)
        )
        steps = steps if plan.speculates else [(1, 0)] * len(ids)
        at = 0
        for place, (tokens, _) in enumerate(steps):
            time.sleep(plan.pause)
            if dies and place == 2:
                self.close_connection = True
                return self.connection.close()
            at += tokens
            last = place == len(steps) - 1
            # an engine counts before it sends, but a little later for who reads the counters
            if last:
                self.count(steps, len(ids))
            self.event(
                (self.vllm if plan.engine == "vllm" else self.sglang)(ids[:at], tokens, steps, last)
            )
        # an event of usage alone; some versions have no choices in it, others null
        if plan.engine == "vllm":
            self.event({"choices": None, "usage": {"completion_tokens": at}})

    def count(self, steps: list[tuple[int, int]], tokens: int) -> None:
        plan = self.plan
        with plan.lock:
            accepted = [tokens - 1 for tokens, drafted in steps if drafted]
            for name, value in {
                "drafts": len(accepted), "drafted": 3 * len(accepted), "accepted": sum(accepted),
                "generated": tokens
            }.items():  # fmt: skip
                plan.counts[name] += value + plan.foreign
            plan.positions = [
                n + sum(a > i for a in accepted) for i, n in enumerate(plan.positions)
            ]

    def event(self, value: Any) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def vllm(self, ids: list[int], tokens: int, steps: Any, last: bool) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "x",
            "token_ids": ids[-tokens:],
            "finish_reason": "length" if last else None,
        }
        return {"choices": [choice]}

    def sglang(self, ids: list[int], tokens: int, steps: Any, last: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "completion_tokens": len(ids),
            "finish_reason": {"type": "length"} if last else None,
        }
        accepted = [tokens - 1 for tokens, _ in steps[1:]]  # it verifies at every step
        if self.plan.speculates and last:
            histogram = [accepted.count(i) for i in range(4)]
            meta |= {
                "spec_verify_ct": len(accepted),
                "spec_accept_token_num": sum(accepted),
                "spec_accept_histogram": histogram,
            }
            meta |= {
                "spec_draft_token_num": 3 * len(accepted),
                "spec_accept_length": len(ids) / len(accepted),
            }
        return {
            "text": "x",
            "output_ids": ids[-tokens:] if self.plan.incremental else ids,
            "meta_info": meta,
        }


class Many(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


Serve = Callable[..., tuple[str, Plan]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with a plan; its address and the plan."""
    started: list[ThreadingHTTPServer] = []

    def start(handler: type[Handler] = Handler, **settings: Any) -> tuple[str, Plan]:
        plan = Plan(**settings)
        server = Many(("127.0.0.1", 0), type("Planned", (handler,), {"plan": plan}))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}", plan

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "prompt": "hello there " * (i + 1)}) + "\n" for i in range(4)
        )
    )
    return path


def evaluate(url: str, target: Path, prompts: Path, **more: Any) -> dict[str, Any]:
    """The report that is written."""
    out = prompts.with_name("out.json")
    more = {"concurrency": [1], "repeats": 1, "max_new_tokens": 32, **more}
    run(
        Options(
            TargetConfig(str(target), device="cpu"), str(prompts), server=url, json=str(out), **more
        )
    )
    return json.loads(out.read_text())
