"""Prompt sets as people store them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import datasets
import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.api import load
from draftsmith.inference.conversations.prompts import check_room, read_prompts
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT

SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench_question.jsonl"


def test_spec_bench_file_has_480_questions_in_13_categories(quickstart: Target) -> None:
    """480 questions of 13 categories (MT-Bench's eight, translation, summarisation, QA, math, RAG),
    80 with two turns."""
    if not SPEC_BENCH.is_file():
        pytest.skip("../shared/data/spec_bench_question.jsonl is not there")
    prompts = read_prompts(SPEC_BENCH, quickstart.tokenizer, quickstart.name)
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) == 480 and len(counts) == 13
    assert {
        counts[name] for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
    } == {80}
    assert sum(len(prompt.later) == 1 for prompt in prompts) == 80
    assert [prompt.place for prompt in prompts] == list(range(480)) and prompts[0].id == "81"


def test_prompts_are_read_from_parquet_logs_and_folders(quickstart: Target, tmp_path: Path) -> None:
    rows = [
        {"prompt_id": i, "category": "code", "prompt": [f"def a{i}():", "def b():"]}
        for i in range(2)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    asked = {"messages": [{"role": "user", "content": "def a0():"}]}
    answered = {"choices": [{"message": {"role": "assistant", "content": "pass"}}]}
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"request": asked, "response": answered, "id": "log"}) + "\n"
    )
    prompts = read_prompts(tmp_path, quickstart.tokenizer, quickstart.name)
    assert [prompt.later for prompt in prompts] == [["def b():"], ["def b():"], []]
    assert prompts[2].id == "log" and prompts[2].token_ids == prompts[0].token_ids, (
        "up to the reply, which is not read"
    )
    assert len(read_prompts(tmp_path, quickstart.tokenizer, quickstart.name, limit=1)) == 1


def test_a_limit_draws_evenly_from_all_categories(
    quickstart: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is sorted by category: three of each, in the order of the file."""
    rows = [
        {"prompt": f"def {category}{i}():", "category": category}
        for category, count in (("chat", 50), ("code", 50), ("math", 2))
        for i in range(count)
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO"):
        prompts = read_prompts(path, quickstart.tokenizer, quickstart.name, limit=8)
    assert [prompt.category for prompt in prompts] == ["chat"] * 3 + ["code"] * 3 + ["math"] * 2
    assert "8 of the 102 rows of" in caplog.text and "3 chat, 3 code, 2 math" in caplog.text
    assert [prompt.place for prompt in prompts] == list(range(8))
    numbers = [int(prompt.id.rpartition(":")[2]) for prompt in prompts]
    assert numbers == sorted(numbers) and numbers[:3] != [1, 2, 3]
    fewer = read_prompts(path, quickstart.tokenizer, quickstart.name, limit=4)
    assert {prompt.id for prompt in fewer} < {prompt.id for prompt in prompts}


def test_rows_of_one_id_or_prompt_are_one_unit(quickstart: Target, tmp_path: Path) -> None:
    rows = [{"prompt": "def f():", "id": i // 2} for i in range(4)] + [{"prompt": "def f():"}] * 2
    rows += [{"prompt": "def g():", "id": 8}, {"prompt": "def h():", "id": 8}, {"prompt": "x"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(tmp_path, quickstart.tokenizer, quickstart.name)
    assert [prompt.unit for prompt in prompts] == [0] * 6 + [6, 6, 8]


@pytest.mark.parametrize("row", [{"prompt": ["a", 3]}, {"turns": []}, {"prompt": []}])
def test_malformed_turns_are_named(
    quickstart: Target, tmp_path: Path, row: dict[str, object]
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="row p.jsonl:1"):
        read_prompts(tmp_path / "p.jsonl", quickstart.tokenizer, quickstart.name)


def test_a_prompt_without_room_is_named(quickstart: Target, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "x", "prompt": "a b c"}) + "\n")
    prompts = read_prompts(tmp_path / "p.jsonl", quickstart.tokenizer, quickstart.name)
    check_room(prompts, len(prompts[0].token_ids) + 1)
    with pytest.raises(UserError, match="prompt x has"):
        check_room(prompts, len(prompts[0].token_ids))


def test_arguments_of_the_template_are_for_all_rows_and_a_rows_own_win(
    quickstart: Target, tmp_path: Path
) -> None:
    """Thinking on and off, for one; the Python API renders words in the same way."""
    tokenizer = copy.deepcopy(quickstart.tokenizer)
    tokenizer.chat_template = "{% if enable_thinking %}think {% endif %}" + tokenizer.chat_template
    asked = {"messages": [{"role": "user", "content": "def f():"}]}
    path = tmp_path / "p.jsonl"
    rows = [asked, asked | {"chat_template_kwargs": {"enable_thinking": False}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, _ = read_prompts(path, tokenizer, "t")
    think, own = read_prompts(path, tokenizer, "t", template_kwargs={"enable_thinking": True})
    assert own.token_ids == plain.token_ids
    assert tokenizer.decode(think.token_ids) == "think " + tokenizer.decode(plain.token_ids)

    target = copy.copy(quickstart)
    target.tokenizer = tokenizer
    decoder = load(target)
    assert decoder.encode("def f():", template_kwargs={"enable_thinking": True}) == think.token_ids
    assert decoder.encode("def f():") == plain.token_ids
