"""Rows in the formats of other projects: read keys, learned texts, and remarks about the rest."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.inference.conversations.rows import SourceNotes
from draftsmith.inference.conversations.sources import rows_of
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.templates import Encoded, encode
from tests.conftest import make_tokenizer
from tests.helpers.published_templates import files, read
from tests.helpers.row_formats import ANSWERED, ASKED, BRIEF, REFUSED, REPLY, ROWS, USER

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_with(template: str, special: list[str], eos: str) -> Any:
    tokenizer: Any = make_tokenizer(special, template, eos)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


QWEN25 = tokenizer_with(files()["qwen2_5"].read_text(), CHATML, "<|im_end|>")
QWEN3 = tokenizer_with(files()["qwen3"].read_text(), CHATML, "<|im_end|>")


def encoded(row: Any, tokenizer: Any = QWEN25, notes: SourceNotes | None = None) -> list[Encoded]:
    ends = frozenset({tokenizer.eos_token_id})
    return encode(conversation_of(row), tokenizer, ends, "x", {}, notes)


def shown(row: Any, tokenizer: Any = QWEN25, notes: SourceNotes | None = None) -> str:
    """The row as training sees it, with [[ ]] around what is learned, without line breaks."""
    parts = []
    for part in encoded(row, tokenizer, notes):
        text, on = "", False
        for token, learned in zip(part.token_ids, part.mask, strict=True):
            text += ("[[" if learned else "]]") if learned != on else ""
            text, on = text + tokenizer.decode([token]), learned
        parts.append(text + ("]]" if on else ""))
    return " ## ".join(parts).replace("\n", "")


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_projects_are_read_as_intended(name: str) -> None:
    row, expected = ROWS[name]
    assert shown(row) == expected


def test_turns_of_mt_bench_are_prompts() -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["one", "three"], "reference": []}
    found = conversation_of(row)
    assert found.messages == [USER] and found.later == ["three"]
    row = {"prompt_id": 5, "category": "x", "prompt": ["one", "three"], "reference": ["two"]}
    assert conversation_of(row) == conversation_of({**row, "turns": row["prompt"]}) or (
        conversation_of(row).later == ["three"]
    )


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_row_that_is_not_to_be_learned_is_not(key: str) -> None:
    for row in ({"messages": [USER, REPLY]}, {"text": "two"}, {"prompt": "one", "completion": "a"}):
        found = conversation_of({**row, key: 0})
        assert found.learns_nothing()
        assert not any(any(part.mask) for part in encoded({**row, key: 0}))
        assert any(any(part.mask) for part in encoded({**row, key: 1}))


def test_keys_that_nothing_reads_are_named_once() -> None:
    notes = SourceNotes()
    for _ in range(2):
        shown(
            {
                "messages": [{**USER, "mood": "calm"}, {**REPLY, "weight": 1, "score": 3}],
                "id": 1, "weight": 2, "lang": "en", "rejected": None,
            },
            notes=notes,
        )  # fmt: skip
    assert notes.lines() == [
        "ignored keys: lang, weight, mood of messages of the user, "
        "score of messages of the assistant"
    ]


def test_reasoning_that_history_leaves_out_is_noted_once() -> None:
    notes = SourceNotes()
    row = {"messages": [USER, {**REPLY, "reasoning": "why"}, USER, {**REPLY, "reasoning": "how"}]}
    first, second = shown(row, QWEN3, notes).split(" ## ")
    assert first.endswith("[[<think>why</think>two<|im_end|>]]") and "why" not in second
    assert second.endswith("[[<think>how</think>two<|im_end|>]]")
    (line,) = notes.lines()
    assert line.startswith("the chat template leaves out the reasoning of earlier turns")


CALL = {"function": {"name": "rain", "arguments": {"town": "Bern", "days": 2}}}
AS_TEXT = {"function": {"name": "rain", "arguments": '{"town": "Bern", "days": 2}'}}
CALLED = (
    '[[<tool_call>{"name": "rain", "arguments": {"town": "Bern", "days": 2}}</tool_call>'
    "<|im_end|>]]"
)


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [CALL]},
        {"content": "", "tool_calls": [AS_TEXT]},
        {"tool_calls": [{**AS_TEXT, "id": "call_7", "type": "function", "index": 0}]},
        {"content": None, "function_call": AS_TEXT["function"]},
        {"tool_calls": json.dumps([CALL])},
    ],
)
def test_tool_calls_are_learned_equally_in_every_format(message: dict[str, Any]) -> None:
    row = {"messages": [USER, {"role": "assistant", **message}]}
    assert shown(row) == ASKED + CALLED
    speakers = [{"from": "human", "value": "one"}]
    speakers.append({"from": "function_call", "value": json.dumps(CALL["function"])})
    assert shown({"conversations": speakers}) == ASKED + CALLED


def test_tools_are_read_in_every_form() -> None:
    function = {"name": "rain", "description": "tells", "parameters": {"type": "object"}}
    anthropic = {"name": "rain", "description": "tells", "input_schema": {"type": "object"}}
    whole = [{"type": "function", "function": function}]
    texts = [
        shown({"messages": [USER, REPLY], key: tools})
        for key, tools in (
            ("tools", whole),
            ("tools", json.dumps(whole)),
            ("tools", [function]),
            ("tools", [anthropic]),
            ("functions", [function]),
        )
    ]
    assert len({*texts}) == 1 and '"name": "rain", "description": "tells"' in texts[0]
    assert shown({"messages": [USER, REPLY], "tools": "[]"}) == ANSWERED


@pytest.mark.parametrize(("row", "says"), REFUSED)
def test_what_is_not_read_is_refused_by_the_fields_name(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError, match=f"^{says}|{says}"):
        conversation_of(row)


def test_a_call_that_is_not_json_is_refused_where_the_template_wants_an_object() -> None:
    function = {"name": "rain", "arguments": '{"town": "Be'}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]}
    with pytest.raises(RowError, match=r"^messages\[1\].tool_calls\[0\].function.arguments: "):
        shown(row)


RAIN = {"name": "rain", "description": "tells", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}}}  # fmt: skip
SUN = {"name": "sun", "parameters": {
    "type": "object", "properties": {"hours": {"type": "integer", "minimum": 1}}}}  # fmt: skip
CONTAINED: list[dict[str, Any]] = [
    {"messages": [{**USER, "name": "Ann"}, {**REPLY, "tool_calls": []}],
     "tools": None, "finish_reason": None},
    {
        "messages": [
            BRIEF,
            USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_7", "type": "function", **CALL}]},
            {"role": "tool", "tool_call_id": "call_7", "content": "no"},
            {**REPLY, "reasoning_content": "thus"},
        ],
        "tools": [
            {"type": "function", "function": RAIN},
            {"type": "function", "function": SUN},
        ],
        "finish_reason": "length",
    },
    {"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": {
        "name": "sun", "arguments": {"hours": 3}}}]}]},
]  # fmt: skip


def test_a_row_is_the_same_in_every_container(tmp_path: Path) -> None:
    """Arrow fills a table's absent keys with nulls, at every depth."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CONTAINED))
    (tmp_path / "a.json").write_text(json.dumps(CONTAINED))
    data = datasets.Dataset.from_list(CONTAINED)
    data.to_parquet(str(tmp_path / "a.parquet"))
    expected = [encoded(row, QWEN3) for row in CONTAINED]
    assert [len(parts) for parts in expected] == [1, 1, 1]
    for name in ("a.jsonl", "a.json", "a.parquet"):
        found = [encoded(row, QWEN3) for _, row in rows_of(str(tmp_path / name))]
        assert found == expected, name
    assert [encoded(row, QWEN3) for row in data] == expected
    streamed = data.to_iterable_dataset()
    assert [encoded(row, QWEN3) for row in streamed] == expected


def test_plain_text_has_one_beginning_and_one_end(quickstart: Target) -> None:
    """Of a tokenizer that adds both to every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(quickstart.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A <|end|>",
        pair="<|system|> $A <|end|> $B",
        special_tokens=[("<|system|>", 2), ("<|end|>", 1)],
    )
    assert shown({"prompt": "def f():", "completion": " pass"}, tokenizer) == (
        "<|system|>def f():[[ pass<|end|>]]"
    )
    assert shown({"text": "def f():"}, tokenizer) == "<|system|>[[def f():<|end|>]]"
    assert shown({"text": "def f():<|end|>"}, tokenizer) == "<|system|>[[def f():<|end|>]]"
    rendered = {"prompt": "<|system|><|user|>x<|end|><|assistant|>", "completion": "y"}
    assert shown(rendered, tokenizer) == ("<|system|><|user|>x<|end|><|assistant|>[[y<|end|>]]")
    text = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
    with pytest.raises(RowError, match="already rendered by a chat template; write its turns as"):
        shown({"id": "1", "text": text}, tokenizer)


def asked_and(*replies: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [USER, *({"role": "assistant", **reply} for reply in replies)], **row}


def learned(name: str, row: dict[str, Any]) -> str:
    """Learned text of a row with a published template."""
    return read(name, row)[1]


def test_a_text_that_is_rendered_already_is_refused_unless_it_is_a_prompt() -> None:
    prompt = "<|start|>user<|message|>a<|end|><|start|>assistant"
    with pytest.raises(RowError, match="already rendered"):
        learned("gptoss", {"text": prompt + "<|channel|>final<|message|>b<|return|>"})
    completion = {"prompt": prompt, "completion": "<|channel|>final<|message|>b<|return|>"}
    assert learned("gptoss", completion) == "<|channel|>final<|message|>b<|return|>"


def test_special_tokens_in_unrecognised_plain_text_are_noted() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}"
    tokenizer = tokenizer_with(template, ["<p>", "<e>"], "<e>")
    notes = SourceNotes()
    encoded({"text": "user: a<e>assistant: b<e>"}, tokenizer, notes)
    assert "holds special tokens" in notes.lines()[0]


def test_the_end_of_a_completion_is_one_that_ends_generation() -> None:
    tokenizer = tokenizer_with("", ["<p>", "<text>", "<turn>"], "<text>")
    for row in ({"prompt": "x", "completion": "a"}, {"prompt": "x", "completion": "a<turn>"}):
        (part,) = encode(conversation_of(row), tokenizer, frozenset({2}), "x", {})
        assert tokenizer.decode(part.token_ids) == "xa<turn>" and part.mask == [False, True, True]


def test_empty_reasoning_and_tool_calls_are_ignored() -> None:
    row = asked_and({"content": "<think>x</think>y", "reasoning_content": ""})
    assert learned("qwen3", row) == "<think>\nx\n</think>\n\ny<|im_end|>"
    assert learned("qwen3", asked_and({"content": "y", "tool_calls": ""})) == "y<|im_end|>"


def test_harmony_calls_with_reasoning_are_learned_as_generated() -> None:
    """The template drops the reasoning before a call when the last reply follows."""
    call = {"content": None, "tool_calls": [{**CALL, "id": "c"}], "reasoning": "why"}
    row = asked_and(call)
    row["messages"].append({"role": "tool", "tool_call_id": "c", "content": 'it "rains"'})
    row["messages"].append({"role": "assistant", "content": "fine", "reasoning": "so"})
    text = learned("gptoss", row)
    assert text.startswith("<|channel|>analysis<|message|>why<|end|>") and "rains" not in text
    assert text.endswith("analysis<|message|>so<|end|><|start|>assistant<|channel|>final"
                         "<|message|>fine<|return|>")  # fmt: skip


@pytest.mark.parametrize("name", ["lfm2_v2", "lfm2_2_5_vl", "qwen2_5", "qwen3_6", "glm4moe"])
@pytest.mark.parametrize(
    "value",
    [
        "what's new",
        'if x:\n\tprint("a")',
        "a\\b",
        "<b>&</b>",
        "\U0001f600 \u4f60",
        [1] * 400,
        1e-05,
    ],
)
def test_arguments_of_any_kind_are_found(name: str, value: Any) -> None:
    function = {"name": "rain", "arguments": {"q": value}}
    assert learned(name, asked_and({"tool_calls": [{"function": function, "id": "c"}]}))


def test_contents_that_a_template_escapes_are_found() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content|e }}<e>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = tokenizer_with(template, ["<p>", "<e>"], "<e>")
    assert shown(asked_and({"content": "x < y && 'z'"}), tokenizer).endswith(
        "[[x &lt; y &amp;&amp; &#39;z&#39;<e>]]"
    )


def test_arguments_are_a_text_where_an_object_is_written_as_python() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    template += "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    template += "{{ c.function.arguments }}{% endfor %}<e>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = tokenizer_with(template, ["<p>", "<e>"], "<e>")
    for call in (CALL, AS_TEXT):
        assert shown(asked_and({"tool_calls": [call]}), tokenizer).endswith(
            '[[rain{"town": "Bern", "days": 2}<e>]]'
        )


def test_parts_that_repeat_each_other_are_found() -> None:
    parts = [{"type": "text", "text": text} for text in ("The cat", "s. The cat")]
    assert (
        learned("qwen3_5_nothink", asked_and({"content": parts})) == "The cats. The cat<|im_end|>"
    )


def test_a_mask_counts_the_messages_that_are_given() -> None:
    row = {**asked_and({"content": "two"}, {"content": "four"}), "system": "be brief"}
    row["messages"].insert(2, USER)
    assert "[[four" in shown({**row, "loss_mask": [0, 0, 0, 1]})
    with pytest.raises(RowError, match="loss_mask must have a 0 or a 1 for each"):
        shown({**row, "loss_mask": [0, 0, 0, 0, 1]})


def test_white_space_of_a_tokenizer_that_trims_its_offsets_is_learned() -> None:
    from tokenizers.processors import ByteLevel

    tokenizer = copy.deepcopy(QWEN25)
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    row = asked_and({"content": "a\n\nb  c\n    d"})
    whole = shown(row, QWEN25).partition("[[")[2]
    assert shown(row, tokenizer).partition("[[")[2] == whole
