"""Learned texts of conversations in the layouts of public chat templates, written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.inference.conversations.formats import Conversation
from draftsmith.inference.conversations.messages import RowError
from draftsmith.train.data.templates import Encoded, encode
from tests.conftest import make_tokenizer
from tests.helpers.templates import GEMMA, MISTRAL, QWEN3

LAYOUTS = Path(__file__).parent / "layouts"


def tokenizer_of(template: str, special: list[str], eos: str, bos: str | None = None) -> Any:
    """A small tokenizer with a template, which knows all of `special` as special tokens."""
    tokenizer: Any = make_tokenizer(special, template, eos, bos)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    assert set(tokenizer.convert_tokens_to_ids(special)) <= set(tokenizer.all_special_ids)
    return tokenizer


def layout(name: str, special: list[str], eos: str, bos: str | None = None) -> Any:
    return tokenizer_of((LAYOUTS / f"{name}.jinja").read_text(), special, eos, bos)


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BAR = "\uff5c"  # of DeepSeek's special tokens
DEEPSEEK = [f"<{BAR}{name}{BAR}>" for name in ("begin▁of▁sentence", "end▁of▁sentence")]
DEEPSEEK += [f"<{BAR}{name}{BAR}>" for name in ("User", "Assistant")]
HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TOKENIZERS = {
    "smollm2": layout("smollm2", CHATML, "<|im_end|>"),
    "smollm3": layout("smollm3", [*CHATML, "<think>", "</think>"], "<|im_end|>"),
    "qwen3": tokenizer_of(QWEN3, CHATML, "<|im_end|>"),
    "llama31": layout("llama31", LLAMA, "<|eot_id|>", "<|begin_of_text|>"),
    "gemma": tokenizer_of(
        GEMMA, ["<bos>", "<end_of_turn>", "<start_of_turn>"], "<end_of_turn>", "<bos>"
    ),
    "mistral": tokenizer_of(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>", "<s>"),
    **{
        name: layout(name, DEEPSEEK, DEEPSEEK[1], DEEPSEEK[0])
        for name in ("deepseek-r1", "deepseek-r1-0528", "deepseek-v31")
    },
    "gpt-oss": layout("gpt-oss", HARMONY, "<|return|>"),
}


def conversation(first: dict[str, str], second: dict[str, str]) -> list[dict[str, str]]:
    """Two questions and two replies, which are given without their role."""
    return [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", **first},
        {"role": "user", "content": "how are you today?"},
        {"role": "assistant", **second},
    ]


PLAIN = conversation({"content": "I am fine"}, {"content": "thank you"})
IN_CONTENT = conversation(
    {"content": "<think>\nthe\n</think>\nI am fine"},
    {"content": "<think>\nthen\n</think>\nthank you"},
)


def in_key(key: str) -> list[dict[str, str]]:
    return conversation({key: "the", "content": "I am fine"}, {key: "then", "content": "thank you"})


@dataclass
class Case:
    """A conversation, and its learned texts, written by hand."""

    layout: str
    messages: list[dict[str, str]]
    learned: list[tuple[int, list[str]]]
    """For each sequence the index of the first message that is learned, and the learned texts."""
    kwargs: dict[str, Any]


def together(*texts: str) -> list[tuple[int, list[str]]]:
    return [(1, [*texts])]


def apart(first: str, second: str) -> list[tuple[int, list[str]]]:
    return [(1, [first]), (3, [second])]


CHANNELS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
END = DEEPSEEK[1]
CASES = {
    "SmolLM2": Case("smollm2", PLAIN, together("I am fine<|im_end|>", "thank you<|im_end|>"), {}),
    "SmolLM3, thinking": Case(
        "smollm3",
        IN_CONTENT,
        together(
            "<think>\nthe\n</think>\nI am fine<|im_end|>",
            "<think>\nthen\n</think>\nthank you<|im_end|>",
        ),
        {},
    ),
    "SmolLM3": Case(
        "smollm3",
        PLAIN,
        together("I am fine<|im_end|>", "thank you<|im_end|>"),
        {"enable_thinking": False},
    ),
    "Qwen3, thinking": Case(
        "qwen3",
        in_key("reasoning_content"),
        apart(
            "<think>\nthe\n</think>\n\nI am fine<|im_end|>",
            "<think>\nthen\n</think>\n\nthank you<|im_end|>",
        ),
        {},
    ),
    "Qwen3": Case(
        "qwen3",
        PLAIN,
        apart("I am fine<|im_end|>", "thank you<|im_end|>"),
        {"enable_thinking": False},
    ),
    "Llama 3.1": Case("llama31", PLAIN, together("I am fine<|eot_id|>", "thank you<|eot_id|>"), {}),
    "Gemma": Case("gemma", PLAIN, together("I am fine<end_of_turn>", "thank you<end_of_turn>"), {}),
    "Mistral": Case("mistral", PLAIN, together("I am fine</s>", "thank you</s>"), {}),
    "DeepSeek-R1-0528": Case(
        "deepseek-r1-0528", PLAIN, together(f"I am fine{END}", f"thank you{END}"), {}
    ),
    "DeepSeek-V3.1": Case(
        "deepseek-v31", PLAIN, together(f"I am fine{END}", f"thank you{END}"), {}
    ),
    "gpt-oss, thinking": Case(
        "gpt-oss",
        in_key("thinking"),
        apart(
            CHANNELS.format("the") + FINAL + "I am fine<|return|>",
            CHANNELS.format("then") + FINAL + "thank you<|return|>",
        ),
        {},
    ),
    "gpt-oss": Case(
        "gpt-oss",
        PLAIN,
        apart(FINAL + "I am fine<|return|>", FINAL + "thank you<|return|>"),
        {},
    ),
}


def encoded(case: Case) -> list[Encoded]:
    tokenizer = TOKENIZERS[case.layout]
    return encode(
        Conversation(messages=case.messages),
        tokenizer,
        frozenset({tokenizer.eos_token_id}),
        case.layout,
        case.kwargs,
    )


def learned(part: Encoded, tokenizer: Any) -> list[str]:
    """Texts of the runs that the mask covers."""
    borders = np.flatnonzero(np.diff([0, *part.mask, 0]))
    runs = [part.token_ids[start:end] for start, end in borders.reshape(-1, 2)]
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_learned_and_where_held_out_prompts_end(case: Case) -> None:
    tokenizer = TOKENIZERS[case.layout]
    parts = encoded(case)
    assert [learned(part, tokenizer) for part in parts] == [texts for _, texts in case.learned]
    for part, (first, _) in zip(parts, case.learned, strict=True):
        # As `held_out_prompts` cuts them.
        prompt = part.token_ids[: int(np.array(part.mask).argmax())]
        assert prompt == tokenizer.apply_chat_template(
            case.messages[:first], add_generation_prompt=True, return_dict=True, **case.kwargs
        )["input_ids"]  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-r1-0528", "deepseek-v31"])
@pytest.mark.parametrize("messages", [IN_CONTENT, in_key("reasoning_content")])
def test_a_reply_without_its_reasoning_is_not_learned(
    name: str, messages: list[dict[str, str]]
) -> None:
    """These templates write the last turn too without what the target thought before it."""
    with pytest.raises(RowError, match="leaves out the reasoning .* draftsmith data regenerate"):
        encoded(Case(name, messages, [], {"thinking": True}))


def test_a_prompt_that_opens_the_reasoning_needs_replies_with_reasoning() -> None:
    with pytest.raises(RowError, match="does not continue its own generation prompt"):
        encoded(Case("deepseek-r1", PLAIN, [], {}))
