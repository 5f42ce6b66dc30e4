"""The mask covers exactly what the assistant wrote and its end token, on real chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.formats import Conversation, conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.train.data.templates import Encoded, encode
from tests.conftest import MARKED_TEMPLATE, make_tokenizer
from tests.helpers.templates import GEMMA, MISTRAL, QWEN3

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] "
    "+ '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + "
    "content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>"
    "\n\n' }}{% endif %}"
)
TOKENIZERS = {
    "llama3": make_tokenizer(
        ["<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        LLAMA3,
        "<|eot_id|>",
        "<|begin|>",
    ),
    "mistral": make_tokenizer(["<s>", "</s>", "[INST]", "[/INST]"], MISTRAL, "</s>", "<s>"),
    "gemma": make_tokenizer(
        ["<bos>", "<end_of_turn>", "<start_of_turn>"], GEMMA, "<end_of_turn>", "<bos>"
    ),
    "qwen3": make_tokenizer(["<|im_start|>", "<|im_end|>"], QWEN3, "<|im_end|>"),
    "marked": make_tokenizer(["<p>", "<e>", "<u>", "<a>"], MARKED_TEMPLATE, "<e>"),
}
END = {
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "qwen3": "<|im_end|>",
    "marked": "<e>",
}
TURNS = [
    ("user", "hello there"),
    ("assistant", "I am fine"),
    ("user", "the then"),
    ("assistant", "thank you, the the"),
]


def encoded(
    name: str, messages: list[tuple[str, str]] | list[dict], **kwargs: Any
) -> list[Encoded]:
    tokenizer: Any = TOKENIZERS[name]
    dicts = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return encode(
        Conversation(messages=dicts), tokenizer, frozenset({tokenizer.eos_token_id}), name, kwargs
    )


def learned(name: str, part: Encoded) -> list[str]:
    """Texts of the runs that the mask covers."""
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(part.token_ids, part.mask, strict=True)):
        if on and (i == 0 or not part.mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [str(TOKENIZERS[name].decode(run)) for run in runs]


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma", "marked"])
def test_only_replies_and_their_end_tokens_are_learned(name: str) -> None:
    (part,) = encoded(name, TURNS)
    assert learned(name, part) == [f"I am fine{END[name]}", f"thank you, the the{END[name]}"]


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_user_text_equal_to_the_reply_is_not_learned(name: str) -> None:
    part = encoded(name, [("user", "I am fine"), ("assistant", "I am fine")])[-1]
    runs = learned(name, part)
    assert len(runs) == 1 and runs[0].endswith(f"I am fine{END[name]}")
    assert sum(part.mask) < len(part.mask) / 2 + 12


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_tokens_are_those_of_the_whole_rendering_cut_at_no_turn(name: str) -> None:
    part = encoded(name, TURNS)[0]
    text = TOKENIZERS[name].decode(part.token_ids)
    assert TOKENIZERS[name](text, add_special_tokens=False)["input_ids"] == part.token_ids


def test_qwen3_thinking_splits_turns_that_the_template_rewrites() -> None:
    """With thinking, the last reply is rendered with its thoughts and an earlier one without: two
    sequences. The empty thoughts before the second are the template's, and are not learned."""
    thinking = [
        TURNS[0],
        ("assistant", "<think>\nthe the\n</think>\n\nI am fine"),
        TURNS[2],
        TURNS[3],
    ]
    first, second = encoded("qwen3", thinking)
    assert learned("qwen3", first) == ["<think>\nthe the\n</think>\n\nI am fine<|im_end|>"]
    assert learned("qwen3", second) == ["thank you, the the<|im_end|>"]
    assert "the the\n</think>\n\nI am" not in TOKENIZERS["qwen3"].decode(second.token_ids)


def test_qwen3_without_thinking_learns_only_after_empty_thoughts() -> None:
    part = encoded("qwen3", TURNS[:2], enable_thinking=False)[0]
    assert learned("qwen3", part) == ["I am fine<|im_end|>"]
    assert "<think>\n\n</think>" in TOKENIZERS["qwen3"].decode(part.token_ids)


def test_tool_calls_are_learned_and_tool_results_are_not() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"x": 1}}}],
    }
    messages = [
        {"role": "user", "content": "hello"},
        call,
        {"role": "tool", "content": "fine"},
        {"role": "assistant", "content": "ok"},
    ]
    runs = [run for part in encoded("qwen3", messages) for run in learned("qwen3", part)]
    assert any('{"name": "look", "arguments": {"x": 1}}' in run for run in runs) and any(
        "ok<|im_end|>" in run for run in runs
    )
    assert not any("tool_response" in run for run in runs)


def test_a_row_that_the_template_refuses_is_malformed() -> None:
    with pytest.raises(RowError, match="System role not supported"):
        encoded("gemma", [("system", "x"), *TURNS])


def test_chat_data_needs_a_template_and_plain_text_does_not() -> None:
    bare = make_tokenizer(["<p>", "<e>"], None, "<e>")
    with pytest.raises(UserError, match="has no chat template"):
        encode(
            Conversation(messages=[{"role": "user", "content": "x"}]),
            bare,
            frozenset({1}),
            "bare",
            {},
        )
    (part,) = encode(Conversation(text="hello there"), bare, frozenset({1}), "bare", {})
    assert all(part.mask) and part.token_ids[-1] == 1
    (part,) = encode(
        Conversation(text="hello", completion=" there"), bare, frozenset({1}), "bare", {}
    )
    assert (
        bare.decode([i for i, m in zip(part.token_ids, part.mask, strict=True) if m]) == " there<e>"
    )


def test_exact_tokens_are_kept_unchanged() -> None:
    row = {"token_ids": [9, 8, 7, 6], "response_spans": [[2, 4]]}
    (part,) = encode(conversation_of(row), None, frozenset(), "x", {})
    assert part == Encoded([9, 8, 7, 6], [False, False, True, True])


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"messages": [{"role": "user", "content": "a", "name": None}]}, ["a"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a",
        "b"]),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, ["a", "b"]),
        ({"request": {"messages": [{"role": "user", "content": "a"}]},
          "response": {"choices": [{"message": {"role": "assistant", "content": "b"}}]}}, ["a",
          "b"]),
        ({"body": {"messages": [{"role": "user", "content": "a"}]},
          "response": {"body": {"choices": [{"message": {"role": "assistant", "content": "b"}}]}}},
          ["a", "b"]),
        ({"turns": ["a", "later"]}, ["a"]),
    ],
)  # fmt: skip
def test_formats_read_into_the_same_messages(row: dict, texts: list[str]) -> None:
    messages = conversation_of(row).messages
    assert messages is not None and [m["content"] for m in messages] == texts


@pytest.mark.parametrize("row", [3, {}, {"messages": []}, {"messages": [{"content": "x"}]},
{"conversations": [{"from": "x", "value": "y"}]},
                                 {"prompt": 3}, {"token_ids": [1], "response_spans": [[0, 5]]},
                                 {"request": {}}])  # fmt: skip
def test_malformed_rows_say_why(row: Any) -> None:
    with pytest.raises(RowError):
        conversation_of(row)


STRIPPED = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}<a>{{ "
    "m['content'] if loop.last else m['content'].split('</think>')[-1] }}<e>\n"
    "{%- else -%}<u>{{ m['content'] }}<e>{%- endif -%}{%- endfor -%}{%- if "
    "add_generation_prompt -%}<a>{%- endif -%}"
)


def test_reasoning_stripped_from_history_is_learned_separately() -> None:
    TOKENIZERS["stripped"] = make_tokenizer(["<p>", "<e>", "<u>", "<a>"], STRIPPED, "<e>")
    replies = ["the the</think>I am", "then</think>thank you"]
    first, second = encoded(
        "stripped",
        [TURNS[0], ("assistant", replies[0]), TURNS[2], ("assistant", replies[1])],
    )
    assert learned("stripped", first) == [f"{replies[0]}<e>"]
    assert learned("stripped", second) == [f"{replies[1]}<e>"]
    assert "<a>I am<e>" in TOKENIZERS["stripped"].decode(second.token_ids)


ENDLESS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}<a>{% else %}{{ "
    "m['content'] }}\n{% endif %}{% endfor %}"
)
TWO_ENDS = (
    "{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<a>' }}{{ m['content'] }}<e>\n"
    "{% endfor %}{% if add_generation_prompt %}<a>{% else %}<f>{% endif %}"
)


SIGNED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}<e> hello{% else %}<u>"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "reply", "written"),
    [
        (ENDLESS, "I am <p> fine", "I am <p> fine"),
        (ENDLESS, "I am <e> fine", "I am <e> fine"),
        (ENDLESS, "I am fine <e>", "I am fine <e>"),
        (MARKED_TEMPLATE, "I am <e> fine", "I am <e> fine<e>"),
        (MARKED_TEMPLATE, "I am <p> fine", "I am <p> fine<e>"),
        # A template may end its texts with another token than its turns.
        (TWO_ENDS, "I am fine", "I am fine<e>"),
        # Words of the template after the end token.
        (SIGNED, "I am fine", "I am fine<e>"),
        (SIGNED, "I am <e> fine", "I am <e> fine<e>"),
    ],
)
def test_special_tokens_in_a_reply_are_learned(template: str, reply: str, written: str) -> None:
    tokenizer: Any = make_tokenizer(["<p>", "<e>", "<u>", "<a>", "<f>"], template, "<e>")
    TOKENIZERS["special"] = tokenizer
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    messages.append({"role": "assistant", "content": reply})
    ends = frozenset(tokenizer.convert_tokens_to_ids(["<e>", "<f>"]))
    (part,) = encode(Conversation(messages=messages), tokenizer, ends, "x", {})
    assert learned("special", part) == [written]


def test_a_greeting_before_everything_is_not_learned() -> None:
    (part,) = encoded("marked", [("assistant", "hello"), *TURNS[:2]])
    assert learned("marked", part) == ["I am fine<e>"]
    assert encoded("marked", [("user", "hello")]) == []


ASKED = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "I am fine"}
TWICE = [ASKED, SAID, ASKED, SAID]


@pytest.mark.parametrize(
    ("row", "written"),
    [
        ({"messages": TWICE, "finish_reason": "length"}, ["I am fine<e>", "I am fine"]),
        ({"messages": TWICE, "finish_reason": "stop"}, ["I am fine<e>", "I am fine<e>"]),
        ({"prompt": [ASKED], "completion": [SAID], "finish_reason": "length"}, ["I am fine"]),
        ({"prompt": "hello", "completion": " I am", "finish_reason": "length"}, [" I am"]),
        ({"prompt": "hello", "response": " I am"}, [" I am<e>"]),
        ({"text": "I am fine", "finish_reason": "length"}, ["I am fine"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "I am"}],
          "finish_reason": "length"}, ["I am"]),
        ({"request": {"messages": [ASKED]},
          "response": {"choices": [{"message": SAID, "finish_reason": "length"}]}}, ["I am fine"]),
        ({"body": {"messages": [ASKED]},
          "response": {"body": {"choices": [{"message": SAID, "finish_reason": "length"}]}}},
          ["I am fine"]),
        ({"body": {"messages": [ASKED]},
          "response": {"body": {"choices": [{"message": SAID, "finish_reason": "stop"}]}}},
          ["I am fine<e>"]),
    ],
)  # fmt: skip
def test_no_end_is_learned_of_a_reply_that_was_cut_short(row: dict, written: list[str]) -> None:
    tokenizer: Any = TOKENIZERS["marked"]
    ends = frozenset({tokenizer.eos_token_id})
    (part,) = encode(conversation_of(row), tokenizer, ends, "marked", {})
    assert learned("marked", part) == written


def test_a_line_break_after_a_reply_that_was_cut_short_is_not_learned() -> None:
    tokenizer: Any = make_tokenizer(["<p>", "<e>", "<u>", "<a>", "<f>"], ENDLESS, "<e>")
    TOKENIZERS["endless"] = tokenizer
    row = conversation_of({"messages": [ASKED, SAID], "finish_reason": "length"})
    (part,) = encode(row, tokenizer, frozenset({tokenizer.eos_token_id}), "x", {})
    assert learned("endless", part) == ["I am fine"]
