"""A real server under requests that its types allow, forbid, and that are hostile.

No answer has the status 500, `/health` is answered within a second all the time, and the process
does not grow.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from draftsmith.inference.serving.protocol import ChatRequest, CompletionRequest, RequestFields
from tests.inference.serving.conftest import Running, started

POSTED: dict[str, type[RequestFields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
REFUSED = (
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "response_format", "tools",
    "top_logprobs", "echo", "suffix", "best_of", "chat_template_kwargs",
)  # fmt: skip
KINDS = ("allowed", "forbidden", "decoded")
GROWTH = 1.2  # of memory, after a warm-up
HEALTHY_S = 1.0
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of its own, which has seen each kind of request before its memory is looked at."""
    process, address = started("--drafter", "ngram", "--max-new-tokens", "8")
    running = Running(address, psutil.Process(process.pid))
    for _, path, body, _ in HOSTILE:
        httpx.post(address + path, content=body, headers=AS_JSON, timeout=60)
    fuzz(running, 30, number=1)
    yield running
    process.terminate()
    assert process.wait(timeout=60) is not None


ASK = """
import sys, time, urllib.request
slowest = 0.0
print("asking", flush=True)
while True:
    asked = time.perf_counter()
    answer = urllib.request.urlopen(sys.argv[1] + "/health", timeout=60).read()
    assert answer == b'{"status":"ok"}'
    slowest = max(slowest, time.perf_counter() - asked)
    print(slowest, flush=True)
    time.sleep(0.02)
"""


@contextmanager
def healthy(server: Running) -> Iterator[None]:
    """Ask `/health` all the time, from another process, and compare the memory before and after."""
    before = server.process.memory_info().rss
    command = [sys.executable, "-c", ASK, server.address]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None and asking.stdout.readline()
    try:
        yield
        time.sleep(0.1)  # until what was asked meanwhile has been answered
    finally:
        ended = asking.poll()
        asking.terminate()
        *_, slowest = asking.stdout.read().splitlines()
        asking.wait()
    assert ended is None, "/health gave no answer, or not that all is well"
    after = server.process.memory_info().rss
    print(f"/health within {float(slowest):.3f} s, memory {before >> 20} -> {after >> 20} MiB")
    assert float(slowest) < HEALTHY_S
    assert after < GROWTH * before, (before, after)


def fuzz(server: Running, requests: int, number: int) -> Counter[tuple[str, int]]:
    """Send so many requests that are made from the types; return the kinds of answers.

    A third is as the types allow, a third is not, and a third is made such that it is
    decoded: nothing in it is unsupported, and its replies are short.
    """
    found: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_dict(description())
    kinds = [(path, kind) for path in POSTED for kind in KINDS]
    with httpx.Client(base_url=server.address, headers=AS_JSON, timeout=60) as client:
        for path, kind in kinds:
            mode = GenerationMode.NEGATIVE if kind == "forbidden" else GenerationMode.POSITIVE
            cases = schema[path]["POST"].as_strategy(generation_mode=mode)

            def ask(case: Any, limit: int) -> None:
                body = decodable(case.body, limit) if kind == "decoded" else case.body  # noqa: B023
                answer = client.post(path, content=content_of(body))  # noqa: B023
                found[kind, answer.status_code] += 1  # noqa: B023
                check(answer)

            run = settings(
                max_examples=requests // len(kinds),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )
            seed(number)(run(given(case=cases, limit=st.integers(1, 4))(ask)))()
    return found


def description() -> dict[str, Any]:
    """The requests as OpenAPI 3.1, made from the types that read them."""
    reference = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components([*POSTED.values()], ref_template=reference)
    paths = {}
    for path, kind in POSTED.items():
        schema = {"$ref": reference.format(name=kind.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        answers = {"200": {"description": "Success."}}
        paths[path] = {"post": {"requestBody": body, "responses": answers}}
    info = {"title": "serve", "version": "1"}
    components = {"schemas": schemas}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def decodable(body: Any, limit: int) -> dict[str, Any]:
    """A request that is like `body`, with a prompt and without what is not supported."""
    kept = {name: value for name, value in body.items() if name not in REFUSED}
    kept |= {"model": "target", "max_tokens": limit, "n": min(body.get("n") or 1, 3)}
    if "messages" in body:
        words = str(body["messages"])[:150]
        more = {"messages": [{"role": "user", "content": words}], "max_completion_tokens": limit}
        return kept | more
    return kept | {"prompt": str(body["prompt"])[:150]}


def content_of(body: Any) -> bytes:
    """`body` as JSON, or as something else where it cannot be."""
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):
        return repr(body).encode(errors="replace")


def check(answer: httpx.Response) -> None:
    """Fail for an internal error, and for an answer that is not in OpenAI's form."""
    assert answer.status_code in (200, 400, 404, 413, 415), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["code"] and "\n" not in error["message"], error
        assert "Error:" not in error["message"] and "/scripts/" not in error["message"], error
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.content.endswith(b"data: [DONE]\n\n")


def chat(**more: Any) -> bytes:
    messages = [{"role": "user", "content": "def f():"}]
    return json.dumps({"messages": messages, "max_tokens": 2, **more}).encode()


def text(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 2, **more}).encode()


CHAT, TEXT = POSTED
HOSTILE: list[tuple[str, str, bytes, int]] = [
    ("400,000 prompts", TEXT, text([[1]] * 400_000, n=128), 400),
    ("100,000 texts", TEXT, text(["a"] * 100_000), 400),
    ("100,000 letters", TEXT, text("a" * 100_000), 400),
    ("1.9 MiB of text", TEXT, text("some words " * 180_000), 400),
    ("520,000 prompts", TEXT, text([[]] * 520_000), 400),
    (
        "1.9 MiB in a message",
        CHAT,
        chat(messages=[{"role": "user", "content": "b " * 900_000}]),
        400,
    ),
    ("15 MiB of text", TEXT, text("a" * (15 << 20)), 413),
    ("500,000 tokens", TEXT, text([5] * 500_000), 400),
    ("60,000 messages", CHAT, chat(messages=[{"role": "user", "content": ""}] * 60_000), 400),
    ("a stop of 20,000 characters", TEXT, text("def", stop="ab" * 10_000), 400),
    ("five stops", TEXT, text("def", stop=list("abcde")), 400),
    ("the most stops", TEXT, text("def", stop=[c * 256 for c in "abcd"]), 200),
    ("a stop that no token has", CHAT, chat(stop=["\U0001f9a4\u2603"]), 200),
    ("NaN", TEXT, b'{"prompt": "a", "temperature": NaN}', 400),
    ("1e999", TEXT, b'{"prompt": "a", "repetition_penalty": 1e999}', 400),
    ("1e-300", TEXT, b'{"prompt": "a", "repetition_penalty": 1e-300}', 400),
    ("a temperature of 1e999", TEXT, b'{"prompt": "a", "temperature": 1e999}', 400),
    ("a temperature of 1e-300", TEXT, b'{"prompt": "a", "temperature": 1e-300}', 400),
    ("a top_p of 1e-300", TEXT, text("a", top_p=1e-300, temperature=1), 200),
    ("depth 100,000", TEXT, b'{"prompt": ' + b"[" * 100_000, 400),
    ("depth 900", TEXT, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    ("half a surrogate pair", TEXT, b'{"prompt": "\\ud83d"}', 400),
    ("half of one in a stop", TEXT, b'{"prompt": "a", "stop": "\\ud83d"}', 400),
    ("invalid UTF-8", TEXT, b'{"prompt": "\xff"}', 400),
    ("a seed of 4,000 digits", TEXT, text("a", seed=10**3999, temperature=1), 200),
    ("5,000 digits", TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    ("a top_k of 31 digits", TEXT, text("a", top_k=10**30), 400),
    ("tokens of 40 digits", TEXT, text([10**40, -(10**40)]), 400),
    ("a model of a million letters", TEXT, text("a", model="a" * 10**6), 400),
    ("a field of a million letters", TEXT, text("a", **{"a" * 10**6: 1}), 400),
    ("a role of a million letters", CHAT, chat(messages=[{"role": "a" * 10**6}]), 400),
    ("true for a prompt", TEXT, text([True]), 400),
    ("a prompt of both kinds", TEXT, text([1, "a"]), 400),
    ("no object", TEXT, b"[1]", 400),
    ("an empty body", CHAT, b"", 400),
    ("the largest metadata", CHAT, chat(metadata={"a": "b" * 10**6}), 200),
    ("nested template arguments", CHAT, chat(chat_template_kwargs={"a": [[[[{}]]]]}), 200),
]


QUICK = 15
"""Hostile requests of the default tests: the largest ones."""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.full] if number >= QUICK else [])
        for number, (name, *case) in enumerate(HOSTILE)
    ],
)
def test_a_hostile_request_is_answered_and_others_do_not_wait(
    server: Running, path: str, body: bytes, status: int
) -> None:
    """Each with another client beside it, which asks for one token and gets it soon."""
    with healthy(server):
        answer = httpx.post(server.address + path, content=body, headers=AS_JSON, timeout=30)
    assert answer.status_code == status, answer.text[:200]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("requests", [60, pytest.param(2004, marks=pytest.mark.full)])
def test_type_generated_requests_are_decoded_or_refused(server: Running, requests: int) -> None:
    with healthy(server):
        found = fuzz(server, requests, number=2)
    print(dict(found))
    assert sum(found.values()) > 0.9 * requests
    assert found["decoded", 200] > requests / 6
    assert found["forbidden", 400] > requests / 4


def test_short_request_does_not_wait_for_oversized_ones(server: Running) -> None:
    """Six clients that send 1.9 MiB each, and one that asks for a token: it waits for none of
    them."""
    body = text("some words " * 180_000)
    statuses: list[int] = []

    def send() -> None:
        for _ in range(3):
            answer = httpx.post(server.address + TEXT, content=body, headers=AS_JSON, timeout=60)
            statuses.append(answer.status_code)

    with healthy(server):
        senders = [threading.Thread(target=send) for _ in range(6)]
        for sender in senders:
            sender.start()
        slowest = 0.0
        while any(sender.is_alive() for sender in senders):
            asked = time.perf_counter()
            answer = httpx.post(server.address + TEXT, content=text("def"), headers=AS_JSON)
            assert answer.status_code == 200
            slowest = max(slowest, time.perf_counter() - asked)
    assert statuses == [400] * 18
    assert slowest < 2, slowest


@pytest.mark.full
def test_requests_that_are_half_sent_are_closed(server: Running) -> None:
    """Bodies that never end, and bodies that come a byte at a time: all are closed within the time
    limit, and another client does not wait."""
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    beginning = (head + "Content-Length: 1000\r\n\r\n" + '{"prompt"').encode()
    sockets = [socket.create_connection((host, int(port))) for _ in range(75)]
    opened = time.monotonic()
    with healthy(server):
        for connection in sockets:
            connection.sendall(beginning)
        time.sleep(0.5)
        before = server.process.num_fds()
        while time.monotonic() - opened < 11:
            for connection in sockets[::10]:
                try:
                    connection.sendall(b" ")  # a drop at a time does not keep it open
                except OSError:
                    continue
            time.sleep(0.5)
        answers = Counter(read_all(connection) for connection in sockets)
    assert set(answers) <= {b"", b"HTTP/1.1 408"}, answers
    assert answers[b"HTTP/1.1 408"] >= 60
    assert server.process.num_fds() < before - 70


def read_all(connection: socket.socket) -> bytes:
    """The status line of what came, up to the end of the connection, which has to have come."""
    connection.settimeout(2)
    came = b""
    try:
        while piece := connection.recv(4096):
            came += piece
    except ConnectionResetError:
        pass
    connection.close()
    return came[:12]


def test_more_connections_than_allowed_are_refused_and_later_taken(server: Running) -> None:
    """The server takes as many as can run or wait (16 and 256), and 256 more."""
    host, port = server.address.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(600)]
    time.sleep(0.3)
    assert httpx.get(f"{server.address}/health").status_code == 503
    for connection in sockets:
        connection.close()
    time.sleep(0.3)
    assert httpx.get(f"{server.address}/health").status_code == 200
