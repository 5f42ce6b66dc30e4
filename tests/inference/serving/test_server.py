"""`draftsmith serve` as its clients see it: the `openai` package, plain HTTP, and
`draftsmith evaluate --server`."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from draftsmith.inference.api import Decoder, load
from draftsmith.inference.base.detokenize import special_ids
from draftsmith.inference.serving.serve import hosts_of, listen
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART
from tests.helpers.command_line import run_cli
from tests.helpers.trained import questions
from tests.inference.serving.conftest import EAGLE3, Running, started

CLIENTS, LIMIT = 16, 16


@pytest.fixture(scope="module")
def decoder(quickstart: Target) -> Decoder:
    return load(quickstart, EAGLE3)


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0)


def chat(words: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "target",
        "messages": [{"role": "user", "content": words}],
        "temperature": 0,
        "max_tokens": LIMIT,
        **more,
    }


def counters(server: Running) -> dict[str, float]:
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def wait_until_idle(server: Running) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = counters(server)
        if not found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"rows run on: {found}")


def test_replies_are_those_of_generate(client: openai.OpenAI, decoder: Decoder) -> None:
    words = questions("test", 3)
    for prompt, reply in zip(words, decoder.generate(words, LIMIT), strict=True):
        for model in ("target", "target:ngram", "target:plain"):
            whole = client.chat.completions.create(**chat(prompt, model=model))
            assert whole.choices[0].message.content == reply.text
            assert whole.usage is not None
            assert whole.usage.completion_tokens == len(reply.token_ids)
            assert whole.choices[0].finish_reason == (
                "length" if reply.finish_reason == "length" else "stop"
            )
    (raw,) = decoder.generate(words[:1], LIMIT, raw=True)
    done = client.completions.create(
        model="target", prompt=words[0], temperature=0, max_tokens=LIMIT
    )
    assert done.choices[0].text == raw.text


def test_samples_of_a_seed_are_those_of_generate(client: openai.OpenAI, decoder: Decoder) -> None:
    words = questions("test", 1)[0]
    expected = decoder.generate(words, LIMIT, samples=3, temperature=0.8, top_p=0.9, seed=7)
    done = client.chat.completions.create(**chat(words, n=3, temperature=0.8, top_p=0.9, seed=7))
    assert [choice.message.content for choice in done.choices] == [r.text for r in expected]
    # without a seed each request has noise of its own
    free = [
        client.chat.completions.create(**chat(words, temperature=1.5)).choices[0].message.content
        for _ in range(4)
    ]
    assert len(set(free)) > 1


def test_a_stream_is_the_reply_and_says_what_was_drafted(
    client: openai.OpenAI, decoder: Decoder
) -> None:
    words = questions("test", 1)[0]
    reply = decoder.generate(words, LIMIT)
    events = list(
        client.chat.completions.create(
            **chat(words, stream=True, stream_options={"include_usage": True}),
            extra_body={"return_pieces": True, "return_token_ids": True},
        )
    )
    *parts, last = events
    assert "".join(part.choices[0].delta.content for part in parts) == reply.text
    extra = [part.choices[0].model_extra or {} for part in parts]
    assert [token for one in extra for token in one["token_ids"]] == reply.token_ids
    pieces = [piece for one in extra for piece in one["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == reply.text
    accepted = sum(min(r.accepted, len(r.tokens)) for r in reply.rounds)
    assert sum(piece["drafted"] for piece in pieces) == accepted > 0
    assert not last.choices and last.usage.completion_tokens == len(reply.token_ids)
    figures = (parts[-1].model_extra or {})["draftsmith"]
    assert figures["tau"] == reply.tau and figures["rounds"] == len(reply.rounds)


def test_the_seconds_of_two_streams_are_those_of_their_own_rounds(server: Running) -> None:
    """Two replies that are decoded at the same time, a round of each in turn, share the time."""

    def rounds(model: str) -> list[dict[str, Any]]:
        asked = chat("def add(a, b):", model=model, max_tokens=64, ignore_eos=True)
        body = {**asked, "stream": True, "return_pieces": True}
        with httpx.stream(
            "POST", f"{server.address}/v1/chat/completions", json=body, timeout=60
        ) as answer:
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        return [json.loads(event)["choices"][0]["round"] for event in events]

    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rounds, ("target:eagle3", "target:plain")))
    passed = time.monotonic() - started
    spent = [sum(one["seconds"] for one in each) for each in both]
    assert [sum(one["tokens"] for one in each) for each in both] == [64, 64]
    assert min(spent) > 0.1 * passed and sum(spent) < passed
    assert [each[0]["seconds"] for each in both] == [0, 0]  # the prefills'


@pytest.mark.full
@pytest.mark.parametrize("requests", [50, pytest.param(400, marks=pytest.mark.full)])
def test_concurrent_clients_get_exact_replies_despite_disconnects(
    server: Running, decoder: Decoder, requests: int
) -> None:
    """Requests by 16 clients, half of them streamed; some clients leave in the middle of a
    reply. Every other reply is that of `generate`, no row runs on, and memory is as before."""
    words = questions("test", 20)
    expected = [reply.text for reply in decoder.generate(words, LIMIT)]
    asyncio.run(many(server.address, words, requests * 3 // 2))  # until memory is as it stays
    wait_until_idle(server)
    before, counted = server.process.memory_info().rss, counters(server)
    found = asyncio.run(many(server.address, words, requests))
    wait_until_idle(server)
    left = 0
    for number, text in found.items():
        if text is None:
            left += 1
        else:
            assert text == expected[number % len(words)], number
    assert len(found) == requests and left == requests // 50
    assert server.process.memory_info().rss < 1.05 * before
    now = counters(server)

    def gained(name: str) -> float:
        return now.get(name, 0) - counted.get(name, 0)

    ends = [gained(f'draftsmith:requests_total{{end="{end}"}}') for end in ("eos", "length")]
    assert sum(ends) == requests - left
    assert gained('draftsmith:requests_total{end="cancelled"}') == left
    tau = gained('draftsmith:round_tokens_total{drafter="eagle3"}') / gained(
        'draftsmith:rounds_total{drafter="eagle3"}'
    )
    assert 1.5 < tau < 5


async def many(address: str, words: list[str], count: int) -> dict[int, str | None]:
    """The replies to `count` requests, 16 at a time; None: the client left in the middle."""
    found: dict[int, str | None] = {}
    numbers = iter(range(count))
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:

        async def one_client() -> None:
            for number in numbers:
                body = chat(words[number % len(words)])
                if number % 50 == 25:
                    body |= {"max_tokens": 900}
                    stream = await client.chat.completions.create(
                        **body, stream=True, extra_body={"ignore_eos": True}
                    )
                    async for _ in stream:
                        break
                    await stream.close()
                    found[number] = None
                elif number % 2:
                    text = ""
                    async for part in await client.chat.completions.create(**body, stream=True):
                        text += part.choices[0].delta.content or ""
                    found[number] = text
                else:
                    whole = await client.chat.completions.create(**body)
                    found[number] = whole.choices[0].message.content

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return found


def test_a_client_that_leaves_before_a_whole_reply_ends_it(server: Running) -> None:
    before = counters(server).get('draftsmith:requests_total{end="cancelled"}', 0)
    body = chat("def f():", max_tokens=900) | {"ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=0.3)
    wait_until_idle(server)
    assert counters(server)['draftsmith:requests_total{end="cancelled"}'] == before + 1


VALUE, UNSUPPORTED, LONG = "invalid_value", "unsupported_parameter", "context_length_exceeded"
REFUSED = [
    ({"model": "other"}, "unknown model 'other'; there are: target, target:", "model", ""),
    ({"model": "target:egle3"}, "there are: target, target:eagle3", "model", ""),
    (
        {"temprature": 1},
        "it has an unknown field `temprature`",
        "temprature",
        "unknown_parameter",
    ),
    ({"temperature": -1}, "$.temperature", "temperature", VALUE),
    ({"temperature": 1e-9}, "temperature must be 0 (greedy) or at least", "temperature", VALUE),
    ({"temperature": "hot"}, "Expected `float`, got `str`", "temperature", "invalid_type"),
    ({"repetition_penalty": 1e-300}, "$.repetition_penalty", "repetition_penalty", VALUE),
    ({"repetition_penalty": 101}, "$.repetition_penalty", "repetition_penalty", VALUE),
    ({"tools": [{"type": "function"}]}, "tools is not supported here", "tools", UNSUPPORTED),
    ({"logprobs": True}, "logprobs is not supported here", "logprobs", UNSUPPORTED),
    ({"response_format": {"type": "x"}}, "is not supported", "response_format", UNSUPPORTED),
    (
        {"messages": None},
        "lacks the required field `messages`",
        "messages",
        "missing_required_parameter",
    ),
    ({"messages": []}, "$.messages", "messages", VALUE),
    (
        {"messages": [{"role": "user"}]},
        "messages[0]: a message of role user has no content",
        "messages",
        VALUE,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0] is of type image_url; only texts are read",
        "messages",
        VALUE,
    ),
    (
        {"messages": [{"role": "user", "content": "a b " * 1000}]},
        "tokens leaves no room in 1024 positions",
        "messages",
        LONG,
    ),
    (
        {"messages": [{"role": "user", "content": "a b " * 50_000}]},
        "200000 characters leaves no room in 1024",
        "messages",
        LONG,
    ),
    ({"stop": [""]}, "`str` of length >= 1 - at `$.stop[0]`", "stop", VALUE),
    ({"stop": "a" * 257}, "`str` of length <= 256 - at `$.stop`", "stop", VALUE),
    ({"stop": list("abcde")}, "`array` of length <= 4 - at `$.stop`", "stop", VALUE),
    ({"max_tokens": 0}, "$.max_tokens", "max_tokens", VALUE),
    (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs: chat_template is not a variable of a chat template",
        "chat_template_kwargs",
        VALUE,
    ),
    (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "the last message is the assistant's",
        "messages",
        VALUE,
    ),
]


@pytest.mark.parametrize(
    ("change", "said", "param", "code"), REFUSED, ids=lambda value: str(value)[:30]
)
def test_wrong_requests_are_answered_in_one_line(
    server: Running, change: dict[str, Any], said: str, param: str, code: str
) -> None:
    """The message is for people; `param` and `code` are those that OpenAI's clients read."""
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=chat("a") | change)
    error = answer.json()["error"]
    status, code = (404, "model_not_found") if param == "model" else (400, code)
    assert answer.status_code == status and said in error["message"], error
    assert "\n" not in error["message"] and error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)


def test_answers_name_no_file_of_this_machine(server: Running) -> None:
    answer = httpx.post(f"{server.address}/v1/completions", json={"prompt": [10**9]})
    error = answer.json()["error"]
    assert error["message"] == (
        "a prompt contains a number that is not a token id of target (0 to 2047)"
    ), error
    assert error["param"] == "prompt"


@pytest.mark.full
def test_special_tokens_are_left_out_unless_asked_for(server: Running, quickstart: Target) -> None:
    """Noise, in which special tokens come: the text is that of transformers, whole and streamed."""
    tokenizer = quickstart.tokenizer
    path = f"{server.address}/v1/completions"
    body = {"max_tokens": 250, "ignore_eos": True, "seed": 4, "temperature": 100, "n": 4}
    body |= {"prompt": "<|system|>", "return_token_ids": True, "model": "target:plain"}
    for skip in (True, False):
        asked = body | {"skip_special_tokens": skip}
        choices = httpx.post(path, json=asked, timeout=60).json()["choices"]
        streamed = httpx.post(path, json=asked | {"stream": True}, timeout=60)
        texts = [""] * 4
        for line in streamed.text.split("\n\n")[:-2]:
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
        ids = [choice["token_ids"] for choice in choices]
        came = special_ids(tokenizer) & {token for one in ids for token in one}
        assert came - quickstart.eos_ids, "no special token came, so nothing was tried"
        wanted = [tokenizer.decode(one, skip_special_tokens=skip) for one in ids]
        assert [choice["text"] for choice in choices] == texts == wanted


def test_end_token_is_not_part_of_reply_text(server: Running, quickstart: Target) -> None:
    """As in vLLM, whose replies are learned from: also where special tokens are shown."""
    body = {"messages": [{"role": "user", "content": "def is_empty(self):"}], "max_tokens": 200}
    body |= {"model": "target:plain", "skip_special_tokens": False, "return_token_ids": True}
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] in quickstart.eos_ids
    assert choice["message"]["content"] == quickstart.tokenizer.decode(choice["token_ids"][:-1])
    assert answer["prompt_token_ids"]


def test_malformed_requests_are_refused(server: Running) -> None:
    path = f"{server.address}/v1/completions"
    as_json = {"Content-Type": "application/json"}
    cases: list[tuple[dict[str, Any], int]] = [
        ({"content": "{", "headers": as_json}, 400),
        ({"content": b"\xff", "headers": as_json}, 400),
        ({"content": "{}"}, 415),
        ({"json": {"prompt": [10**9], "model": "target"}}, 400),
        ({"json": {"prompt": [], "model": "target"}}, 400),
        ({"json": {"prompt": ["a"] * 3, "n": 128}}, 400),  # more than can wait
        ({"json": {"prompt": "x" * (17 << 20)}}, 413),
        ({"json": {"prompt": "x"}, "headers": {"Host": "evil.example"}}, 400),
    ]
    for request, status in cases:
        assert httpx.post(path, **request).status_code == status, request
    for method, name, status in (("GET", "nothing", 404), ("GET", "completions", 405)):
        answer = httpx.request(method, f"{server.address}/v1/{name}")
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}


def test_null_and_extra_fields_of_clients_are_accepted(
    server: Running, client: openai.OpenAI
) -> None:
    """Keys that are null, parts of messages, other roles, an empty list of calls."""
    nulls = dict.fromkeys(("n", "stop", "seed", "stream", "ignore_eos", "functions", "top_p"))
    history = [
        {"role": "developer", "content": "Be short.", "name": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f"}],
        },
        {"role": "assistant", "content": "pass", "tool_calls": []},
        {"role": "user", "content": "def f():", "tool_calls": None},
    ]
    body = chat("") | nulls | {"messages": history, "stream_options": {"include_usage": None}}
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"], answer.text
    assert client.models.retrieve("target:ngram").id == "target:ngram"


def test_full_queue_answers_503_and_serves_the_rest(server: Running) -> None:
    path = f"{server.address}/v1/completions"
    body = {"prompt": "def f():", "n": 128, "max_tokens": 8, "model": "target"}
    body |= {"ignore_eos": True}

    def ask(_: int) -> httpx.Response:
        return httpx.post(path, json=body, timeout=120)

    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, range(4)))
    statuses = [answer.status_code for answer in answers]
    assert {*statuses} == {200, 503}, statuses
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["Retry-After"] == "1"
        else:
            assert len(answer.json()["choices"]) == 128


def test_evaluate_measures_it_as_it_measures_vllm(server: Running, tmp_path: Path) -> None:
    """`--server` reads the counters, and the greedy replies equal plain decoding's."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"messages": [{"role": "user", "content": w}]} for w in questions("test", 6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_cli(
        "evaluate", "--target", str(QUICKSTART), "--target.device", "cpu", "--server",
        server.address, "--drafter", str(EAGLE3), "--no-baselines", "--prompts", str(prompts),
        "--concurrency", "2", "--max-new-tokens", "24", "--repeats", "1", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    (found,) = report["server"]["settings"]
    assert found["equal_to_plain"] == found["compared"] == 6
    local = report["settings"][0]["drafters"]["eagle3"]
    # The counters see rounds with drafts, here all; drafts accepted behind a reply's end count.
    assert found["tau_incl_bonus"] >= 0.99 * local["tau_incl_bonus"] > 1.5


@pytest.mark.full
def test_the_key_is_asked_for_and_a_stop_is_clean(tmp_path: Path) -> None:
    """The key comes from a file, so that nobody sees it in the list of processes; the host is
    another name for this machine."""
    (tmp_path / "key").write_text("secret\n")
    said: list[str] = []
    options = ["--api-key-file", str(tmp_path / "key"), "--host", "LOCALHOST"]
    process, address = started(*options, said=said)
    try:
        assert "secret" not in " ".join(psutil.Process(process.pid).cmdline())
        right = {"Authorization": "Bearer secret"}
        for path in ("/v1/models", "/v1/models/target", "/metrics"):
            assert httpx.get(address + path).status_code == 401
            wrong = httpx.get(address + path, headers={"Authorization": "Bearer wrong"})
            assert wrong.status_code == 401
            assert wrong.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(address + path, headers=right).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "a"}).status_code == 401
        listed = httpx.get(f"{address}/v1/models", headers=right).json()["data"]
        assert [entry["id"] for entry in listed] == ["target", "target:plain"]
        for path in ("/", "/health", "/version"):
            answer = httpx.get(address + path)
            assert answer.status_code == 200 and "scripts/" not in answer.text
        for host, status in (("evil.example", 400), ("localhost", 200), ("LOCALHOST:80", 200)):
            answer = httpx.get(f"{address}/health", headers={"Host": host})
            assert answer.status_code == status, host
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert not psutil.pid_exists(process.pid)
    assert not any("everybody" in line for line in said)


@pytest.mark.full
def test_sigterm_ends_the_server_with_its_own_status() -> None:
    process, _ = started()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM


LOCAL = ["127.0.0.1", "localhost", "LOCALHOST", "127.1", "127.0.1.1", "::1", "0:0:0:0:0:0:0:1"]


@pytest.mark.parametrize("host", [*LOCAL, "0.0.0.0", "::"])
def test_loopback_address_accepts_every_local_host_name(host: str) -> None:
    """What counts is the address at which the server listens, not what the user called it."""
    with listen(host, 0) as bound:
        hosts = hosts_of(bound.getsockname()[0], host)
    if host not in LOCAL:
        assert hosts == ["*"]
        return
    assert {"localhost", "127.0.0.1", "[::1]"} <= {*hosts} and "*" not in hosts
    assert (f"[{host}]" if ":" in host else host) in hosts


def test_a_stop_ends_what_is_decoded_with_an_answer() -> None:
    """The server listens everywhere here, of which it warns where there is no key."""
    said: list[str] = []
    process, address = started("--host", "0.0.0.0", said=said)
    assert "everyone who can reach this machine" in said[0], said
    assert address.startswith("http://127.0.0.1:")
    body = chat("def f():", max_tokens=900) | {"ignore_eos": True}
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(httpx.post, f"{address}/v1/chat/completions", json=body, timeout=60)
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        answer = asked.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server is stopping"
    assert process.wait(timeout=60) == 0


def test_mistakes_end_before_the_target_is_loaded(server: Running, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "two lines").write_text("a\nb")
    port = server.address.rpartition(":")[2]
    cases = [
        (["--port", port], f"cannot listen on 127.0.0.1, port {port}"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--drafter", "eagel"], "eagel is not a drafter"),
        (["--profile", "no-such-file"], "no-such-file"),
        (["--api-key-file", str(tmp_path / "empty")], "is empty; write the key into it"),
        (["--api-key-file", str(tmp_path / "two lines")], "characters that cannot be sent"),
        (["--api-key-file", "no-such-file"], "cannot read --api-key-file no-such-file"),
    ]
    for options, said in cases:
        done = run_cli("serve", "--target", str(QUICKSTART), *options)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
