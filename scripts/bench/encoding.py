"""Rows per second that conversations with tools become tokens and masks, of one or more checkouts.

    git worktree add ../old COMMIT
    OMP_NUM_THREADS=1 python scripts/bench/encoding.py --checkout ../old --checkout . \
        --template .venv/lib/python3.11/site-packages/trl/chat_templates/qwen3.jinja

Each row has a system prompt, three tools, a call, its result and a second question; its words are
random, of a fixed seed. Checkouts take turns on blocks of a thousand rows in processes of their
own, and the CPU time of each block counts. Without a template that of the tokenizer's folder is
taken, which has to render tools.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BLOCK = 1000  # rows that one checkout encodes before the next one does


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", action="append", default=[])
    parser.add_argument("--tokenizer", default="scripts/quickstart/target")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
    else:
        report(options)


def rows_with_tools(count: int) -> list[dict[str, Any]]:
    """Return `count` conversations, the same in every call."""
    chance = random.Random(0)

    def words(most: int) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join(
            "".join(chance.choices(letters, k=chance.randint(2, 9)))
            for _ in range(chance.randint(most // 2, most))
        )

    def tool(number: int) -> dict[str, Any]:
        names = [f"key{i}" for i in range(4)]
        properties = {name: {"type": "string", "description": words(8)} for name in names}
        parameters = {"type": "object", "properties": properties, "required": names[:2]}
        function = {"name": f"tool{number}", "description": words(16), "parameters": parameters}
        return {"type": "function", "function": function}

    rows = []
    for _ in range(count):
        arguments = {"key0": words(4), "key1": words(4)}
        call = {"id": "call00001", "type": "function"}
        call |= {"function": {"name": "tool1", "arguments": arguments}}
        messages = [
            {"role": "system", "content": words(30)},
            {"role": "user", "content": words(40)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": words(40)},
            {"role": "assistant", "content": words(80)},
            {"role": "user", "content": words(20)},
            {"role": "assistant", "content": words(80)},
        ]
        rows.append({"messages": messages, "tools": [tool(number) for number in range(3)]})
    return rows


def serve(options: argparse.Namespace) -> None:
    """Answer each line of standard input, the number of a block, with its CPU seconds."""
    from transformers import AutoTokenizer

    from draftsmith.inference.conversations.formats import conversation_of
    from draftsmith.train.data.templates import encode

    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer)
    if options.template is not None:
        tokenizer.chat_template = options.template.read_text()
    ends = frozenset({tokenizer.eos_token_id})
    rows = rows_with_tools(options.rows)
    print(json.dumps(0), flush=True)
    for line in sys.stdin:
        first = int(line) * BLOCK
        began = time.process_time()
        for row in rows[first : first + BLOCK]:
            encode(conversation_of(row), tokenizer, ends, "x", {})
        print(json.dumps(time.process_time() - began), flush=True)


def report(options: argparse.Namespace) -> None:
    """Print the speed of each checkout, and its ratio to that of the first."""
    tokenizer = Path(options.tokenizer).resolve()
    command = [sys.executable, __file__, "--child", "--tokenizer", str(tokenizer)]
    command += ["--rows", str(options.rows)]
    if options.template is not None:
        command += ["--template", str(options.template.resolve())]
    checkouts = [str(Path(path).resolve()) for path in options.checkout or ["."]]
    children = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": checkout},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in checkouts
    ]
    for child in children:
        answer_of(child)  # once it has made its rows
    blocks = max(options.rows // BLOCK, 1)
    seconds: list[list[float]] = [[] for _ in children]
    for block in range(blocks):
        for child, taken in zip(children, seconds, strict=True):
            assert child.stdin is not None
            print(block, file=child.stdin, flush=True)
            taken.append(answer_of(child))
    for child in children:
        child.communicate()
    size = min(BLOCK, options.rows)
    for checkout, taken in zip(checkouts, seconds, strict=True):
        ratio = statistics.median(first / own for first, own in zip(seconds[0], taken, strict=True))
        speed = size / statistics.median(taken)
        print(f"{checkout}: {speed:.0f} rows/s, {ratio:.2f} times the first")


def answer_of(child: subprocess.Popen[str]) -> float:
    """Return the number that a child prints next."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"a checkout ended with status {child.wait()}")
    return json.loads(line)


if __name__ == "__main__":
    main()
