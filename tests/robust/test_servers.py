"""Servers that misbehave: every command that talks to one ends in one line, within its time
limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from draftsmith.train.data import replies
from tests.conftest import QUICKSTART, by_default
from tests.helpers.mutations import outcome
from tests.helpers.serving import serving, whole

SECONDS = 1.0  # the time limit of a reply
GOOD: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "stop",
            "token_ids": [3, 4],
        }
    ],
}


def changed(**choice: Any) -> bytes:
    return json.dumps({**GOOD, "choices": [{**GOOD["choices"][0], **choice}]}).encode()


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A byte every quarter of a second: no wait between two bytes is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.25)


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')


MISBEHAVIOUR: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "a byte at a time": drip,
    "silence": lambda handler: time.sleep(3 * SECONDS),
    "cut off": cut,
    "closed at once": lambda handler: handler.connection.close(),
    "no JSON": whole(b"<html>"),
    "empty": whole(b""),
    "nested": whole(b"[" * 100_000),
    "a list": whole(b"[]"),
    "no choices": whole(b"{}"),
    "empty choices": whole(b'{"choices": []}'),
    "choices of another type": whole(b'{"choices": 3}'),
    "content of another type": whole(changed(message={"role": "assistant", "content": 3})),
    "another role": whole(changed(message={"role": "user", "content": "x"})),
    "ids of another type": whole(changed(token_ids=["3"])),
    "negative ids": whole(changed(token_ids=[-1])),
    "huge ids": whole(changed(token_ids=[10**12])),
    "fractional ids": whole(changed(token_ids=[1.5])),
    "NaN": whole(changed(finish_reason=3)),
    "a redirect to another host": whole(b"", 302, Location="http://192.0.2.1/"),
    "unauthorised": whole(b"no", 401),
    "an error": whole(b"no", 500),
    "too busy": whole(b"no", 429),
    "bad gzip": whole(b"abc", 200, **{"Content-Encoding": "gzip"}),
    "not UTF-8": whole(b'"\xff"'),
}
QUICK = (
    "a byte at a time",
    "negative ids",
    "a redirect to another host",
    "nested",
    "closed at once",
)


def events(*lines: bytes | dict[str, Any]) -> Callable[[BaseHTTPRequestHandler], None]:
    """A stream of server-sent events."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return whole(b"".join(b"data: " + line + b"\n\n" for line in data))


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": "x", "token_ids": [3], "finish_reason": "stop", **fields}]}


def trickle(handler: BaseHTTPRequestHandler) -> None:
    """An event every quarter of a second, none of which brings a token."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b'data: {"choices": []}\n\n')
        handler.wfile.flush()
        time.sleep(0.25)


STREAMS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "no token ever": trickle,
    "only the end": events(b"[DONE]"),
    "no finish": events(choice(finish_reason=None), b"[DONE]"),
    "no JSON in an event": events(b"<html>"),
    "nested event": events(b"[" * 100_000),
    "a list for an event": events(b"[]"),
    "NaN in an event": events(b'{"choices": [{"text": NaN}]}'),
    "an error within": events({"error": {"message": "out of blocks"}}),
    "choices are a number": events({"choices": 3}),
    "text is a number": events(choice(text=3)),
    "ids are words": events(choice(token_ids=["a"])),
    "ids below zero": events(choice(token_ids=[-1])),
    "ids beyond any vocabulary": events(choice(token_ids=[10**12])),
    "a finish that is a number": events(choice(finish_reason=3)),
    "usage below zero": events({**choice(token_ids=None), "usage": {"completion_tokens": -1}}),
    "usage is a word": events({**choice(token_ids=None), "usage": "many"}),
}
QUICK_STREAMS = ("no token ever", "nested event", "ids below zero", "a redirect to another host")
PATHS = {
    "/v1/models": whole(b'{"data": [{"id": "m", "max_model_len": 200}]}'),
    "/metrics": whole(b"vllm:generation_tokens_total 0.0\nvllm:num_requests_running 0.0\n"),
    "/version": whole(b'{"version": "0.32.0"}'),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full, id=kind)
        for kind in MISBEHAVIOUR
    ],
)
def test_regenerating_through_misbehaving_server_ends_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PAUSES_S", (0.0, 1.0))
    monkeypatch.setattr(replies, "REPLY_S", SECONDS)
    monkeypatch.setattr("draftsmith.inference.evaluation.server_client.ANSWER_S", SECONDS)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with serving(MISBEHAVIOUR[kind]) as url:
        base = [
            "data",
            "regenerate",
            "--target",
            str(QUICKSTART),
            "--data",
            str(rows),
            "--out",
            str(out),
        ]
        found = outcome(
            [
                *base,
                "--server.url",
                url,
            ]
        )
    assert found.wrong() is None and found.code == 2 and found.seconds < 10, found
    assert "does not answer" in found.errors
    assert not out.exists(), "a bad answer was kept"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK_STREAMS else pytest.mark.full, id=kind)
        for kind in {**MISBEHAVIOUR, **STREAMS}
    ],
)
def test_measuring_a_misbehaving_server_ends_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it writes replies, and (where it is no stream) while it says what it is."""
    monkeypatch.setattr("draftsmith.inference.evaluation.server_client.WHOLE_REPLY_S", SECONDS)
    monkeypatch.setattr("draftsmith.inference.evaluation.server_client.ANSWER_S", SECONDS)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    rows.write_text(json.dumps({"prompt": "def f():"}) + "\n")
    bad = {**MISBEHAVIOUR, **STREAMS}[kind]
    gone = whole(b"{}", 404)
    ways = [(gone, {**PATHS, "/v1/completions": bad})]
    if kind in MISBEHAVIOUR:
        ways += [(gone, {**PATHS, "/v1/models": bad}), (gone, {**PATHS, "/metrics": bad})]
    for answer, paths in ways:
        with serving(answer, paths) as url:
            base = [
                "evaluate",
                "--target",
                str(QUICKSTART),
                "--prompts",
                str(rows),
                "--max-new-tokens",
                "4",
            ]
            found = outcome([*base, "--server", url, "--json", str(out)])
        assert found.wrong() is None and found.code == 2 and found.seconds < 10, found
        assert not out.exists()


@pytest.mark.parametrize(
    "url",
    by_default(
        [
            "http://localhost:99999/v1",
            "ftp://x",
            "localhost:8000",
            "http://",
            "",
            "http://[::1",
            "http://x:0",
            "file:///etc/passwd",
        ],
        "http://localhost:99999/v1",
        "localhost:8000",
    ),
)
def test_invalid_server_address_is_refused_immediately(url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    out = ["--out", str(tmp_path / "o")]
    for command in (
        ["data", "regenerate", "--target", "t", "--data", str(rows), *out, f"--server.url={url}"],
        ["evaluate", "--target", "t", "--prompts", str(rows), f"--server={url}"],
    ):
        found = outcome(command)
        assert (
            found.code == 2
            and "is not the URL of a server" in found.errors
            and found.wrong() is None
        ), found
