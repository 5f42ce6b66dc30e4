"""Peak memory of a training step by method, and what each way to save some is worth: measured, not
estimated.

    OMP_NUM_THREADS=2 python scripts/bench/memory.py
    OMP_NUM_THREADS=2 python scripts/bench/memory.py --device cuda --hidden 4096 --layers 32 \
        --vocab 128256 --length 4096

A target with random weights (Llama's form: hidden H, H/64 heads, MLP 8/3 H), fp32, one packed row,
every position supervised. The figure is what a step of forward, backward and AdamW takes at its
peak above what lies there before it (weights, optimiser states, batch): on a CPU the process's
largest resident size, each case in a process of its own; on a GPU the allocator's count. Time is
that of the second step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from random_models import training_step
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.distill.draft_models import DraftModelConfig
from draftsmith.inference.targets.target import Target
from draftsmith.train.config import TargetConfig
from draftsmith.train.data.batches import Batch
from draftsmith.train.data.config import Data, Source
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.methods.registry import method_named

WHOLE = {"rows_per_chunk": 1 << 30}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "every logit at once", WHOLE),
    ("medusa", "in chunks (the default)", {}),
    ("eagle", "every logit at once", WHOLE),
    ("eagle", "in chunks (the default)", {}),
    ("eagle", "recompute", {"recompute": True}),
    ("distill", "every logit at once", WHOLE),
    ("distill", "in chunks (the default)", {}),
    ("distill", "recompute", {"recompute": True}),
]


def make_step(arguments: argparse.Namespace, name: str, options: dict[str, Any]):
    """A function that takes one optimiser step."""
    torch.manual_seed(0)
    heads = max(arguments.hidden // 64, 1)
    config = LlamaConfig(
        hidden_size=arguments.hidden, num_hidden_layers=arguments.layers, num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=arguments.hidden * 8 // 3, vocab_size=arguments.vocab,
        max_position_embeddings=arguments.length,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config).to(arguments.device), None, "random")
    method = method_named(name)
    run = method.run_class(out="-", target=TargetConfig(path="-"), data=Data(sources=[Source("-")]))
    if name == "distill":
        run.draft_model = DraftModelConfig(layers=max(arguments.layers // 2, 1))
    ids = torch.randint(0, arguments.vocab, (1, arguments.length))
    positions = torch.arange(arguments.length)[None]
    batch = Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    texts: Any = SimpleNamespace(
        sample=lambda count: [ids[0, :64]], token_counts=lambda vocab: torch.ones(vocab)
    )
    drafter = method.make_drafter(run, target, texts, None).to(arguments.device)
    source = LiveTarget(target, drafter.taps)
    step = training_step(
        name, target, drafter, lambda: source.features(batch), batch, False, **options
    )
    return step, sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def measure(arguments: argparse.Namespace, name: str, options: dict[str, Any]) -> dict[str, float]:
    step, size = make_step(arguments, name, options)
    cuda = arguments.device == "cuda"
    # the optimiser's states, which a first step makes, are part of what lies there before
    if not cuda:
        resident = psutil.Process().memory_info().rss
        step()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident - 8 * size
    else:
        step()
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - resident
    return {
        "parameters": size,
        "resident_mib": resident / 2**20,
        "step_mib": peak / 2**20,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        name, _, options = CASES[arguments.case]
        print(json.dumps(measure(arguments, name, options)))
        return
    found = []
    for number, (name, how, _) in enumerate(CASES):
        command = [sys.executable, __file__, *sys.argv[1:], "--case", str(number)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
        )
        found.append({"method": name, "how": how, **json.loads(done.stdout.splitlines()[-1])})
    table = Table("method", "how", "trained parameters", "step MiB", "s / step")
    for row in found:
        table.add_row(
            row["method"],
            row["how"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['step_mib']:,.0f}",
            f"{row['seconds']:.1f}",
        )
    Console(width=100).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
