"""The target writes the replies: token-exact, resumable, in this process and through a server."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands.regenerate import RegenerateOptions as Options
from draftsmith.commands.regenerate import ServerOptions, Share, run
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.sources import rows_of as read_rows
from draftsmith.inference.targets.target import load_target
from draftsmith.train.data import replies
from draftsmith.train.data.regeneration import questions, repair
from draftsmith.train.data.templates import encode
from tests.conftest import tiny_target
from tests.helpers.published_templates import tokenizer_of
from tests.helpers.regeneration import alone
from tests.helpers.rows import write

ROWS = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(5)]
TURNS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "two"},
    ]
}
GREEDY = Sampling()


def options(
    folder: Path,
    target: Path,
    rows: list[Any],
    sampling: Sampling = GREEDY,
    length: int = 12,
    **more: Any,
) -> Options:
    config, data = TargetConfig(str(target), device="cpu"), write(folder / "in.jsonl", rows)
    return Options(config, data, str(folder / "out.jsonl"), length, sampling, **more)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_batched_replies_equal_those_written_alone_token_for_token(
    tmp_path: Path, saved_tiny: Path
) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    uneven = [{"messages": [{"role": "user", "content": "the " * (1 + 3 * i)}]} for i in range(6)]
    run(options(tmp_path, saved_tiny, uneven, batch_size=4))
    for row in rows_of(tmp_path):
        ((start, end),) = row["response_spans"]
        assert row["token_ids"][start:end] == alone(target, row["token_ids"][:start], 12)
        assert row["regenerated"]["sampling"]["temperature"] == 0


def test_the_tokens_that_were_written_are_the_tokens_that_are_learned(
    tmp_path: Path, saved_tiny: Path
) -> None:
    run(options(tmp_path, saved_tiny, ROWS, Sampling(1.0)))
    for row in rows_of(tmp_path):
        (part,) = encode(conversation_of(row), None, frozenset(), "x", {})
        ((start, end),) = row["response_spans"]
        assert part.token_ids == row["token_ids"]
        assert [i for i, m in enumerate(part.mask) if m] == list(range(start, end))


def test_recommended_sampling_is_reported_when_sampling_differs(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "target"
    shutil.copytree(saved_tiny, target)
    file = target / "generation_config.json"
    recommended = {"do_sample": True, "top_k": 64, "top_p": 0.95}
    file.write_text(json.dumps(json.loads(file.read_text()) | recommended))
    for sampling, length in ((GREEDY, 12), (Sampling(1.0), 2)):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        run(options(tmp_path, target, ROWS[:1], sampling, length))
        said = "recommends sampling with top_k=64, top_p=0.95" in caplog.text
        assert said == (sampling is not GREEDY)


def test_every_turn_is_rewritten_and_sees_the_new_turns_before_it(
    tmp_path: Path, saved_tiny: Path
) -> None:
    folder = tmp_path / "target"
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    target.model.generation_config.eos_token_id = [1, *range(100, 250)]  # replies of a few tokens
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    run(options(tmp_path, folder, [TURNS], Sampling(1.0), 200))
    rows = rows_of(tmp_path)
    said = rows[-1]["messages"]
    assert [m["role"] for m in said][:3] == ["user", "assistant", "user"] and said[1][
        "content"
    ] != "OLD"
    assert "OLD" not in json.dumps(rows)
    last = rows[-1]
    start, end = last["response_spans"][-1]
    rendered = target.tokenizer.apply_chat_template(
        said[:3], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert last["token_ids"][:start] == rendered and end == len(last["token_ids"])


def test_replies_are_wanted_where_the_assistant_spoke_and_at_the_end() -> None:
    def roles(text: str) -> list[str]:
        names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        return [
            "".join(m["role"][0] for m in part)
            for part in questions([{"role": names[c]} for c in text])
        ]

    assert roles("u") == ["u"] and roles("sua") == ["su"]
    assert roles("suaua") == ["su", "u"] and roles("uuau") == ["uu", "u"]
    assert roles("uatau") == ["u"], "a tool's result belongs to a call that is not made any more"


def test_killed_run_resumes_after_the_last_whole_conversation(
    tmp_path: Path, saved_tiny: Path
) -> None:
    run(options(tmp_path, saved_tiny, ROWS))
    whole = (tmp_path / "out.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    run(options(tmp_path, saved_tiny, ROWS))
    assert sorted(rows_of(tmp_path), key=lambda r: r["id"]) == sorted(
        (json.loads(x) for x in lines), key=lambda r: r["id"]
    )
    run(options(tmp_path, saved_tiny, ROWS))
    assert len(rows_of(tmp_path)) == 5


def test_shares_are_disjoint_and_a_lost_one_spreads_over_another_number_of_workers() -> None:
    tasks: Any = list(range(6400))

    def parts(of_all: int) -> list[list[Any]]:
        return [Share(i, of_all, Path("x")).part_of(tasks) for i in range(of_all)]

    before, after = parts(64), parts(32)
    assert sorted(task for part in before for task in part) == tasks and {
        len(part) for part in before
    } == {100}
    assert all(part == sorted(part) for part in before)
    # 100 conversations were lost with share 5 of 64. Each of 32 workers gets about three of them.
    assert max(len(set(part) & set(before[5])) for part in after) <= 12
    assert parts(1) == [tasks]


def test_other_workers_finish_what_a_lost_one_left(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(7)]
    run(options(tmp_path, saved_tiny, rows))
    alone = {row["id"]: row for row in rows_of(tmp_path)}
    shares = tmp_path / "shares"

    def work(share: str) -> list[str]:
        """The share of one worker; return the ids in its file."""
        asked = options(tmp_path, saved_tiny, rows, share=share)
        asked.out = str(shares)
        run(asked)
        number, of_all = share.split("/")
        written = shares / f"share-000{number}-of-000{of_all}.jsonl"
        return [json.loads(line)["id"] for line in written.read_text().splitlines()]

    # Of three workers the first has three conversations, the second is lost in its second one, and
    # the third, which has two, does not begin.
    first = work("0/3")
    answered, second = work("1/3")
    assert len(first) == 3
    lost = shares / "share-0001-of-0003.jsonl"
    lines = lost.read_text().splitlines(keepends=True)
    lost.write_text(lines[0] + lines[1][:20])
    # Two workers divide what is left. Nobody touches the others' files.
    again = work("0/2") + work("1/2")
    assert second in again and sorted([*again, *first, answered]) == sorted(alone)
    assert lost.read_text() == lines[0] + lines[1][:20]
    # A single worker reads the others' files too, and has nothing left to answer.
    last = options(tmp_path, saved_tiny, rows, share="0/1")
    last.out = str(shares)
    run(last)
    assert not (shares / "share-0000-of-0001.jsonl").exists()
    # As training reads the folder: without the line that was not finished.
    found = [row for _, row in read_rows(str(shares))]
    assert "share-0001-of-0003.jsonl: the last line was not finished" in caplog.text
    assert len(found) == 7 and {row["id"]: row for row in found} == alone
    # A worker that was killed in its first line goes on with its own share.
    lost.write_text(lines[0][:20])
    assert work("1/3") == [answered]

    with pytest.raises(UserError, match="was written with sampling"):
        run(
            Options(
                TargetConfig(str(saved_tiny), device="cpu"),
                str(tmp_path / "in.jsonl"),
                str(shares),
                12,
                Sampling(0.5),
                share="0/5",
            )
        )
    for share in ("3/3", "1", "-1/2", "a/b", "0/0"):
        with pytest.raises(UserError, match="write number/workers"):
            options(tmp_path, saved_tiny, rows, share=share)
    with pytest.raises(UserError, match="it is a file; name a folder"):
        run(options(tmp_path, saved_tiny, rows, share="0/2"))


def test_parts_of_an_unfinished_conversation_are_dropped(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    a = '{"id": "a", "last_part": true, "regenerated": {}}\n'
    out.write_text(a + '{"id": "b", "part": 0, "last_part": false, "regenerated": {}}\n')
    assert repair(out).ids == {"a"}
    assert out.read_text() == a


def test_another_file_is_not_taken_for_output(tmp_path: Path) -> None:
    for text in (
        "my notes\n",
        "my notes",
        '{"messages": []}\n',
        "3\n",
        '{"id": 1, "last_part": true}\n',
    ):
        (tmp_path / "notes.txt").write_text(text)
        with pytest.raises(UserError, match="not a file that this command wrote"):
            repair(tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == text


def test_replies_of_two_samplings_or_targets_do_not_end_up_in_one_file(
    tmp_path: Path, saved_tiny: Path
) -> None:
    run(options(tmp_path, saved_tiny, ROWS[:2]))
    with pytest.raises(UserError, match="was written with sampling"):
        run(options(tmp_path, saved_tiny, ROWS, Sampling(0.5)))
    other = tiny_target(seed=4)
    shutil.copytree(saved_tiny, tmp_path / "t")
    other.model.save_pretrained(tmp_path / "t")
    moved = options(tmp_path, saved_tiny, ROWS)
    (tmp_path / "out.jsonl").write_text(
        (tmp_path / "out.jsonl").read_text().replace(str(saved_tiny), str(tmp_path / "t"))
    )
    moved.target.path = str(tmp_path / "t")
    with pytest.raises(UserError, match="was written with weights_hash"):
        run(moved)


def test_same_target_under_two_paths_continues_one_file(
    tmp_path: Path, saved_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved_tiny, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    run(options(tmp_path, saved_tiny, ROWS[:2]))
    for rows in (ROWS[:3], ROWS[:3]):  # some are left, and none
        run(options(tmp_path, Path("here"), rows))
        assert len(rows_of(tmp_path)) == 3
    other = tiny_target(seed=4)
    other.model.save_pretrained(tmp_path / "here")
    with pytest.raises(UserError, match="was written with weights_hash"):
        run(options(tmp_path, tmp_path / "here", ROWS[:3]))


def test_a_long_prompt_takes_no_room_from_a_short_one(tmp_path: Path, saved_tiny: Path) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    fits = target.max_positions
    rows = [{"text": "the " * 3}, {"text": "the " * (fits - 7)}]
    run(options(tmp_path, saved_tiny, rows, GREEDY, 20))
    written = [row["response_spans"][0] for row in rows_of(tmp_path)]
    lengths = sorted(end - start for start, end in written)
    assert max(end for _, end in written) == fits and lengths == [fits - max(written)[0], 20]


def test_a_reply_does_not_depend_on_the_batch_that_it_is_drawn_in(
    tmp_path: Path, saved_tiny: Path
) -> None:
    drawn = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=3)
    texts = []
    for size in (1, 2, 32):
        folder = tmp_path / str(size)
        folder.mkdir()
        run(options(folder, saved_tiny, [*ROWS, TURNS], drawn, batch_size=size))
        texts.append({row["id"]: row["token_ids"] for row in rows_of(folder)})
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(ids) for ids in texts[0].values()}) == 6


def test_a_row_that_the_template_refuses_is_left_out_and_the_others_are_written(
    tmp_path: Path, saved_tiny: Path
) -> None:
    shutil.copytree(saved_tiny, tmp_path / "t")
    path = next((tmp_path / "t").glob("*.jinja"))
    path.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + path.read_text()
    )
    system = {"messages": [{"role": "system", "content": "x"}, *ROWS[0]["messages"]]}
    run(options(tmp_path, tmp_path / "t", [system, *ROWS[1:3]], bad_rows="skip"))
    assert len(rows_of(tmp_path)) == 2


def test_rows_of_one_id_are_kept_apart(tmp_path: Path, saved_tiny: Path) -> None:
    run(options(tmp_path, saved_tiny, [{**ROWS[0], "id": "x"}, {**ROWS[1], "id": "x"}]))
    assert sorted(r["id"] for r in rows_of(tmp_path)) == ["x", "x#2"]


class Engine:
    """A server in the OpenAI form around the real tiny target: now and then it fails, as servers
    do."""

    def __init__(self, folder: Path, token_ids: bool) -> None:
        self.target = load_target(TargetConfig(str(folder), device="cpu"))
        self.token_ids, self.requests, self.failures = token_ids, [], 2
        self.lock = threading.Lock()

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        with self.lock:
            self.requests.append(request)
            if self.failures:
                self.failures -= 1
                return None
            kwargs = request.get("chat_template_kwargs", {})
            prompt = self.target.tokenizer.apply_chat_template(
                request["messages"], add_generation_prompt=True, return_dict=True, **kwargs
            )["input_ids"]
            reply = alone(self.target, prompt, request["max_tokens"])
        text = self.target.tokenizer.decode([t for t in reply if t not in self.target.eos_ids])
        reason = "stop" if reply[-1] in self.target.eos_ids else "length"
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
        }
        if not self.token_ids:
            return {"choices": [choice]}
        return {"choices": [{**choice, "token_ids": reply}], "prompt_token_ids": prompt}


@pytest.fixture
def answering() -> Iterator[Any]:
    """A function that starts a server around an engine, and returns its address."""
    servers = []

    def start(engine: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = engine.answer(body)
                data = json.dumps(answer or {"error": "busy"}).encode()
                self.send_response(200 if answer else 503)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture
def serve(saved_tiny: Path, answering: Any) -> Any:
    def start(token_ids: bool = True) -> tuple[Engine, str]:
        engine = Engine(saved_tiny, token_ids)
        return engine, answering(engine)

    return start


def test_a_server_gives_the_same_rows_as_this_process(
    tmp_path: Path, saved_tiny: Path, serve: Any
) -> None:
    (tmp_path / "here").mkdir()
    run(options(tmp_path / "here", saved_tiny, [*ROWS, TURNS]))
    engine, url = serve()
    kwargs = {"enable_thinking": False}
    run(
        options(
            tmp_path,
            saved_tiny,
            [*ROWS, TURNS],
            server=ServerOptions(url, concurrency=3),
            chat_template_kwargs=kwargs,
        )
    )
    ours, theirs = ({r["id"]: r for r in rows_of(f)} for f in (tmp_path / "here", tmp_path))
    assert {k: r["token_ids"] for k, r in ours.items()} == {
        k: r["token_ids"] for k, r in theirs.items()
    }
    assert engine.failures == 0, "the failed requests were tried again"
    assert all(
        r["chat_template_kwargs"] == kwargs and r["return_token_ids"] for r in engine.requests
    )


def test_a_server_without_token_ids_leaves_text_to_learn_from(
    tmp_path: Path, saved_tiny: Path, serve: Any
) -> None:
    engine, url = serve(token_ids=False)
    run(options(tmp_path, saved_tiny, ROWS, server=ServerOptions(url)))
    assert all(
        "token_ids" not in r and r["messages"][-1]["role"] == "assistant" for r in rows_of(tmp_path)
    )
    tokenizer, ends = engine.target.tokenizer, engine.target.eos_ids
    assert "length" in {row["finish_reason"] for row in rows_of(tmp_path)}
    for row in rows_of(tmp_path):
        (part,) = encode(conversation_of(row), tokenizer, ends, "x", {})
        learned = [token for token, on in zip(part.token_ids, part.mask, strict=True) if on]
        assert (learned[-1] in ends) == (row["finish_reason"] == "stop")


def test_a_server_that_is_not_there_is_a_clear_error(
    tmp_path: Path,
    saved_tiny: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one line, not one for each request, says before it how long it is tried."""
    for pauses, said in (((0.0,), []), ((0.0, 1.0), ["trying for 1 s"])):
        monkeypatch.setattr(replies, "PAUSES_S", pauses)
        server = ServerOptions("http://127.0.0.1:9/v1")
        with pytest.raises(UserError, match="does not answer"):
            run(options(tmp_path, saved_tiny, ROWS, server=server))
        lines = [line for line in caplog.messages if "does not answer yet" in line]
        assert [line.split("; ")[1] for line in lines] == said


TOOLS = [
    {"type": "function", "function": {"name": "rain", "description": "tells of rain"}},
]
CALL = {"function": {"name": "rain", "arguments": '{"town": "Bern"}'}, "type": "function"}
SCRIPTED: dict[str, tuple[dict[str, Any], str, str]] = {
    # The message, why it ends, and the text that the target wrote, with its end token.
    "hello": ({"content": "I am fine", "tool_calls": []}, "stop", "I am fine<|im_end|>"),
    "think": (
        {"content": "fine", "reasoning": "the then"}, "stop",
        "<think>\nthe then\n</think>\n\nfine<|im_end|>",
    ),
    "cut": ({"content": None, "reasoning": "the then"}, "length", "<think>\nthe then"),
    "call": (
        {"content": None, "tool_calls": [{"id": "c1", **CALL}]}, "tool_calls",
        '<tool_call>\n{"name": "rain", "arguments": {"town": "Bern"}}\n</tool_call><|im_end|>',
    ),
}  # fmt: skip


class ScriptedEngine:
    """A server that answers each question with a message of `SCRIPTED`, and its token ids."""

    def __init__(self, tokenizer: Any, token_ids: bool) -> None:
        self.tokenizer, self.token_ids, self.requests = tokenizer, token_ids, list[Any]()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        message, reason, written = SCRIPTED[request["messages"][-1]["content"]]
        choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
        if not self.token_ids:
            return {"choices": [choice]}
        prompt = self.tokenizer.apply_chat_template(
            request["messages"],
            tools=request.get("tools"),
            add_generation_prompt=True,
            return_dict=True,
            **request.get("chat_template_kwargs", {}),
        )["input_ids"]
        ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        return {"choices": [{**choice, "token_ids": ids}], "prompt_token_ids": prompt}


def test_rows_of_text_are_learned_like_exact_ones(
    tmp_path: Path, saved_tiny: Path, answering: Any
) -> None:
    """With their tools and template arguments; what the target wrote and nothing else."""
    shutil.copytree(saved_tiny, tmp_path / "target")
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(tmp_path / "target")
    ask = {name: [{"role": "user", "content": name}] for name in SCRIPTED}
    rows = [
        {"id": "a", "messages": ask["hello"], "chat_template_kwargs": {"enable_thinking": False}},
        {"id": "b", "messages": ask["think"], "tools": TOOLS},
        {"id": "c", "messages": ask["cut"]},
        {"id": "d", "messages": ask["call"], "tools": TOOLS},
    ]
    found: list[dict[str, Any]] = []
    for token_ids in (True, False):
        engine = ScriptedEngine(tokenizer, token_ids)
        folder = tmp_path / str(token_ids)
        folder.mkdir()
        run(options(folder, tmp_path / "target", rows, server=ServerOptions(answering(engine))))
        found.append({row["id"]: row for row in rows_of(folder)})
    ends = frozenset({tokenizer.eos_token_id})
    for name, text in zip("abcd", SCRIPTED, strict=True):
        exact, as_text = (
            encode(conversation_of(rows[name]), tokenizer, ends, "x", {}) for rows in found
        )
        assert exact == as_text, text
        assert "token_ids" in found[0][name] and "token_ids" not in found[1][name]
    assert found[1]["b"]["tools"] == TOOLS
    assert found[1]["a"]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_call_ends_by_itself_and_ends_its_conversation(
    tmp_path: Path, saved_tiny: Path, answering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved_tiny, tmp_path / "target")
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(tmp_path / "target")
    asked = [{"role": "user", "content": "call"}, {"role": "assistant", "content": "no"}]
    rows = [{"messages": [*asked, {"role": "user", "content": "hello"}]}]
    engine = ScriptedEngine(tokenizer, False)
    with caplog.at_level("INFO"):
        run(options(tmp_path, tmp_path / "target", rows, server=ServerOptions(answering(engine))))
    (row,) = rows_of(tmp_path)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert len(engine.requests) == 1 and "0 without an end" in caplog.text


def test_rows_altered_by_the_template_are_refused_before_generation(
    tmp_path: Path, saved_tiny: Path
) -> None:
    """As training and doctor refuse them, by the name of the field."""
    rows = [{"messages": [{"role": "critic", "content": "harsh words"}, *ROWS[0]["messages"]]}]
    with pytest.raises(UserError) as refused:
        run(options(tmp_path, tokens_only(tmp_path, saved_tiny), rows))
    assert "messages[0].content: the chat template leaves out or changes 'harsh words'" in str(
        refused.value
    )
    assert not (tmp_path / "out.jsonl").exists()


def tokens_only(folder: Path, saved_tiny: Path) -> Path:
    """A target whose template leaves out what neither user nor assistant says."""
    shutil.copytree(saved_tiny, folder / "strict")
    path = next((folder / "strict").glob("*.jinja"))
    text = path.read_text()
    assert "{%- else -%}" in text
    path.write_text(text.replace("{%- else -%}", "{%- elif m['role'] == 'user' -%}"))
    return folder / "strict"


def test_replies_that_would_run_on_are_not_written(tmp_path: Path, saved_tiny: Path) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    target.model.generation_config.eos_token_id = [2]
    target.model.save_pretrained(tmp_path / "t")
    target.tokenizer.save_pretrained(tmp_path / "t")
    with pytest.raises(UserError, match="which does not end generation .* generation_config.json"):
        run(options(tmp_path, tmp_path / "t", ROWS))


def test_a_reply_that_the_template_cannot_carry_ends_its_conversation(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here one that it leaves out when the next turn is rendered; what was written stays."""
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    target.model.generation_config.eos_token_id = [1, *range(100, 250)]  # replies of a few tokens
    target.model.save_pretrained(tmp_path / "t")
    target.tokenizer.save_pretrained(tmp_path / "t")
    path = next((tmp_path / "t").glob("*.jinja"))
    assert "m['content'] + '<e>' }}{% endg" in path.read_text()
    path.write_text(path.read_text().replace("m['content'] + '<e>' }}{% endg", "'<e>' }}{% endg"))
    run(options(tmp_path, tmp_path / "t", [TURNS], Sampling(1.0), 200))
    (row,) = rows_of(tmp_path)
    assert "the next turn is left out: messages[1].content" in caplog.text
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["finish_reasons"] == ["stop"]


def test_truncated_replies_are_warned_about_when_they_are_written(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(options(tmp_path, saved_tiny, ROWS, GREEDY, 2))
    line = "5 of 5 replies were cut before their end, and no end token will be learned"
    assert line in caplog.text and "--max-new-tokens" in caplog.text
