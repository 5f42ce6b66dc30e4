"""Cost of a training step of EAGLE-3 in CPU-seconds of one thread.

In float32, every row supervised, teacher logits given.

    OMP_NUM_THREADS=1 python scripts/bench/train_step.py
    OMP_NUM_THREADS=1 python scripts/bench/train_step.py --length 32768 --recompute --repeats 1
    OMP_NUM_THREADS=1 python scripts/bench/train_step.py --length 512 --against ../other-checkout

Two shapes: seven steps at hidden 256, 8 heads, 4 KV heads, MLP 1024, vocabulary 8192, draft
vocabulary 2048, batch 2 x 256; and three steps at hidden 256, 4 heads, 2 KV heads, MLP 704,
vocabulary 4096, draft vocabulary 1024, one row of 512. A step is forward, backward, clipping and
AdamW, with metrics in every tenth step. Best tokens are random, so that of a draft vocabulary of a
quarter of the tokens only a quarter of the positions has a loss (`--vocab 2049`: nearly all). The
speed of a large matrix product on the same thread is printed next to it, so that figures of
different machines can be compared. Peak memory is the process's, each shape in a process of its
own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.heads.eagle import EagleShape, drafter_of
from draftsmith.heads.layout import EmbeddingAndHead
from draftsmith.train.data.batches import Batch
from draftsmith.train.data.features import Features
from draftsmith.train.losses.unrolled import UnrolledObjective
from draftsmith.train.methods.eagle.config import EagleLoss
from draftsmith.train.methods.eagle.method import first_weights

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = 256
LOG_EVERY = 10


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
    drafter = drafter_of(shape, embedding_and_head)
    first_weights(
        drafter,
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
    objective = UnrolledObjective(
        EagleLoss(steps=case.steps, recompute=recompute).resolved(3),
        drafter,
        embedding_and_head.head,
    )
    denominators = objective.weights(batch)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)

    turns = itertools.count(1)

    def step() -> None:
        # metrics are measured where a log is due, as in training
        measured = next(turns) % LOG_EVERY == 0
        loss, _ = objective.forward(drafter, features, denominators, measured)
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


def compare(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the speed of this checkout and of another, whose steps take turns."""
    options = [json.dumps(case.__dict__), *["--recompute"] * arguments.recompute]
    folder = Path(tempfile.mkdtemp())
    workers = []
    for name, code in (("there", arguments.against), ("here", ROOT)):
        Path(folder, name).mkdir()
        Path(folder, name, "draftsmith").symlink_to(Path(code).resolve())
        file = str(folder / f"{name}.pt")
        command = [sys.executable, ROOT / "scripts/bench/steps_of.py", code, file, *options]
        environment = {**os.environ, "PYTHONPATH": str(folder / name)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append((subprocess.Popen(command, env=environment, **pipes), file))  # type: ignore
    times: list[list[float]] = [[], []]
    for turn in range(max(arguments.repeats, 20)):
        for (worker, _), seconds in zip(workers, times, strict=True):
            print("step", file=worker.stdin, flush=True)
            taken = float(worker.stdout.readline())
            seconds += [taken] * (turn > 1)
    for worker, _ in workers:
        worker.stdin.close()
        worker.wait()
    there, here = (torch.load(file) for _, file in workers)
    distance = sum((a - b).square().sum() for a, b in zip(there, here, strict=True)) ** 0.5
    tokens = case.rows * case.length
    return {
        "there": tokens / statistics.median(times[0]),
        "here": tokens / statistics.median(times[1]),
        "ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
        "weights_differ": float(distance / sum(a.square().sum() for a in there) ** 0.5),
    }


def alone(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Return what `measure` finds in a process of its own, whose memory is nobody else's."""
    command = [sys.executable, __file__, "--case", json.dumps(case.__dict__)]
    command += ["--repeats", str(arguments.repeats), *["--recompute"] * arguments.recompute]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


HEADINGS = {
    "tokens_per_cpu_s": ("tokens / CPU-s (median)", ",.0f"),
    "best": ("best", ",.0f"),
    "peak_mib": ("peak MiB", ",.0f"),
    "matmul_gflops": ("matmul GFLOP/s", ".0f"),
    "there": ("tokens / CPU-s there", ",.0f"),
    "here": ("here", ",.0f"),
    "ratio": ("ratio (median of pairs)", ".3f"),
    "weights_differ": ("weights differ after 20 steps", ".1e"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--length", type=int, help="instead: one row of this length, first shape")
    parser.add_argument("--vocab", type=int, default=8192, help="vocabulary of that row's target")
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps of that row")
    parser.add_argument(
        "--recompute", action="store_true", help="keep only the states between steps"
    )
    parser.add_argument("--against", help="another checkout: its steps and ours take turns")
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
        row = Case(8, 4, 1024, arguments.vocab, 2048, 1, arguments.length, arguments.steps)
        cases = {f"{arguments.steps} steps, 1 x {arguments.length}": row}
    found = {}
    for name, case in cases.items():
        found[name] = (compare if arguments.against else alone)(case, arguments)
    names = list(next(iter(found.values())))
    table = Table("case", *(HEADINGS[name][0] for name in names))
    for case_name, figures in found.items():
        table.add_row(case_name, *(format(figures[name], HEADINGS[name][1]) for name in names))
    Console(width=100).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
