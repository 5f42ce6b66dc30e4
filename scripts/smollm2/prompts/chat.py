"""Questions of a chat, written by the target itself.

A chat model that is given its template up to the beginning of the user's turn writes a question
(Magpie, arXiv 2406.08464). Split by a hash of the question's text.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

SEED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
FOLLOW_UPS = (
    "Can you give me an example?",
    "Please make that shorter.",
    "Thanks! What else should I know?",
    "Explain that again in simpler words.",
    "Why is that?",
    "Turn your answer into a list.",
    "Which of these is the most important, and why?",
    "Rewrite your answer for a child.",
)
FOLLOWED = 6
"""One question in so many is followed by another one."""
HELD_OUT_PERCENT = {"test": 6, "valid": 4}


def seeds(count: int) -> list[dict[str, Any]]:
    """Return `count` equal prompts, from which the target writes `count` different questions."""
    return [{"id": f"question-{number}", "prompt": SEED} for number in range(count)]


def questions(path: Path, split: str) -> list[str]:
    """Return the questions of a split in a file that `draftsmith data regenerate` wrote."""
    found: dict[str, None] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text = row["text"].removeprefix(SEED).strip()
        # A question that was cut off, or that only repeats the template, asks nothing.
        whole = row["finish_reasons"] == ["stop"] and "<|" not in text
        if whole and 12 <= len(text) <= 400 and text[0].isupper() and split_of(text) == split:
            found.setdefault(text)
    return list(found)


def split_of(text: str) -> str:
    """Return the split that a question belongs to."""
    bucket = zlib.crc32(text.encode()) % 100
    if bucket < HELD_OUT_PERCENT["test"]:
        return "test"
    return "valid" if bucket < sum(HELD_OUT_PERCENT.values()) else "train"


def conversation(text: str, draw: random.Random) -> list[dict[str, str]]:
    """Return the user's turns of a conversation that begins with a question."""
    messages = [{"role": "user", "content": text}]
    if draw.randrange(FOLLOWED) == 0:
        # What stands between two turns is replaced by the target's reply.
        messages += [
            {"role": "assistant", "content": ""},
            {"role": "user", "content": draw.choice(FOLLOW_UPS)},
        ]
    return messages
