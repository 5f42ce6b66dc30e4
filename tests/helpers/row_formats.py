"""Rows in published formats, and what is learned of each."""

from __future__ import annotations

import json
from typing import Any

USER = {"role": "user", "content": "one"}

REPLY = {"role": "assistant", "content": "two"}

BRIEF = {"role": "system", "content": "be brief"}


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}{text}<|im_end|>"


DEFAULT = turn("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")

ASKED = DEFAULT + turn("user", "one") + "<|im_start|>assistant"

ANSWERED = ASKED + "[[two<|im_end|>]]"

SYSTEM = turn("system", "be brief") + turn("user", "one") + "<|im_start|>assistant[[two<|im_end|>]]"

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    # The five data sets that are used most, in their published shapes.
    "ShareGPT": (
        {
            "id": "QWJhYvA_0",
            "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}],
        },
        ANSWERED,
    ),
    "UltraChat-200k": (
        {"prompt": "one", "prompt_id": "f0e37e9f7800", "messages": [USER, REPLY]},
        ANSWERED,
    ),
    "Open-PerfectBlend": (
        {
            "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}],
            "source": "meta-math/MetaMathQA",
        },
        ANSWERED,
    ),
    "GSM8K": ({"question": "one", "answer": "two"}, ANSWERED),
    "SpecForge": ({"id": "7", "conversations": [USER, REPLY]}, ANSWERED),
    "lmsys-chat-1m": ({"conversation_id": "a", "conversation": [USER, REPLY]}, ANSWERED),
    "Alpaca": ({"instruction": "one", "input": "", "output": "two"}, ANSWERED),
    "Dolly": ({"instruction": "one", "context": "", "response": "two"}, ANSWERED),
    "OpenOrca": (
        {"id": "x", "system_prompt": "be brief", "question": "one", "response": "two"},
        SYSTEM,
    ),
    "LlamaFactory, history": (
        {"history": [["five", "six"]], "instruction": "one", "output": "two"},
        DEFAULT + turn("user", "five") + "<|im_start|>assistant[[six<|im_end|>]]"
        + turn("user", "one") + "<|im_start|>assistant[[two<|im_end|>]]",
    ),
    "preferences": (
        {"prompt": "one", "chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "no"}]},
        ANSWERED,
    ),
    "preferences, prompt apart": ({"prompt": [USER], "chosen": [REPLY], "rejected": []}, ANSWERED),
    "preferences, no prompt": ({"chosen": [USER, REPLY], "rejected": []}, ANSWERED),
    "JSON text": ({"messages": json.dumps([USER, REPLY])}, ANSWERED),
    "system column": ({"system": "be brief", "messages": [USER, REPLY]}, SYSTEM),
    "system column, twice": (
        {"system": "be brief", "messages": [BRIEF, USER, REPLY]},
        SYSTEM,
    ),
    "Anthropic": (
        {
            "request": {"system": [{"type": "text", "text": "be brief"}], "messages": [USER]},
            "response": {
                "role": "assistant", "content": [{"type": "text", "text": "two"}],
                "stop_reason": "end_turn",
            },
        },
        SYSTEM,
    ),
    "log of OpenAI's form": (
        {
            "request": {
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "one"}]},
                ]
            },
            "response": {
                "choices": [
                    {
                        "message": {**REPLY, "tool_calls": [], "refusal": None, "audio": None},
                        "finish_reason": "stop",
                        "stop_reason": None,
                    }
                ]
            },
        },
        SYSTEM,
    ),
    "a reply that is context": (
        {"messages": [USER, {**REPLY, "weight": 0}, USER, {**REPLY, "train": True}]},
        ASKED + "two<|im_end|>" + turn("user", "one") + "<|im_start|>assistant[[two<|im_end|>]]",
    ),
    "a mask by message": (
        {"messages": [USER, REPLY, USER, REPLY], "loss_mask": [0, 1, 0, 0]},
        ANSWERED,
    ),
}  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         r"messages\[0\].content\[0\] is of type image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         r"messages\[0\].content\[0\] is of type input_audio"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]},
         r"messages\[0\].content must be a text or a list of parts, not an object"),
        ({"messages": [{**USER, "weight": 0.5}]}, r"messages\[0\].weight is 0.5; write 0 or 1"),
        ({"messages": [USER, REPLY], "loss_mask": [1]}, "loss_mask must have a 0 or a 1 for each"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER]},
         r"system and messages\[0\].content are two system prompts"),
        ({"system": "a", "prompt": "b"}, "system does not go with a prompt of plain text"),
        ({"request": {"input": "x"}, "response": {}}, "request.messages is missing"),
        ({"custom_id": "1", "response": {"choices": []}}, "none of the keys messages, "),
        ({"conversations": [{"from": "my-model", "value": "x"}]},
         r"conversations\[0\].from is 'my-model'"),
        ({"conversations": [{"from": "human", "value": "x"},
                            {"from": "function_call", "value": "{}"}]},
         r"conversations\[1\].tool_calls\[0\].function.name is missing"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         r"messages\[1\].tool_calls\[0\].function.name is missing"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, r"tools\[0\].name is missing"),
]  # fmt: skip
