"""llama.cpp's server measured over real sockets; it is written in this file, in the form of b10434.

`./scripts/check_llamacpp.sh` holds the real one against the same code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.errors import UserError
from tests.helpers.engine_server import (
    STEPS,
    TOKENS,
    Handler,
    Serve,
    evaluate,
    prompts,
    serve,
)

__all__ = ["prompts", "serve"]  # fixtures


class Llamacpp(Handler):
    """Counts as vLLM does, under other names, and sends every token in an event of its own."""

    def do_GET(self) -> None:
        plan = self.plan
        if self.path in plan.gone:
            return self.answer({"error": {"message": "This server does not support it"}}, 501)
        if self.path == "/props":
            defaults = {"params": {"temperature": 0.8}, "n_ctx": plan.context}
            return self.answer(
                {
                    "default_generation_settings": defaults,
                    "total_slots": 1,
                    "build_info": "b10434-abc",
                }
            )
        if self.path == "/slots":
            return self.answer([{"id": 0, "n_ctx": plan.context, "speculative": plan.speculates}])
        if self.path == "/v1/models":
            return self.answer({"data": [{"id": "m", "meta": {"n_ctx": plan.context}}]})
        super().do_GET()

    def prometheus(self) -> str:
        plan = self.plan
        counts = {
            "tokens_predicted_total": plan.counts["generated"],
            "requests_processing": plan.running,
            "requests_deferred": 0,
            "spec_decode_num_drafts_total": plan.counts["drafts"],
            "spec_decode_num_draft_tokens_total": plan.counts["drafted"],
            "spec_decode_num_accepted_tokens_total": plan.counts["accepted"],
        }
        if plan.speculates:
            name = "spec_decode_num_accepted_tokens_per_pos_total"
            counts |= {f'{name}{{position="{i}"}}': n for i, n in enumerate(plan.positions)}
        return "".join(f"llamacpp:{name} {value}\n" for name, value in counts.items())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/completion":
            return self.answer({"tokens": []} if self.plan.probe is None else self.plan.probe, 404)
        self.plan.asked.append(body)
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids = list(range(5, 5 + TOKENS))
        self.count(STEPS if self.plan.speculates else [(1, 0)] * TOKENS, TOKENS)
        for token in ids:
            self.event({"index": 0, "content": "x", "tokens": [token], "stop": False})
        last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit"}
        self.event(last | {"tokens_predicted": TOKENS, "timings": {"draft_n": 9}})
        self.wfile.write(b"0\r\n\r\n")


@pytest.mark.parametrize("speculates", [True, False])
def test_llamacpp_replies_give_the_worked_example(
    serve: Serve, saved_tiny: Path, prompts: Path, speculates: bool
) -> None:
    url, plan = serve(handler=Llamacpp, speculates=speculates)
    report = evaluate(url, saved_tiny, prompts)["server"]
    assert (report["engine"], report["version"], report["context"]) == (
        "llamacpp",
        "b10434-abc",
        plan.context,
    )
    (s,) = report["settings"]
    assert (s["requests"], s["tokens"], s["warnings"]) == (4, 40, [])
    assert s["speculates"] is speculates
    expected: dict[str, Any] = {"tau_incl_bonus": 1.0, "tau_emitted": 1.0, "drafts": None}
    if speculates:
        # A chunk holds a token, so that steps are counted by drafts and by tokens not accepted.
        expected = {"tau_incl_bonus": 8 / 3, "tau_emitted": 9 / 4, "drafts": 12, "rounds": 16}
        assert s["survival"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert {name: s[name] for name in expected} == pytest.approx(expected)
    asked = plan.asked[1]
    assert asked["n_predict"] == 32 and asked["temperature"] == 0 and not asked["cache_prompt"]
    # What is left out would be the server's own: a top-k of 40, a min-p of 0.05.
    assert (asked["top_k"], asked["top_p"], asked["min_p"], asked["repeat_penalty"]) == (0, 1, 0, 1)


def test_a_server_without_counters_is_refused(
    serve: Serve, saved_tiny: Path, prompts: Path
) -> None:
    url, _ = serve(handler=Llamacpp, gone=("/metrics",))
    with pytest.raises(UserError, match="start llama-server with --metrics"):
        evaluate(url, saved_tiny, prompts)
