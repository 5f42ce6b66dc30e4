"""Agreement of small models with a target, position by position, on the target's held-out texts.

    python scripts/bench/agreement.py --target scripts/quickstart/target \
        --prompts runs/bench/prompts.jsonl \
        --draft-model scripts/quickstart/draft_model \
        --draft-model scripts/quickstart/drafters/distill

Greedy agreement: share of positions of greedy texts at which both have the same best token. Alpha:
mean of sum min(p, q) over the positions of texts sampled at T = 1, which is how often a sampled
draft is accepted by rejection. With standard errors over texts, and in brackets the difference to
the first model on the same texts.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.proposers.draft_model import load_draft_model
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.targets.masks import with_replies
from draftsmith.inference.targets.target import load_for_decoding

BATCH = 16


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="JSON or JSONL file of prompts")
    parser.add_argument(
        "--draft-model",
        required=True,
        action="append",
        help="folder of a small model; may be repeated",
    )
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--length", type=int, default=96, help="most tokens of a text")
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    target = load_for_decoding(TargetConfig(arguments.target))
    drafters = {folder: load_draft_model(folder, target).model for folder in arguments.draft_model}
    prompts = [
        p.token_ids
        for p in read_prompts(arguments.prompts, target.tokenizer, target.name, arguments.limit)
    ]
    found: dict[str, dict[str, list[torch.Tensor]]] = {
        folder: {"greedy agreement": [], "alpha": []} for folder in drafters
    }
    for temperature, what in ((0.0, "greedy agreement"), (1.0, "alpha")):
        sampling = Sampling(temperature=temperature)
        requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
        for at in range(0, len(requests), BATCH):
            for text in generate(
                target, PlainDecoding(), requests[at : at + BATCH], arguments.length, sampling
            ):
                ids = torch.tensor([text.prompt_ids + text.token_ids], device=target.device)
                rows = slice(len(text.prompt_ids) - 1, ids.shape[1] - 1)
                layout = with_replies([len(text.prompt_ids)], ids.shape[1])
                p = target.head(target.forward(ids, layout).last[0, rows]).float()
                for folder, drafter in drafters.items():
                    q = drafter.head(drafter.forward(ids, layout).last[0, rows]).float()[
                        :, : target.vocab_size
                    ]
                    same = (p.argmax(-1) == q.argmax(-1)).float()
                    shared = torch.minimum(p.softmax(-1)[:, : q.shape[-1]], q.softmax(-1)).sum(-1)
                    found[folder][what].append(shared if temperature else same)
    show(found)
    if arguments.json:
        means = {
            folder: {what: float(torch.cat(values).mean()) for what, values in f.items()}
            for folder, f in found.items()
        }
        with open(arguments.json, "w") as file:
            json.dump(means, file, indent=1)


def show(found: dict[str, dict[str, list[torch.Tensor]]]) -> None:
    texts = next(iter(found.values()))
    table = Table(
        title=", ".join(
            f"{what}: {sum(map(len, values))} positions" for what, values in texts.items()
        )
    )
    for column in ("draft model", *texts):
        table.add_column(column)
    for folder, values in found.items():
        cells = []
        for what, parts in values.items():
            cell = "{:.3f} +- {:.3f}".format(*mean_and_error(parts))
            if values is not texts:
                apart = [one - other for one, other in zip(parts, texts[what], strict=True)]
                cell += " ({:+.3f} +- {:.3f})".format(*mean_and_error(apart))
            cells.append(cell)
        table.add_row(folder, *cells)
    Console(width=120).print(table)


def mean_and_error(parts: list[torch.Tensor]) -> tuple[float, float]:
    """Mean over all positions, and its standard error with texts as what was drawn: positions of a
    text go together."""
    mean = float(torch.cat(parts).mean())
    apart = torch.stack([(part - mean).sum() for part in parts])
    return mean, float(apart.square().sum().sqrt()) / sum(map(len, parts))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
