"""Time of a forward pass over 1 to 40 nodes: transformers' own, fused, with packed matrices, both.

    OMP_NUM_THREADS=1 python scripts/bench/layouts.py --target models/smollm2-135m-instruct \
        --dtype bfloat16

The four take turns; times are medians in milliseconds of CPU, the output head included. The last
column is the largest difference of a logit from transformers' pass, next to its own largest logit.
Above them stands the bound of plain decoding: the time in which one thread reads as many bytes as a
step's weights have.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.tree import Pass, TreeShape
from draftsmith.inference.targets.target import Target, load_target

COMMITTED = 64  # positions before the nodes
NODES = (1, 2, 4, 8, 16, 26, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    targets = {}
    for name, attention, packed in (
        ("transformers", "sdpa", False),
        ("fused", None, False),
        ("packed", "sdpa", True),
        ("both", None, True),
    ):
        targets[name] = load_target(
            TargetConfig(arguments.target, dtype=arguments.dtype, device="cpu", attention=attention)
        )
        if packed:
            targets[name].pack()
            print(f"{name}: {targets[name].packed_bytes / 1e6:.0f} MB of matrices are packed")
    print(bound(targets["transformers"], arguments.repeats))
    times: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        for count in NODES:
            passes = {name: over_chain(target, count) for name, target in targets.items()}
            times[count] = report(count, passes, arguments.repeats)
    for name in targets:
        ratios = [f"{times[count][name] / times[1][name]:.2f}" for count in NODES]
        print(f"{name}: a pass over {NODES} nodes over one of one node = {', '.join(ratios)}")


def bound(target: Target, repeats: int) -> str:
    """Return a line with the bytes of the weights of a step, and how long their reading takes."""
    read = {p.data_ptr(): p.nbytes for p in target.model.parameters()}
    size = sum(read.values())
    if not target.model.config.tie_word_embeddings:
        size -= target.model.get_input_embeddings().weight.nbytes  # a step reads one row of it
    words = torch.ones(size // 8, dtype=torch.int64)
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        words.sum()
        seconds.append(time.thread_time() - start)
    taken = statistics.median(seconds)
    return (
        f"weights of a step: {size / 1e6:.0f} MB, read at {size / taken / 1e9:.1f} GB/s in "
        f"{1000 * taken:.1f} ms"
    )


def over_chain(target: Target, count: int) -> Callable[[], Tensor]:
    """Return a function of one forward pass over `count` nodes after a prompt."""
    ids = (torch.arange(COMMITTED) * 7 % target.vocab_size)[None]
    cache = TreeCache(1, 2 * COMMITTED)
    target.prefill(ids, [COMMITTED], cache)
    tables = TreeShape.chain(count - 1).tables(target.device)

    def run() -> Tensor:
        hidden = target.forward(
            ids[:, :count], Pass(depths=tables.depths, visible=tables.ancestors), cache
        )
        return target.head(hidden.last)

    return run


def report(count: int, passes: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Time the passes alternately, print a line, and return the milliseconds of each."""
    logits = {name: run() for name, run in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run in passes.items():
            start = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - start)
    milliseconds = {name: 1000 * statistics.median(runs) for name, runs in seconds.items()}
    first = next(iter(milliseconds.values()))
    parts = []
    for name, value in milliseconds.items():
        parts.append(f"{name} {value:.1f} ({first / value:.2f}x)")
    reference = next(iter(logits.values())).float()
    error = max((other.float() - reference).abs().max().item() for other in logits.values())
    print(f"{count:3} nodes: {', '.join(parts)}; {error:.1e} of {reference.abs().max():.1f}")
    return milliseconds


if __name__ == "__main__":
    main()
