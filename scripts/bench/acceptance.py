"""Which kind of draft is accepted most at a node: deterministic top-k, sampled without replacement,
or coupled to the target's noise.

    python scripts/bench/acceptance.py --target scripts/quickstart/target \
        --draft-model scripts/quickstart/draft_model \
        --prompts runs/bench/prompts.jsonl

At every position of texts that the target wrote at the given temperature, with the distributions p
and q of target and drafter there: how likely is it that one of k children is accepted, by match
(deterministic top-k of q), by recursive rejection (k draws from q without replacement), by match
under shared noise (top-k of log q + noise)? The first is exact (the mass of p on the k tokens); the
others are means over `--draws` sets of draws, by the functions that the loop calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.console import ProgressReporter
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.proposers.draft_model import load_draft_model
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.rounds.accept import recursive
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import NO_NODE, TreeShape
from draftsmith.inference.targets.causal_model import CausalModel
from draftsmith.inference.targets.masks import with_replies
from draftsmith.inference.targets.target import Target, load_for_decoding

WIDTHS = (1, 2, 4, 8)
CHUNK = 256


def positions(
    target: Target, drafter: CausalModel, prompts: list[list[int]], length: int, sampling: Sampling
) -> tuple[Any, Any]:
    """Logits of target and drafter `[R, V]` at every position of texts that the target wrote by
    `sampling`."""
    requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
    ours, theirs = [], []
    for found in generate(target, PlainDecoding(), requests, length, sampling, frozenset()):
        ids = torch.tensor([found.prompt_ids + found.token_ids], device=target.device)
        start = len(found.prompt_ids)
        layout = with_replies([start], ids.shape[1])
        ours.append(target.head(target.forward(ids, layout).last[0, start:-1]))
        theirs.append(
            drafter.head(drafter.forward(ids, layout).last[0, start:-1])[:, : target.vocab_size]
        )
    return torch.cat(ours), torch.cat(theirs)


def accepted(
    p_logits: torch.Tensor,
    q_logits: torch.Tensor,
    sampling: Sampling,
    width: int,
    draw: int,
    start: int,
) -> torch.Tensor:
    """Chance `[3, R]` that one of `width` children is accepted: deterministic, without replacement,
    coupled (0 or 1)."""
    rows = len(p_logits)
    keys = torch.arange(start, start + rows, device=p_logits.device) * 7919 + draw
    text = torch.zeros(rows, 1, dtype=torch.long, device=p_logits.device)
    at = torch.zeros(rows, dtype=torch.long, device=p_logits.device)
    apart = Draws(Sampling(temperature=sampling.temperature, rule="recursive"), keys, text, at)
    shared = Draws(Sampling(temperature=sampling.temperature), keys, text, at)
    p = apart.scores(p_logits[:, None], None).softmax(-1)
    best = q_logits.topk(width).indices
    deterministic = p[:, 0].gather(1, best).sum(-1)

    drawn, q = apart.sample(q_logits[:, None], 0, width, None)
    shape = TreeShape((NO_NODE, *[0] * width))
    tokens = torch.cat([text, drawn[:, 0]], dim=1)
    probs = (
        torch.cat([p, p.expand(-1, width, -1)], dim=1),
        torch.cat([q, q.expand(-1, width, -1)], dim=1),
    )
    plan = recursive(shape, tokens, *probs)
    rejection = 1 - (1 - plan.chances[:, 1:]).prod(-1)

    children, _ = shared.rank(q_logits[:, None], 0, width, None)
    choice = shared.choices(shared.scores(p_logits[:, None], None), 0)
    coupled = (children[:, 0] == choice).any(-1).to(p.dtype)
    return torch.stack([deterministic, rejection, coupled])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="JSON or JSONL file of prompts")
    parser.add_argument(
        "--draft-model", required=True, help="folder of a small model with the target's tokenizer"
    )
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of each text")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    target = load_for_decoding(TargetConfig(arguments.target))
    drafter = load_draft_model(arguments.draft_model, target).model
    prompts = [
        p.token_ids
        for p in read_prompts(arguments.prompts, target.tokenizer, target.name, arguments.limit)
    ]
    rows: list[dict[str, Any]] = []
    for temperature in ProgressReporter((0.3, 0.7, 1.0), desc="measuring", unit=" temperatures"):
        sampling = Sampling(temperature=temperature)
        p_logits, q_logits = positions(target, drafter, prompts, arguments.length, sampling)
        for width in WIDTHS:
            total = torch.zeros(3, dtype=torch.float64)
            for draw in range(arguments.draws):
                for start in range(0, len(p_logits), CHUNK):
                    part = slice(start, start + CHUNK)
                    total += (
                        accepted(p_logits[part], q_logits[part], sampling, width, draw, start)
                        .sum(-1)
                        .cpu()
                    )
            mean = (total / (arguments.draws * len(p_logits))).tolist()
            kinds = dict(zip(("deterministic", "rejection", "coupled"), mean, strict=True))
            rows.append({"T": temperature, "k": width, "positions": len(p_logits), **kinds})
    show(rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"arguments": vars(arguments), "rows": rows}, file, indent=1)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"{rows[0]['positions']} positions: deterministic / without replacement / coupled"
    )
    table.add_column("T")
    for width in WIDTHS:
        table.add_column(f"k = {width}")
    for temperature in sorted({row["T"] for row in rows}):
        cells = [row for row in rows if row["T"] == temperature]
        table.add_row(
            f"{temperature:g}",
            *(
                f"{c['deterministic']:.3f} / {c['rejection']:.3f} / {c['coupled']:.3f}"
                for c in cells
            ),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
