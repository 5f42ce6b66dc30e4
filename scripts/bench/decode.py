"""Cost of decoding in every way, alternating on the same prompts, and of a pass over N nodes.

    python scripts/quickstart/functions.py --split test --count 16 --out runs/bench/prompts.jsonl
    OMP_NUM_THREADS=1 python scripts/bench/decode.py --target scripts/quickstart/target \
        --draft-model scripts/quickstart/draft_model \
        --prompts runs/bench/prompts.jsonl --drafter ngram

Ways: plain decoding in our loop, `target.generate`, transformers' assisted generation with the
draft model (constant draft length, confidence threshold 0), our loop with the same draft model and
length, and every `--drafter`. Greedy, batch 1. Times are medians of `--repeats` turns; the split is
of our loop's rounds. "loop" is all of a round but draft and target forwards. tau: tokens a round,
the prefill left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.console import ProgressReporter
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import Generation, Round, generate_one
from draftsmith.inference.metrics import emitted_per_round, split, tau
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds.cache import StaticTreeCache, TreeCache
from draftsmith.inference.rounds.tree import Pass, TreeShape
from draftsmith.inference.targets.target import Target, load_for_decoding

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@dataclass
class Run:
    """One decoded prompt: its tokens, the seconds from call to return, and our loop's own account
    if it was our loop."""

    tokens: list[int]
    seconds: float
    own: Generation | None = None


@dataclass
class Arm:
    """One way to decode, and its runs: of each prompt the one of median time."""

    name: str
    decode: Callable[[list[int]], Run]
    runs: list[Run] = field(default_factory=list)


def synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ours(target: Target, proposer: Proposer, limit: int) -> Callable[[list[int]], Run]:
    def decode(prompt: list[int]) -> Run:
        start = synchronised(target.device)
        found = generate_one(target, proposer, prompt, limit)
        return Run(found.token_ids, synchronised(target.device) - start, found)

    return decode


def theirs(target: Target, limit: int, **options: Any) -> Callable[[list[int]], Run]:
    def decode(prompt: list[int]) -> Run:
        ids = torch.tensor([prompt], device=target.device)
        start = synchronised(target.device)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=limit,
            pad_token_id=0,
            **options,
        )
        return Run(out[0, len(prompt) :].tolist(), synchronised(target.device) - start)

    return decode


def assisted(target: Target, drafter: DraftModelProposer, limit: int) -> Callable[[list[int]], Run]:
    """transformers' greedy `model.generate(assistant_model=...)` with the same draft model.

    The draft length is constant and no confidence threshold ends a draft early, so that it drafts
    as many tokens a round as a chain of the same length does in our loop.
    """
    helper, length = drafter.model.model, drafter.plan.length

    def decode(prompt: list[int]) -> Run:
        watch = Watch(target.device)
        # transformers reads these three from the draft model's own generation config only
        settings = helper.generation_config
        settings.num_assistant_tokens = length
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        run = theirs(target, limit, assistant_model=helper, streamer=watch)(prompt)
        return Run(run.tokens, run.seconds, watch.generation(prompt, length))

    return decode


class Watch(BaseStreamer):
    """Streamer that notes the tokens of every call and the moment at which they came."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._puts: list[tuple[float, list[int]]] = []

    def put(self, value: Tensor) -> None:
        # work that is queued on the device belongs to the time of this round
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._puts.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None: ...

    def generation(self, prompt: list[int], drafted: int) -> Generation:
        """Return the reply that was streamed, with a record for every round after the first.

        `drafted` is the constant number of drafts a round. A round emits its accepted drafts and
        the bonus token, so it accepted one token less than came; the draft after the accepted ones
        was refused, unless all were accepted.
        """
        # the first call carries the prompt, the second the tokens of the round with the prefill
        (started, _), (first_came, first_tokens), *rounds = self._puts
        reply = Generation(prompt, list(first_tokens), ttft_s=first_came - started)
        previous = first_came
        for came, tokens in rounds:
            accepted, offered = len(tokens) - 1, min(len(tokens), drafted)
            seconds = came - previous
            reply.rounds.append(
                Round(
                    tokens=tokens,
                    drafted=drafted,
                    accepted=accepted,
                    offered=offered,
                    rule="greedy",
                    t_round_s=seconds,
                )
            )
            reply.token_ids += tokens
            previous = came
        reply.decode_s = previous - first_came
        return reply


def make_arms(target: Target, arguments: argparse.Namespace) -> list[Arm]:
    limit = arguments.max_new_tokens
    arms = [
        Arm("plain (ours)", ours(target, PlainDecoding(), limit)),
        Arm("target.generate", theirs(target, limit)),
    ]
    if arguments.draft_model:
        spec = f"{arguments.draft_model}:length={arguments.draft_length}"
        drafter: Any = load_proposer(spec, target, print)
        arms.append(
            Arm(
                f"assisted (transformers), {arguments.draft_length}",
                assisted(target, drafter, limit),
            )
        )
        arms.append(Arm(f"draft-model, {arguments.draft_length}", ours(target, drafter, limit)))
    for spec in arguments.drafter:
        arms.append(
            Arm(
                spec.rstrip("/").split("/")[-1],
                ours(target, load_proposer(spec, target, print), limit),
            )
        )
    return arms


def measure(arms: list[Arm], prompts: list[list[int]], repeats: int) -> None:
    for arm in arms:
        arm.decode(prompts[0])
    for prompt in ProgressReporter(prompts, desc="measuring"):
        turns: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for _ in range(repeats):
            for arm in arms:
                turns[arm.name].append(arm.decode(prompt))
        for arm in arms:
            arm.runs.append(sorted(turns[arm.name], key=lambda run: run.seconds)[repeats // 2])


def summarise(arm: Arm, base: Arm) -> dict[str, Any]:
    tokens = sum(len(run.tokens) for run in arm.runs)
    seconds = sum(run.seconds for run in arm.runs)
    found: dict[str, Any] = {
        "tokens_s": tokens / seconds,
        "speedup": sum(run.seconds for run in base.runs) / seconds,
        "speedup_median": statistics.median(
            b.seconds / a.seconds for a, b in zip(arm.runs, base.runs, strict=True)
        ),
        "identical": sum(a.tokens == b.tokens for a, b in zip(arm.runs, base.runs, strict=True)),
        "tau": None,
    }
    own = [run.own for run in arm.runs if run.own is not None]
    rounds = [r for generation in own for r in generation.rounds]
    if own:
        found["tau"] = tau([emitted_per_round(generation) for generation in own])
    if any(r.t_verify_s for r in rounds):  # transformers' loop does not tell
        wall = sum(r.t_round_s for r in rounds)
        found["split"] = {part: seconds / wall for part, seconds in split(rounds).items()}
        found["round_ms"] = 1000 * wall / len(rounds)
        found["loop_share"] = 1 - found["split"]["draft"] - found["split"]["verify"]
    return found


@torch.inference_mode()
def verify_cost(target: Target, context: int, repeats: int) -> dict[int, float]:
    """Median seconds of a target forward with head over N nodes (chains; a tree of N nodes costs
    the same), taking turns."""
    ids = (torch.arange(context, device=target.device) * 7 % target.vocab_size)[None]
    kind = StaticTreeCache if target.static else TreeCache
    cache = kind(1, context + max(NODES), target.device)
    target.prefill(ids, [context], cache)
    times: dict[int, list[float]] = {count: [] for count in NODES}
    for turn in range(repeats + 3):
        for count in NODES:
            tables = TreeShape.chain(count - 1).tables(target.device)
            tokens = ids[:, :count]
            start = synchronised(target.device)
            hidden = target.forward(
                tokens, Pass(depths=tables.depths, visible=tables.ancestors), cache
            )
            target.head(hidden.last)
            if turn >= 3:
                times[count].append(synchronised(target.device) - start)
    return {count: statistics.median(values) for count, values in times.items()}


def show(summaries: dict[str, dict[str, Any]], costs: dict[int, float], count: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table()
    for column in (
        "way",
        "tau",
        "tokens/s",
        "ratio",
        "identical",
        "ms a round",
        "draft",
        "verify",
        "accept",
        "cache",
        "host",
        "loop",
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, s in summaries.items():
        row = [
            name,
            f"{s['tau']:.2f}" if s["tau"] else "-",
            f"{s['tokens_s']:.0f}",
            f"{s['speedup']:.2f}x",
            f"{s['identical']}/{count}",
        ]
        if "split" in s:
            shares = [
                f"{s['split'][part]:.0%}" for part in ("draft", "verify", "accept", "kv", "host")
            ]
            row += [f"{s['round_ms']:.2f}", *shares, f"{s['loop_share']:.0%}"]
        table.add_row(*row, *[""] * (12 - len(row)))
    console.print(table)
    one = costs[1]
    console.print(
        "forward over N nodes, over that of 1 ("
        + f"{1000 * one:.2f} ms): "
        + ", ".join(f"{n}: {t / one:.2f}" for n, t in costs.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="JSON or JSONL file of prompts")
    parser.add_argument("--draft-model", help="folder of a small model with the target's tokenizer")
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        help="any other drafter; may be given several times",
    )
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--context",
        type=int,
        default=256,
        help="committed positions when forwards over N nodes are timed",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="compile the rounds of our loop")
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    config = TargetConfig(
        arguments.target,
        dtype=arguments.dtype,
        device=arguments.device,
        compile=arguments.compile,
    )
    target = load_for_decoding(config)
    prompts = [
        p.token_ids
        for p in read_prompts(arguments.prompts, target.tokenizer, target.name, arguments.limit)
    ]
    arms = make_arms(target, arguments)
    measure(arms, prompts, arguments.repeats)
    summaries = {arm.name: summarise(arm, arms[0]) for arm in arms}
    costs = verify_cost(target, arguments.context, 20 * arguments.repeats)
    show(summaries, costs, len(prompts))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {
                    "arguments": vars(arguments),
                    "threads": torch.get_num_threads(),
                    "ways": summaries,
                    "verify_s": costs,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
