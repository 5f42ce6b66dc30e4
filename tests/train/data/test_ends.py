"""Replies with every kind of end: exactly the text of the target is learned.

A reply ends by itself with its end token, at a limit or a stop string without one, inside its
reasoning or a call, with a call, or with the first token of the next turn.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizer

from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.inference.conversations.rendering import prompt_ids
from draftsmith.inference.conversations.templates import endless
from draftsmith.train.data.templates import encode
from tests.conftest import make_tokenizer
from tests.helpers.published_templates import files, tokenizer_of

GLM = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "<sop>"]
TOKENIZERS: dict[str, Any] = {
    "qwen3": tokenizer_of("qwen3"),
    "qwen3_5_think": tokenizer_of("qwen3_5_think"),
    "gptoss": tokenizer_of("gptoss"),
    "glm4moe": make_tokenizer(GLM, files()["glm4moe"].read_text(), "<|endoftext|>"),
}
TOKENIZERS["glm4moe"].add_special_tokens({"additional_special_tokens": GLM})
ENDS = {
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
}


def learned(name: str, row: dict[str, Any]) -> list[str]:
    """Learned texts, one for each run of tokens."""
    tokenizer = TOKENIZERS[name]
    ends = tokenizer.convert_tokens_to_ids(ENDS.get(name, [tokenizer.eos_token]))
    runs: list[list[int]] = []
    for part in encode(conversation_of(row), tokenizer, frozenset(ends), name, {}):
        for token, on, before in zip(part.token_ids, part.mask, [False, *part.mask], strict=False):
            runs += [[]] if on and not before else []
            if on:
                runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


ASKED = {"role": "user", "content": "hello"}
CALL = {"function": {"name": "rain", "arguments": '{"town": "Bern", "days": 2}'}}
CALLED = '<tool_call>\n{"name": "rain", "arguments": {"town": "Bern", "days": 2}}\n</tool_call>'


def log(message: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """A log of one request with its response, as servers write it."""
    choices = [{"message": {"role": "assistant", **message}, **choice}]
    return {"request": {"messages": [ASKED]}, "response": {"choices": choices}}


THOUGHT = {"content": "", "reasoning": "I am"}
OPENED = {"content": "<think>\nI am"}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "by itself": ("qwen3", log({"content": "fine"}, finish_reason="stop"), ["fine<|im_end|>"]),
    "by itself, vLLM": (
        "qwen3", log({"content": "fine"}, finish_reason="stop", stop_reason=None),
        ["fine<|im_end|>"],
    ),
    "limit": ("qwen3", log({"content": "fine"}, finish_reason="length"), ["fine"]),
    "limit, after a line break": (
        "qwen3", log({"content": "fine:\n\n"}, finish_reason="length"), ["fine:\n\n"],
    ),
    "an empty stop reason": (
        "qwen3", log({"content": "fine"}, finish_reason="stop", stop_reason=""), ["fine<|im_end|>"],
    ),
    "aborted": ("qwen3", log({"content": "fine"}, finish_reason="abort"), ["fine"]),
    "filter": ("qwen3", log({"content": "fine"}, finish_reason="content_filter"), ["fine"]),
    "stop string, vLLM": (
        "qwen3", log({"content": "fine"}, finish_reason="stop", stop_reason="three"), ["fine"],
    ),
    "stop string, SGLang": (
        "qwen3", log({"content": "fine"}, finish_reason="stop", matched_stop="three"), ["fine"],
    ),
    "stop string, Anthropic": (
        "qwen3",
        {"request": {"messages": [ASKED]},
         "response": {"role": "assistant", "content": [{"type": "text", "text": "fine"}],
                      "stop_reason": "stop_sequence"}},
        ["fine"],
    ),
    "end token named": (
        "qwen3", log({"content": "fine"}, finish_reason="stop",
                     stop_reason=TOKENIZERS["qwen3"].eos_token_id),
        ["fine<|im_end|>"],
    ),
    "a stop token of the client's": (
        "qwen3", log({"content": "fine"}, finish_reason="stop", stop_reason=40), ["fine"],
    ),
    "inside the reasoning": (
        "qwen3", log(THOUGHT, finish_reason="length"), ["<think>\nI am"],
    ),
    "inside the reasoning, no parser": (
        "qwen3", log(OPENED, finish_reason="length"), ["<think>\nI am"],
    ),
    "inside the reasoning, no reason given": ("qwen3", log(OPENED), ["<think>\nI am"]),
    "inside reasoning that the prompt opens": (
        "qwen3_5_think", log(THOUGHT, finish_reason="length"), ["I am"],
    ),
    "the same, no parser": ("qwen3_5_think", log({"content": "I am"}, finish_reason="length"),
                            ["I am"]),
    "after the reasoning": (
        "qwen3", log({"content": "fine", "reasoning": "I am"}, finish_reason="length"),
        ["<think>\nI am\n</think>\n\nfine"],
    ),
    "a reasoning channel": (
        "gptoss", log(THOUGHT, finish_reason="length"), ["<|channel|>analysis<|message|>I am"],
    ),
    "call": ("qwen3", log({"content": None, "tool_calls": [CALL]}, finish_reason="tool_calls"),
             [f"{CALLED}<|im_end|>"]),
    "text and call": (
        "qwen3", log({"content": "fine", "tool_calls": [CALL]}, finish_reason="tool_calls"),
        [f"fine\n{CALLED}<|im_end|>"],
    ),
    "call, its end token": (
        "gptoss", log({"content": None, "tool_calls": [CALL]}, finish_reason="tool_calls"),
        [' to=functions.rain<|channel|>commentary json<|message|>{"town": "Bern", "days": 2}'
         "<|call|>"],
    ),
    "inside a call": (
        "qwen3", log({"content": '<tool_call>\n{"name": "ra'}, finish_reason="length"),
        ['<tool_call>\n{"name": "ra'],
    ),
    "after the arguments of a call": (
        "qwen3", log({"content": None, "tool_calls": [CALL]}, finish_reason="length"),
        ['<tool_call>\n{"name": "rain", "arguments": {"town": "Bern", "days": 2'],
    ),
    "next turn's token": (
        "glm4moe",
        {"messages": [ASKED, {"role": "assistant", "content": "fine"}, ASKED,
                      {"role": "assistant", "content": "thank you"}]},
        ["fine<|user|>", "thank you"],
    ),
    "next turn's token, named": (
        "glm4moe",
        log({"content": "fine"}, finish_reason="stop",
            stop_reason=TOKENIZERS["glm4moe"].convert_tokens_to_ids("<|user|>")),
        ["fine<|user|>"],
    ),
    "the token of a result": (
        "glm4moe",
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                      {"role": "tool", "content": "no"}, {"role": "assistant", "content": "fine"}]},
        ["<tool_call>rain\n<arg_key>town</arg_key>\n<arg_value>Bern</arg_value>\n"
         "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>", "fine"],
    ),
    "next turn after a cut": (
        "glm4moe",
        {"messages": [ASKED, {"role": "assistant", "content": "fine"}], "finish_reason": "length"},
        ["fine"],
    ),
    "nothing": ("qwen3", log({"content": ""}, finish_reason="stop"), ["<|im_end|>"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_only_text_written_by_the_target_is_learned(case: str) -> None:
    name, row, expected = CASES[case]
    assert learned(name, row) == expected


@pytest.mark.parametrize(
    "case", [name for name in CASES if "inside reas" in name or "inside the" in name]
)
def test_text_before_an_unfinished_reply_equals_its_prompt(case: str) -> None:
    """As the server saw it: no block of the template's stands between them, and nothing follows."""
    name, row, (written,) = CASES[case]
    tokenizer = TOKENIZERS[name]
    (part,) = encode(conversation_of(row), tokenizer, frozenset({1}), name, {})
    prompt = prompt_ids(conversation_of(row), tokenizer, name)
    assert tokenizer.decode(part.token_ids) == tokenizer.decode(prompt) + written


def test_a_template_whose_end_does_not_end_generation_is_found() -> None:
    tokenizer = tokenizer_of("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert endless(tokenizer, "x", frozenset({end}), {}) == ""
    why = endless(tokenizer, "x", frozenset({0}), {})
    assert "<|im_end|>, which does not end generation (eos_token_id is [0])" in why
    assert f"add {end} to eos_token_id" in why
    # It does not write an end token: the next turn's first token ends a reply.
    assert endless(TOKENIZERS["glm4moe"], "x", frozenset({0}), {}) == ""


class ByteTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, which gives no offsets: token 8 + b is byte b."""

    special = ("<pad>", "<e>", "<u>", "<a>")

    @property
    def vocab_size(self) -> int:
        return 264

    def get_vocab(self) -> dict[str, int]:
        own = {f"b{byte}": 8 + byte for byte in range(256)}
        return own | {token: number for number, token in enumerate(self.special)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [f"b{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self.special.index(token) if token in self.special else 8 + int(token[1:])

    def _convert_id_to_token(self, index: int) -> str:
        return self.special[index] if index < len(self.special) else f"b{index - 8}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(int(token[1:]) for token in tokens).decode(errors="replace")


class Greedy(ByteTokenizer):
    """A `ByteTokenizer` in which two equal letters are one token, also across a turn's border."""

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return super()._tokenize(text.replace(": h", ":\x01").replace("hh", "\x02"))


BARE = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '<e>' }}{% endfor %}"
BARE += "{% if add_generation_prompt %}a: {% endif %}"


def test_a_tokenizer_without_offsets_is_read_in_pieces() -> None:
    tokenizer = ByteTokenizer(eos_token="<e>", pad_token="<pad>", chat_template=BARE)
    row = {"messages": [ASKED, {"role": "assistant", "content": "fine"}] * 2}
    (part,) = encode(conversation_of(row), tokenizer, frozenset({1}), "x", {})
    text = "u: hello<e>a: fine<e>" * 2
    assert part.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    learned = "".join("x" if on else "." for on in part.mask)
    assert learned == ("." * len("u: hello") + "." + "..." + "xxxx" + "x") * 2
    joined = Greedy(eos_token="<e>", pad_token="<pad>", chat_template=BARE)
    row = {"messages": [ASKED, {"role": "assistant", "content": "hello"}]}
    with pytest.raises(RowError, match="no character offsets, and a token crosses"):
        encode(conversation_of(row), joined, frozenset({1}), "x", {})
