"""Fine-tune a quickstart target on another domain: from Python functions to their docstrings.

    python scripts/quickstart/fine_tune.py --model scripts/quickstart/hybrid --out runs/mtp/target
    python scripts/quickstart/fine_tune.py --prompts train:2000 --out runs/mtp/train.prompts.jsonl

The user turn gives a function without its docstring, the assistant writes the docstring; functions
and their splits are those of `functions.py`. All weights are trained. A layer for multi-token
prediction is left out, as by every trainer that loads and saves a model with transformers.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from functions import Function, Split, ngrams, select, stdlib_functions, write_rows
from make_target import PAD, batches, encode, held_out_loss, token_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads.pretrained import save_model

SHORTEST, LONGEST = 40, 800
"""Characters of a docstring."""
BATCH = 8192
"""Tokens of a step."""


def reversed_task(function: Function) -> Function | None:
    """Return the function without its docstring as the prompt, and the docstring as the reply; None
    if its length is unusual, or if it does not begin on a line of its own."""
    try:
        (node,) = ast.parse(function.prompt).body  # fails without a docstring: the body is empty
    except SyntaxError:
        return None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    reply = ast.get_docstring(node)
    if reply is None or not SHORTEST <= len(reply) <= LONGEST:
        return None
    lines = function.prompt.splitlines(keepends=True)
    signature = "".join(lines[: node.body[0].lineno - 1])
    source = signature + textwrap.indent(function.body, "    ")
    return Function(function.module, function.name, source, reply)


def reversed_tasks(functions: Iterable[Function]) -> list[Function]:
    """Return `reversed_task` of those that have one."""
    found = map(reversed_task, functions)
    return [function for function in found if function is not None]


def conversations() -> tuple[list[Function], list[Function]]:
    """Return the reversed tasks of the standard library for training, none of which shares a
    13-gram with a held-out one, and 200 of the latter."""
    known = reversed_tasks(stdlib_functions())
    held_out = [f for f in known if f.split != "train"]
    forbidden = set().union(*(ngrams(f.prompt + f.body) for f in held_out))
    train = [f for f in known if f.split == "train"]
    return [f for f in train if forbidden.isdisjoint(ngrams(f.prompt + f.body))], held_out[:200]


def write_prompts(split: Split, count: int, out: Path) -> None:
    """Write a seeded sample of prompts of one split."""
    # More than asked for: some docstrings have no usual length.
    chosen = select(stdlib_functions(), split, int(1.3 * count), 0, 80, 700)
    rows = reversed_tasks(chosen)[:count]
    if len(rows) < count:
        raise SystemExit(f"error: only {len(rows)} functions in split {split!r}")
    write_rows(rows, out)


def fine_tune(source: Path, out: Path, tokens: float, rate: float) -> None:
    """Train a target on the docstrings and save it."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows, valid = (encode(tokenizer, part) for part in conversations())
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")

    def judged() -> float:
        return held_out_loss(model, valid, PAD, "cpu", bodies_only=assistant)

    print(f"{len(rows)} conversations; held-out loss of replies {judged():.3f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    done, step, started = 0, 0, time.monotonic()
    for ids in batches(rows, BATCH, PAD, seed=0):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20, 1.1 - done / tokens)
        loss, _, count = token_loss(model, None, None, ids, PAD)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, step = done + count, step + 1
        if step % 5 == 0:
            rate_of = done / (time.monotonic() - started)
            print(f"step {step}  tokens {done:,}  loss {loss.item() / count:.3f}", end="  ")
            print(f"{rate_of:,.0f} tokens/s", flush=True)
        if done >= tokens:
            break
    print(f"held-out loss of replies {judged():.3f}", flush=True)
    save_model(model, out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", metavar="SPLIT:COUNT", help="write prompts instead")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=4e5)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if (args.model is None) == (args.prompts is None):
        parser.error("give --model or --prompts")
    if args.prompts:
        split, count = args.prompts.split(":")
        write_prompts(split, int(count), args.out)
    else:
        fine_tune(args.model, args.out, args.tokens, args.lr)


if __name__ == "__main__":
    main()
