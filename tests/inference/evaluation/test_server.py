"""A server measured over real sockets: its counters, its chunks, what goes wrong. The servers here
are written in this file.

They speak as vLLM 0.32 does (tests/peers/test_vllm_live.py holds the real one against the same
code) and as SGLang's sources say that it does; no SGLang was at hand to try.
"""

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
from transformers import AutoTokenizer

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import vllm
from draftsmith.inference.conversations.prompts import Prompt
from draftsmith.inference.evaluation.evaluate import Options, run
from draftsmith.inference.evaluation.results import read_measured
from draftsmith.inference.evaluation.server.client import PROTOCOLS
from draftsmith.inference.evaluation.server.counters import (
    Counters,
    ServerReply,
    of_replies,
    read_counters,
)
from draftsmith.inference.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from tests.inference.evaluation.test_simulate import run_cli
from tests.train.commands.test_regenerate import alone

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
    more = {"concurrency": "1", "repeats": 1, "max_new_tokens": 32, **more}
    run(
        Options(
            TargetConfig(str(target), device="cpu"), str(prompts), server=url, json=str(out), **more
        )
    )
    return json.loads(out.read_text())


def test_the_worked_example_over_the_wire(
    serve: Serve, saved_tiny: Path, prompts: Path, capsys: Any
) -> None:
    url, plan = serve()
    report = evaluate(f"{url}/v1/", saved_tiny, prompts)
    assert (
        report["settings"] == []
        and report["dtype"] is None
        and report["prompt_set"]["prompts"] == 4
    )
    server = report["server"]
    assert [server[name] for name in ("url", "engine", "version", "model")] == [
        url,
        "vllm",
        "0.32.0",
        "m",
    ]
    (s,) = server["settings"]
    assert (s["requests"], s["tokens"], s["chunks"], s["drafts"], s["drafted"], s["accepted"]) == (
        4,
        40,
        20,
        12,
        36,
        20,
    )
    assert s["tau_incl_bonus"] == pytest.approx(8 / 3), (
        "0, 2 and 3 of three drafts, and a bonus token each"
    )
    assert s["tau_emitted"] == pytest.approx(9 / 4), "the step without a draft is a step"
    assert s["survival"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert s["accept_rate"] == pytest.approx(5 / 9) and s["mean_n_draft"] == 3 and s["rounds"] == 16
    assert s["warnings"] == [] and s["speculates"] and plan.peak == 1
    tokenizer = AutoTokenizer.from_pretrained(saved_tiny)
    assert [body["prompt"] for body in plan.asked[1:]] == [
        tokenizer("hello there " * n)["input_ids"] for n in (1, 2, 3, 4)
    ]
    assert plan.asked[0]["max_tokens"] == 8 and plan.asked[1]["max_tokens"] == 32, (
        "the first is the warm-up, and not counted"
    )
    assert all(body["temperature"] == 0 and "seed" not in body for body in plan.asked)
    printed = capsys.readouterr().out
    assert "2.67" in printed and "2.25" in printed and ".67 .67 .33" in printed
    with pytest.raises(UserError, match="holds the figures of a server only"):
        read_measured(str(prompts.with_name("out.json")))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_so_many_requests_are_in_flight(
    serve: Serve, saved_tiny: Path, prompts: Path, engine: str
) -> None:
    """Every request waits until 16 are there: were there fewer in flight, none would be
    answered."""
    url, plan = serve(engine=engine, together=threading.Barrier(16))
    (s,) = evaluate(url, saved_tiny, prompts, concurrency="16", max_new_tokens=10)["server"][
        "settings"
    ]
    assert plan.peak == 16 and s["requests"] == 32, "two rounds of 16, from four prompts"


def test_every_concurrency_and_temperature_is_a_row(
    serve: Serve, saved_tiny: Path, prompts: Path
) -> None:
    url, plan = serve()
    settings = evaluate(url, saved_tiny, prompts, concurrency="1,4", temperatures="0,0.5")[
        "server"
    ]["settings"]
    assert [(s["temperature"], s["concurrency"]) for s in settings] == [
        (0, 1),
        (0, 4),
        (0.5, 1),
        (0.5, 4),
    ]
    assert {body["temperature"] for body in plan.asked} == {0, 0.5}
    assert all(s["tau_incl_bonus"] == pytest.approx(8 / 3) for s in settings), (
        "each has its own readings"
    )


def test_times_are_those_of_the_chunks(serve: Serve, saved_tiny: Path, prompts: Path) -> None:
    """A chunk every 40 ms: the first after 40, ten tokens in four gaps."""
    url, _ = serve(pause=0.04)
    (s,) = evaluate(url, saved_tiny, prompts, concurrency="2")["server"]["settings"]
    assert 0.04 <= s["ttft_quantiles_s"]["p50"] < 0.4
    assert 4 * 0.038 / 9 <= s["tpot_quantiles_s"]["p50"] < 0.15
    assert (
        s["tokens_s"] == pytest.approx(s["tokens"] / s["seconds"]) and 0.39 <= s["seconds"] < 3
    ), "two times two replies"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"foreign": 2},
            "its counters hold 48 tokens, draftsmith's requests got 40: tau is of other requests "
            "too",
        ),
        pytest.param(
            {"running": 3},
            "3 requests of others were under way before the measurement",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_others_do_is_said(
    serve: Serve, saved_tiny: Path, prompts: Path, settings: dict[str, int], why: str, capsys: Any
) -> None:
    url, _ = serve(**settings)
    (s,) = evaluate(url, saved_tiny, prompts)["server"]["settings"]
    (warning,) = s["warnings"]
    assert why in warning and why in " ".join(capsys.readouterr().out.split())
    assert s["tau_emitted"] is None, "steps of others are no steps of ours"


def test_a_server_with_an_api_key(
    serve: Serve, saved_tiny: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = serve(key="secret")
    for key, why in (
        (None, "another API key, or one at all; set DRAFTSMITH_SERVER_KEY"),
        ("wrong", "another API key"),
        ("a\nb", "characters that cannot be sent"),
    ):
        if key is not None:
            monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", key)
        with pytest.raises(UserError, match=why):
            evaluate(url, saved_tiny, prompts, limit=1)
    monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", "secret")
    evaluate(url, saved_tiny, prompts, limit=1)


def test_a_server_without_speculation(
    serve: Serve, saved_tiny: Path, prompts: Path, capsys: Any
) -> None:
    for engine in ("vllm", "sglang"):
        url, _ = serve(engine=engine, speculates=False)
        (s,) = evaluate(url, saved_tiny, prompts)["server"]["settings"]
        assert (
            s["tau_incl_bonus"] == s["tau_emitted"] == 1
            and s["drafts"] is None
            and s["survival"] == []
            and not s["warnings"]
        )
        assert "The server does not speculate" in capsys.readouterr().out


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_says_it_in_every_reply(
    serve: Serve, saved_tiny: Path, prompts: Path, incremental: bool
) -> None:
    """It verifies at all four steps; its own spec_accept_length, 10 / 4, counts the prefill's
    token."""
    url, plan = serve(engine="sglang", incremental=incremental)
    server = evaluate(url, saved_tiny, prompts, drafter=["ngram"], baselines=False)["server"]
    assert (server["engine"], server["version"]) == ("sglang", "0.5.9")
    (s,) = server["settings"]
    assert (s["drafts"], s["drafted"], s["accepted"], s["tokens"], s["chunks"]) == (
        16,
        48,
        20,
        40,
        20,
    )
    assert s["tau_incl_bonus"] == s["tau_emitted"] == pytest.approx(9 / 4)
    assert s["survival"] == pytest.approx([2 / 4, 2 / 4, 1 / 4])
    assert s["compared"] == 4, "its token ids were read"
    assert plan.asked[1]["sampling_params"]["top_k"] == -1 and plan.asked[1]["input_ids"]


def replies_of(*metas: dict[str, Any], tokens: int) -> list[ServerReply]:
    """Replies of `tokens` tokens each, which came with the counts `metas`."""
    return [ServerReply(Prompt("p", [5]), 0, 0.0, tokens=tokens, meta=meta) for meta in metas]


def test_sglangs_older_and_newer_fields() -> None:
    old = replies_of({"completion_tokens": 10, "spec_verify_ct": 4}, tokens=10)
    old += replies_of({"completion_tokens": 1}, tokens=1)
    found = of_replies(PROTOCOLS["sglang"], old, True)
    assert (
        found.tau_incl_bonus == pytest.approx(9 / 4)
        and found.accepted is None
        and "prefill" in found.tau_definition
    )
    new = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12}
    found = of_replies(PROTOCOLS["sglang"], replies_of(new, tokens=10), True)
    assert found.tau_incl_bonus == pytest.approx(9 / 4) and found.drafted == 12
    silent = of_replies(PROTOCOLS["sglang"], replies_of({"completion_tokens": 10}, tokens=10), True)
    assert silent.tau_incl_bonus is None and "no spec_verify_ct" in silent.warnings[0]


def test_prometheus_text_of_two_engines() -> None:
    text = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a,b} c"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a,b} c"} 4.0
vllm:spec_decode_num_drafts_created{engine="1"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0 1795296487
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="2"} 1.0
vllm:generation_tokens 12
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} NaN
"""
    found = read_counters(text, vllm.COUNTERS)
    assert (found.drafts, found.by_position, found.generated) == (7, [3, 0, 1], 12)
    assert read_counters("no numbers here\n", vllm.COUNTERS) == Counters()
    before = read_counters("vllm:generation_tokens_total 2.0", vllm.COUNTERS)
    assert found.since(before).generated == 10


def test_replies_are_held_against_plain_decoding(
    serve: Serve, saved_tiny: Path, prompts: Path
) -> None:
    """Three replies are ours; one differs at its third token, where the gap between our two best
    logits is reported."""
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    given = [target.tokenizer("hello there " * n)["input_ids"] for n in (1, 2, 3, 4)]
    replies = {tuple(ids): alone(target, ids, 12) for ids in given}
    replies[tuple(given[2])][2] ^= 1
    url, _ = serve(replies=replies)
    report = evaluate(
        url,
        saved_tiny,
        prompts,
        drafter=["ngram"],
        baselines=False,
        max_new_tokens=12,
        temperatures="0,1",
    )
    greedy, sampled = report["server"]["settings"]
    assert (greedy["equal_to_plain"], greedy["compared"]) == (3, 4) and sampled["compared"] is None
    (difference,) = greedy["divergences"]
    assert (difference["id"], difference["index"]) == ("p2", 2) and difference["top2_gap"] > 0
    assert [(s["temperature"], s["batch"], list(s["drafters"])) for s in report["settings"]] == [
        (0, 1, ["plain", "ngram"]),
        (1, 1, ["plain", "ngram"]),
    ]


def test_later_turns_follow_on_the_servers_reply(
    serve: Serve, saved_tiny: Path, tmp_path: Path
) -> None:
    url, plan = serve()
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["one", "two"]}) + "\n")
    (s,) = evaluate(url, saved_tiny, path)["server"]["settings"]
    assert s["requests"] == 4, "two passes of two turns keep one in flight"
    first, second = plan.asked[1]["prompt"], plan.asked[2]["prompt"]
    tokenizer = AutoTokenizer.from_pretrained(saved_tiny)
    said = tokenizer.decode(second)
    assert (
        said.startswith(tokenizer.decode(first))
        and tokenizer.decode(range(5, 15)) in said
        and "two" in said
    )


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({"dies_after": 2}, {}, "failed while it wrote .* measure again"),
        ({"engine": "sglang", "dies_after": 2}, {}, "failed while it wrote"),
        (
            {"most": 4, "pause": 0.02},
            {"concurrency": "16"},
            r"refuses prompt p[0-3] .*\(status 503: .*too many requests.*\); give a lower",
        ),
        (
            {"refuses": 400},
            {},
            r"refuses prompt p0 of [0-9]+ tokens \(status 400: .*max_tokens is.*too large.*\); "
            "check its limits",
        ),
        ({"metrics": "python_info 1.0\n"}, {}, "start the vLLM without --disable-log-stats"),
        ({"gone": ("/metrics",)}, {}, "has no /metrics"),
        ({"gone": ("/v1/models",)}, {}, "has no /v1/models; give --server the root"),
        ({"models": ("a", "b")}, {}, "serves a, b; name one with --server-model"),
        ({"models": ("a", "b")}, {"server_model": "c"}, "serves no model 'c'; there are: a, b"),
        ({"context": 5}, {}, "prompt p1 has 6 tokens, the server's context 5; leave it out"),
        ({"probe": [1, 2]}, {}, "with another tokenizer than --target's"),
        ({}, {"concurrency": "0"}, "--concurrency must be at least 1"),
        ({}, {"concurrency": "many"}, "--concurrency takes numbers"),
        ({}, {"batch_size": "1,2"}, "takes --concurrency 1,8,32 in place of batch sizes"),
    ],
)
def test_what_goes_wrong_is_one_line_and_writes_nothing(
    serve: Serve,
    saved_tiny: Path,
    prompts: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    why: str,
) -> None:
    url, _ = serve(**settings)
    with pytest.raises(UserError, match=why) as caught:
        evaluate(url, saved_tiny, prompts, **options)
    assert "\n" not in str(caught.value) and sorted(p.name for p in prompts.parent.iterdir()) == [
        "prompts.jsonl"
    ]


def test_the_model_that_is_asked_for(serve: Serve, saved_tiny: Path, prompts: Path) -> None:
    for models, wanted, asked in (
        (("a", "b"), "b", "b"),
        (("a", str(saved_tiny)), None, str(saved_tiny)),
        (("only",), None, "only"),
    ):
        url, plan = serve(models=models)
        evaluate(url, saved_tiny, prompts, server_model=wanted, limit=1)
        assert {body["model"] for body in plan.asked} == {asked}


def test_a_server_that_is_not_there(saved_tiny: Path, prompts: Path) -> None:
    out = prompts.with_name("out.json")
    shared = ["--target", str(saved_tiny), "--prompts", str(prompts), "--json", str(out)]
    for url, why in (
        ("http://127.0.0.1:9", "does not answer"),
        ("127.0.0.1:8000", "is no address of a server"),
    ):
        done = run_cli("evaluate", "--server", url, *shared)
        *_, last = done.stderr.splitlines()  # before it: that these prompts are plain text
        assert (
            done.returncode == 2 and last.startswith("error:") and why in last and not out.exists()
        )
    with pytest.raises(UserError, match="name it with --server"):
        run(Options(TargetConfig("t"), str(prompts), concurrency="1"))
