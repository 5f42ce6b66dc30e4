"""Does every drafter write what the target alone writes? Greedy and coupled texts against plain
decoding, token for token, and greedy ones against transformers' own `generate`.

    python scripts/check_target/exactness.py --target TARGET --prompts FILE [--drafter FOLDER ...]

`generate` runs transformers' own forward pass over matrices as they are stored. With `--compile`
everything else runs in compiled functions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.prompts import Prompt, read_prompts
from draftsmith.inference.decode import Generation, Request, generate
from draftsmith.inference.evaluation.measure import first_difference
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target, load_for_decoding, load_target

BASELINES = ("none", "ngram")
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Logits that are closer than this may change places when a tree is verified in another batch
shape."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    try:
        wrong = check(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(1 if wrong else 0)


def check(options: argparse.Namespace) -> int:
    """Print a line for each way to decode; the number of replies that differ where the target is
    sure."""
    config = TargetConfig(options.target, dtype=options.dtype, compile=options.compile)
    # The reference: it is dropped before the target is loaded, which would double the memory.
    reference = load_target(replace(config, attention=config.attention or "sdpa", compile=False))
    prompts = read_prompts(options.prompts, reference.tokenizer, reference.name)
    oracle = [by_transformers(reference, prompt, options.max_new_tokens) for prompt in prompts]
    del reference
    target = load_for_decoding(config)
    wrong = 0
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=5)):
        plain = decode(target, "none", prompts, 1, sampling, options.max_new_tokens)
        if sampling.greedy:
            wrong += count_wrong("target.generate", target, plain, oracle, sampling)
        for spec in [*BASELINES, *options.drafter]:
            for batch in map(int, options.batch_sizes.split(",")):
                try:
                    found = decode(target, spec, prompts, batch, sampling, options.max_new_tokens)
                except UserError as error:
                    if spec not in BASELINES:
                        raise
                    print(f"{spec}: left out: {error}")
                    break
                label = f"{spec}, T = {sampling.temperature:g}, batch {batch}"
                wrong += count_wrong(label, target, plain, [g.token_ids for g in found], sampling)
    return wrong


def decode(
    target: Target,
    spec: str,
    prompts: Sequence[Prompt],
    batch: int,
    sampling: Sampling,
    longest: int,
) -> list[Generation]:
    """A reply to each prompt, `batch` of them at a time; the noise of a request is the same in
    every batch."""
    proposer = load_proposer(spec, target, lambda message: None)
    requests = [Request(prompt.token_ids, number) for number, prompt in enumerate(prompts)]
    replies: list[Generation] = []
    for start in range(0, len(requests), batch):
        replies += generate(target, proposer, requests[start : start + batch], longest, sampling)
    return replies


@torch.inference_mode()
def by_transformers(target: Target, prompt: Prompt, longest: int) -> list[int]:
    """What `generate` writes greedily after one prompt."""
    ids = torch.tensor([prompt.token_ids], device=target.device)
    penalty = {"repetition_penalty": target.repetition_penalty}
    found = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=longest, **penalty
    )
    return found[0, ids.shape[1] :].tolist()


def count_wrong(
    label: str,
    target: Target,
    plain: Sequence[Generation],
    others: Sequence[list[int]],
    sampling: Sampling,
) -> int:
    """Print how many replies are equal, and return how many are not though the target's two best
    tokens are apart there."""
    different = wrong = 0
    for number, (reply, other) in enumerate(zip(plain, others, strict=True)):
        if reply.token_ids == other:
            continue
        different += 1
        found = Generation(reply.prompt_ids, other)
        # the noise of `decode`'s requests
        place, gap = first_difference(target, reply, found, sampling, (number, 0))
        assert gap is not None
        wrong += gap >= NEAR_TIE.get(target.dtype, 0.0)
        noise = "" if sampling.greedy else ", with their noise,"
        print(
            f"{label}: differs at token {place}, the target's two best{noise} are {gap:.2g} apart"
        )
    print(f"{label}: {len(plain) - different} of {len(plain)} equal")
    return wrong


if __name__ == "__main__":
    main()
