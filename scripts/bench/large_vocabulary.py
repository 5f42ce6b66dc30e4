"""CPU-seconds of training steps of Medusa heads and of an EAGLE-3 with the same draft vocabulary,
for a target with a large vocabulary.

    OMP_NUM_THREADS=1 python scripts/bench/large_vocabulary.py
    OMP_NUM_THREADS=1 python scripts/bench/large_vocabulary.py --whole --repeats 1

The target has random weights (Llama's form, two layers). A step reads one row of `--length`
tokens, all of them a reply: the target's features, loss without metrics, backward pass, clipping
and the optimiser, AdamW for both or each method's own default. The methods take turns, in the CPU
time of one thread; after a first step, medians of `--repeats` steps count. The draft vocabulary
holds the target's best tokens, as one made from real texts nearly always does; with `--outside` it
is random, and EAGLE-3 leaves out most positions. `--whole` adds Medusa heads that draft all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from random_models import run_of
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.inference.targets.target import Target
from draftsmith.train.config import Optim
from draftsmith.train.data.batches import Batch
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.methods.registry import MethodName, method_named
from draftsmith.train.objectives import TrainingModule
from draftsmith.train.optimizer import make_optimizer

HEADS: dict[str, tuple[MethodName, dict[str, Any]]] = {
    "eagle": ("eagle", {"taps": [0, 1]}),
    "medusa": ("medusa", {}),
    "medusa, all tokens": ("medusa", {}),
}


def make_step(target: Target, name: str, drafted: int | None, options: argparse.Namespace):
    """Return a function that takes one optimiser step of the drafter `name` of `HEADS`."""
    method_name, heads = HEADS[name]
    method = method_named(method_name)
    run = run_of(method)
    for option, value in {**heads, "draft_vocab_size": drafted}.items():
        setattr(run.heads, option, value)
    if options.optimizer == "adamw":
        run.optim = Optim("adamw")
    ids = torch.randint(0, target.vocab_size, (1, options.length))
    positions = torch.arange(options.length)[None]
    batch = Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    counts = torch.rand(target.vocab_size)
    if not options.outside:
        last = LiveTarget(target).features(batch).last
        with torch.no_grad():
            counts[target.head(last).argmax(-1)] += 1
    batches: Any = SimpleNamespace(token_counts=lambda vocab: counts)
    drafter = method.make_drafter(run, target, batches, None)
    objective = method.make_objective(run, target, drafter)
    module, source = TrainingModule(drafter, objective), LiveTarget(target, drafter.taps)
    optimizer, denominators = make_optimizer(run.optim, module), objective.weights(batch)

    def step() -> None:
        loss, _ = module(source.features(batch), denominators, False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median CPU-seconds of each of `steps`, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn:  # the first step makes the optimiser's states
                found[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--drafted", type=int, default=32000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "default"])
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, num_hidden_layers=2, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64, intermediate_size=options.hidden * 3,
        vocab_size=options.vocab, tie_word_embeddings=True,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "random")
    steps = {}
    for name in HEADS if options.whole else list(HEADS)[:2]:
        drafted = None if name.endswith("all tokens") else options.drafted
        steps[name] = make_step(target, name, drafted, options)
    seconds = seconds_of(steps, options.repeats)
    table = Table("drafter", "CPU-s a step", "tokens a CPU-second", "of EAGLE-3")
    for name, taken in seconds.items():
        ratio = seconds["eagle"] / taken
        table.add_row(name, f"{taken:.2f}", f"{options.length / taken:.1f}", f"{ratio:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
