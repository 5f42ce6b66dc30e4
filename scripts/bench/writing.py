"""Tokens per second of writing replies to many prompts: our loop as `data regenerate` uses it, and
transformers' `generate`, alternating on the same batch of prompts.

    python scripts/bench/writing.py --target models/smollm2-135m-instruct --dtype bfloat16 \
        --prompts runs/smollm2/valid.prompts.jsonl --batch-size 64 --max-new-tokens 128

Sampled at `--temperature`, so the two write other texts; only tokens up to a reply's end count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.targets.target import Target, load_for_decoding, load_target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    try:
        measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def measure(options: argparse.Namespace) -> None:
    """Print the median speeds and their ratio."""
    config = TargetConfig(options.target, dtype=options.dtype)
    ours, theirs = load_for_decoding(config), load_target(config)
    prompts = [
        prompt.token_ids
        for prompt in read_prompts(
            options.prompts, ours.tokenizer, ours.name, limit=options.batch_size
        )
    ]
    prompts.sort(key=len)
    speeds: dict[str, list[float]] = {"draftsmith": [], "generate": []}
    for repeat in range(options.repeats):
        for name, write, target in (("draftsmith", loop, ours), ("generate", library, theirs)):
            torch.manual_seed(repeat)
            start = time.perf_counter()
            tokens = write(target, prompts, options, repeat)
            speeds[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        each = " ".join(f"{value:.0f}" for value in values)
        print(f"{name}: {medians[name]:.0f} tokens/s (median of {each})")
    print(f"ratio: {medians['draftsmith'] / medians['generate']:.2f}")


def loop(target: Target, prompts: list[list[int]], options: Any, seed: int) -> int:
    """Return the number of tokens that our loop wrote."""
    sampling = Sampling(temperature=options.temperature, seed=seed)
    replies = generate(target, PlainDecoding(), prompts, options.max_new_tokens, sampling)
    return sum(len(reply.token_ids) for reply in replies)


@torch.inference_mode()
def library(target: Target, prompts: list[list[int]], options: Any, _seed: int) -> int:
    """Return the number of tokens that `generate` wrote, up to the end of each reply."""
    longest = max(map(len, prompts))
    ends = sorted(target.eos_ids)
    # Prompts stand at the end of their rows, as `generate` wants them.
    ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    written = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=options.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=ends[0],
    )[:, longest:]
    tokens = 0
    for row in written.tolist():
        places = [place for place, token in enumerate(row) if token in target.eos_ids]
        tokens += places[0] + 1 if places else len(row)
    return tokens


if __name__ == "__main__":
    main()
