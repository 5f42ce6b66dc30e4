"""Training by one library on a folder of data; runs in that library's environment.

    PYTHON worker.py LIBRARY DATA                               # steps, one for each input line
    PYTHON worker.py LIBRARY DATA --out FOLDER --seed 0 --epochs 3.5 --lr 1e-3 --option fc_norm=true

LIBRARY is draftsmith, speculators or specforge. In the first form every step's seconds of CPU time
(or of a GPU's time, with --device cuda) and loss are printed, and at the end the peak memory of the
steps after the first two compared with what was resident before the first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from pathlib import Path

import peer_data
import torch

UNCOUNTED = 2  # steps in which memory is allocated and code compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["draftsmith", "speculators", "specforge"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--bf16", action="store_true", help="autocast over float32 weights")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, as JSON")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    data = peer_data.read(arguments.data)
    options = {}
    for option in arguments.option:
        name, _, value = option.partition("=")
        options[name] = json.loads(value)
    # What a library prints of itself must not stand among the figures.
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = importlib.import_module(f"of_{arguments.library}")
    learner = library.Learner(data, arguments.device, arguments.bf16, **options)
    if arguments.out is None:
        answer(learner, data, arguments, figures)
    else:
        train(learner, data, arguments)


def answer(learner, data, arguments, figures) -> None:
    """Take a step for each line of standard input, with seconds and loss as the answer."""
    learner.begin(arguments.lr, 1000)
    rows = [learner.batch([data.documents[i] for i in row]) for row in data.shape.rows]
    cuda = arguments.device.type == "cuda"
    resident = torch.cuda.memory_allocated() if cuda else memory("VmRSS")
    for turn, _ in enumerate(sys.stdin):
        if turn == UNCOUNTED and cuda:
            torch.cuda.reset_peak_memory_stats()
        elif turn == UNCOUNTED:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        start = seconds(cuda)
        loss = learner.step(rows[turn % len(rows)])
        print(json.dumps({"s": seconds(cuda) - start, "loss": loss}), file=figures, flush=True)
    peak = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM")
    mib = {"peak_mib": peak / 2**20, "resident_mib": resident / 2**20}
    parameters = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    print(json.dumps(mib | {"trained_parameters": parameters}), file=figures, flush=True)


def seconds(cuda: bool) -> float:
    """Return the time that steps are measured by."""
    if not cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(name: str) -> int:
    """Return a line of this process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def train(learner, data, arguments) -> None:
    """Train over the rows in an order of the seed, again in each epoch, and save the drafter."""
    rows = list(range(len(data.shape.rows)))
    steps = round(arguments.epochs * len(rows))
    learner.begin(arguments.lr, steps)
    order, tokens, losses, started = [], 0, [], time.process_time()
    shuffled = random.Random(arguments.seed)
    for step in range(1, steps + 1):
        if not order:
            order = rows.copy()
            shuffled.shuffle(order)
        documents = [data.documents[i] for i in data.shape.rows[order.pop()]]
        losses.append(learner.step(learner.batch(documents)))
        tokens += sum(len(document.ids) for document in documents)
        if step % 100 == 0 or step == steps:
            rate = tokens / (time.process_time() - started)
            mean = sum(losses) / len(losses)
            print(f"step {step}/{steps} loss {mean:.4f} {rate:,.0f} tokens/CPU-s", file=sys.stderr)
            losses = []
    learner.save(arguments.out)
    notes = {"tokens": tokens, "steps": steps, "cpu_s": time.process_time() - started}
    parameters = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    notes |= {"trained_parameters": parameters}
    (arguments.out / "training.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
