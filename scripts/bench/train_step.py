"""Cost of a training step of EAGLE-3 in CPU-seconds of one thread.

In float32, every row supervised, teacher logits given.

    OMP_NUM_THREADS=1 python scripts/bench/train_step.py
    OMP_NUM_THREADS=1 python scripts/bench/train_step.py --length 32768 --recompute  # one long row

Two shapes: seven steps at hidden 256, 8 heads, 4 KV heads, MLP 1024, vocabulary 8192, draft
vocabulary 2048, batch 2 x 256; and three steps at hidden 256, 4 heads, 2 KV heads, MLP 704,
vocabulary 4096, draft vocabulary 1024, one row of 512. A step is forward, backward, clipping and
AdamW. The speed of a large matrix product on the same thread is printed beside it, so that figures
of different machines can be compared. Peak memory is the process's, each shape in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from draftsmith.heads.eagle import EagleDrafter, EagleShape
from draftsmith.heads.embedding_and_head import EmbeddingAndHead
from draftsmith.train.data.batches import Batch
from draftsmith.train.features import Features
from draftsmith.train.methods.eagle import EagleLoss, EagleObjective
from rich.console import Console
from rich.table import Table

HIDDEN = 256


@dataclass(frozen=True)
class Case:
    """One shape."""

    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    draft_vocab: int
    rows: int
    length: int
    steps: int


CASES = {
    "7 steps, 2 x 256": Case(8, 4, 1024, 8192, 2048, 2, 256, 7),
    "3 steps, 1 x 512": Case(4, 2, 704, 4096, 1024, 1, 512, 3),
}


def make_step(case: Case, recompute: bool):
    """A function that takes one optimiser step on random data."""
    torch.manual_seed(0)
    shape = EagleShape(
        version=3, taps=(2, 4, 5), hidden_size=HIDDEN, target_hidden_size=HIDDEN,
        intermediate_size=case.mlp, num_layers=1,
        num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=HIDDEN // case.heads,
        vocab_size=case.vocab,
        draft_vocab_size=case.draft_vocab, max_positions=max(2048, case.length), norm_eps=1e-5,
        activation="silu",
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    embedding = 0.02 * torch.randn(case.vocab, HIDDEN)
    # The teacher's logits are given: a "last hidden state" is just a place in a table (one of
    # limited size for long rows).
    places = min(case.rows * case.length, 4096)
    logits = 2 * torch.randn(places, case.vocab)
    embedding_and_head = EmbeddingAndHead(
        lambda ids: torch.nn.functional.embedding(ids, embedding),
        lambda last: logits[last[:, 0].long()],
    )
    drafter = EagleDrafter(shape, embedding_and_head)
    drafter.start_from(
        torch.randn(case.vocab, HIDDEN),
        None,
        torch.randperm(case.vocab)[: case.draft_vocab].sort().values,
    )
    positions = torch.arange(case.length).repeat(case.rows, 1)
    batch = Batch(
        torch.randint(0, case.vocab, positions.shape),
        positions,
        torch.zeros_like(positions),
        torch.ones_like(positions) > 0,
    )
    last = (torch.arange(case.rows * case.length) % places).float().view(case.rows, case.length, 1)
    features = Features(
        batch, last, tuple(torch.randn(case.rows, case.length, HIDDEN) for _ in shape.taps)
    )
    objective = EagleObjective(
        EagleLoss(steps=case.steps, recompute=recompute).resolved(3),
        drafter.taps,
        embedding_and_head.head,
    )
    denominators = objective.weights(batch)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)

    def step() -> None:
        loss, _ = objective.forward(drafter, features, denominators)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def matmul_speed(size: int = 2048) -> float:
    """GFLOP/s of a square fp32 product, one thread."""
    a, b, times = torch.randn(size, size), torch.randn(size, size), []
    for _ in range(5):
        start = time.process_time()
        torch.mm(a, b)
        times.append(time.process_time() - start)
    return 2 * size**3 / min(times) / 1e9


def measure(case: Case, repeats: int, recompute: bool) -> dict[str, float]:
    step, tokens = make_step(case, recompute), case.rows * case.length
    times = []
    for turn in range(repeats + 1):
        start = time.process_time()
        step()
        if turn or repeats == 1:
            times.append(time.process_time() - start)
    return {
        "tokens_per_cpu_s": tokens / statistics.median(times),
        "best": tokens / min(times),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "matmul_gflops": matmul_speed(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--length",
        type=int,
        help="instead: one row of this length, in the first shape, for its memory",
    )
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps of that row")
    parser.add_argument(
        "--recompute", action="store_true", help="keep only the states between steps"
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.case:
        case = Case(**json.loads(arguments.case))
        print(json.dumps(measure(case, arguments.repeats, arguments.recompute)))
        return
    cases = CASES
    if arguments.length:
        cases = {
            f"{arguments.steps} steps, 1 x {arguments.length}": Case(
                8, 4, 1024, 8192, 2048, 1, arguments.length, arguments.steps
            )
        }
        arguments.repeats = 1
    found = {}
    for name, case in cases.items():
        command = [
            sys.executable,
            __file__,
            "--case",
            json.dumps(case.__dict__),
            "--repeats",
            str(arguments.repeats),
        ]
        done = subprocess.run(
            command + ["--recompute"] * arguments.recompute,
            check=True,
            capture_output=True,
            text=True,
        )
        found[name] = json.loads(done.stdout)
    table = Table("case", "tokens / CPU-s (median)", "best", "peak MiB", "matmul GFLOP/s")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['tokens_per_cpu_s']:,.0f}",
            f"{row['best']:,.0f}",
            f"{row['peak_mib']:,.0f}",
            f"{row['matmul_gflops']:.0f}",
        )
    Console(width=100).print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
