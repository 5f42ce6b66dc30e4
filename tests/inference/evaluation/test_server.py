"""A server measured over real sockets: its counters, its chunks, what goes wrong. The servers here
are written in this file.

They speak as vLLM 0.32 does (tests/peers/test_vllm_live.py holds the real one against the same
code) and as SGLang's sources say that it does; no SGLang was at hand to try.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import vllm
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import Prompt
from draftsmith.inference.evaluation.evaluate import Options, run
from draftsmith.inference.evaluation.results import read_measured
from draftsmith.inference.evaluation.server_client import PROTOCOLS
from draftsmith.inference.evaluation.server_counters import (
    Counters,
    ServerReply,
    read_counters,
    speculation_from_replies,
)
from draftsmith.inference.targets.target import load_target
from tests.helpers.command_line import run_cli
from tests.helpers.engine_server import Serve, evaluate
from tests.helpers.regeneration import alone


def test_vllm_counters_give_the_worked_example(
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
def test_concurrency_keeps_that_many_requests_in_flight(
    serve: Serve, saved_tiny: Path, prompts: Path, engine: str
) -> None:
    """Every request waits until 16 are there: were there fewer in flight, none would be
    answered."""
    url, plan = serve(engine=engine, together=threading.Barrier(16))
    (s,) = evaluate(url, saved_tiny, prompts, concurrency=[16], max_new_tokens=10)["server"][
        "settings"
    ]
    assert plan.peak == 16 and s["requests"] == 32, "two rounds of 16, from four prompts"


def test_every_concurrency_and_temperature_is_a_row(
    serve: Serve, saved_tiny: Path, prompts: Path
) -> None:
    url, plan = serve()
    settings = evaluate(url, saved_tiny, prompts, concurrency=[1, 4], temperature=[0, 0.5])[
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
    (s,) = evaluate(url, saved_tiny, prompts, concurrency=[2])["server"]["settings"]
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
def test_foreign_requests_on_server_cause_a_warning(
    serve: Serve, saved_tiny: Path, prompts: Path, settings: dict[str, int], why: str, capsys: Any
) -> None:
    url, _ = serve(**settings)
    (s,) = evaluate(url, saved_tiny, prompts)["server"]["settings"]
    (warning,) = s["warnings"]
    assert why in warning and why in " ".join(capsys.readouterr().out.split())
    assert s["tau_emitted"] is None, "steps of others are no steps of ours"


def test_server_api_key_is_required_and_sent(
    serve: Serve, saved_tiny: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = serve(key="secret")
    for key, why in (
        (None, "requires a valid API key; set DRAFTSMITH_SERVER_KEY"),
        ("wrong", "requires a valid API key"),
        ("a\nb", "characters that cannot be sent"),
    ):
        if key is not None:
            monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", key)
        with pytest.raises(UserError, match=why):
            evaluate(url, saved_tiny, prompts, limit=1)
    monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", "secret")
    evaluate(url, saved_tiny, prompts, limit=1)


def test_server_without_speculation_is_reported_with_tau_one(
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
def test_sglang_figures_are_read_from_each_reply(
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


def test_old_and_new_sglang_fields_are_read() -> None:
    old = replies_of({"completion_tokens": 10, "spec_verify_ct": 4}, tokens=10)
    old += replies_of({"completion_tokens": 1}, tokens=1)
    found = speculation_from_replies(PROTOCOLS["sglang"], old, True)
    assert (
        found.tau_incl_bonus == pytest.approx(9 / 4)
        and found.accepted is None
        and "prefill" in found.tau_definition
    )
    new = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12}
    found = speculation_from_replies(PROTOCOLS["sglang"], replies_of(new, tokens=10), True)
    assert found.tau_incl_bonus == pytest.approx(9 / 4) and found.drafted == 12
    silent = speculation_from_replies(
        PROTOCOLS["sglang"], replies_of({"completion_tokens": 10}, tokens=10), True
    )
    assert silent.tau_incl_bonus is None and "no spec_verify_ct" in silent.warnings[0]


def test_prometheus_counters_of_two_engines_are_summed() -> None:
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
        temperature=[0, 1],
    )
    greedy, sampled = report["server"]["settings"]
    assert (greedy["equal_to_plain"], greedy["compared"]) == (3, 4) and sampled["compared"] is None
    assert greedy["largest_gap"] > 0 and sampled["largest_gap"] is None
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
            {"concurrency": [16]},
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
        ({}, {"concurrency": [0]}, "--concurrency must be at least 1"),
        ({}, {"batch_size": [1, 2]}, "takes --concurrency 1,8,32 in place of batch sizes"),
    ],
)
def test_server_failures_are_one_line_and_write_nothing(
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


def test_requested_or_matching_server_model_is_used(
    serve: Serve, saved_tiny: Path, prompts: Path
) -> None:
    for models, wanted, asked in (
        (("a", "b"), "b", "b"),
        (("a", str(saved_tiny)), None, str(saved_tiny)),
        (("only",), None, "only"),
    ):
        url, plan = serve(models=models)
        evaluate(url, saved_tiny, prompts, server_model=wanted, limit=1)
        assert {body["model"] for body in plan.asked} == {asked}


def test_unreachable_server_is_refused_in_one_line(saved_tiny: Path, prompts: Path) -> None:
    out = prompts.with_name("out.json")
    shared = ["--target", str(saved_tiny), "--prompts", str(prompts), "--json", str(out)]
    for url, why in (
        ("http://127.0.0.1:9", "does not answer"),
        ("127.0.0.1:8000", "is not the URL of a server"),
    ):
        done = run_cli("evaluate", "--server", url, *shared)
        *_, last = done.stderr.splitlines()  # before it: that these prompts are plain text
        assert (
            done.returncode == 2 and last.startswith("error:") and why in last and not out.exists()
        )
    with pytest.raises(UserError, match="name it with --server"):
        run(Options(TargetConfig("t"), str(prompts), concurrency=[1]))
