"""Throughput and waiting time of the local server's engine, with 1, 2 and 4 batches alternately,
and as the server does it: with 2, and more after a wait.

    python scripts/bench/serving.py --target TARGET --drafter DRAFTER --clients 16 --requests 96

Each client asks again as soon as its reply has ended; replies have 16 to 96 tokens. The numbers of
batches take turns, several times, and medians are printed. HTTP is not part of it.
"""

from __future__ import annotations

import argparse
import math
import queue
import random
import statistics
import threading
import time
from typing import Any

from draftsmith.inference.api import Decoder, load
from draftsmith.inference.decode import Request
from draftsmith.inference.serving import engine

WORDS = (
    "What is a prime number?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "List three fruits.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
)
LENGTHS = (16, 32, 64, 96)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--target", required=True)
    options.add_argument("--drafter", default="ngram")
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--requests", type=int, default=96)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    decoder = load(given.target, given.drafter, device="cpu")
    kinds = [(1, math.inf), (2, math.inf), (4, math.inf), (2, engine.MAX_BATCH_WAIT_S)]
    found: dict[tuple[int, float], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(given.repeats):
        for kind in kinds:
            engine.BATCHES, engine.MAX_BATCH_WAIT_S = kind
            found[kind].append(measured(decoder, given.clients, given.requests))
    for (batches, patience), runs in found.items():
        speeds, waits = zip(*runs, strict=True)
        more = "" if patience == math.inf else f", and more after {patience} s"
        print(
            f"{batches} batches alternately{more}: {statistics.median(speeds):.0f} tokens/s, first "
            f"token after {statistics.median(waits):.2f} s (median)"
        )


def measured(decoder: Decoder, clients: int, requests: int) -> tuple[float, float]:
    """Return tokens per second over all clients, and the median seconds until a first token."""
    at_work = engine.Engine(decoder.target, {"drafter": decoder.proposer}, queue=requests)
    prompts = [decoder.encode(words) for words in WORDS]
    draw = random.Random(1)
    limits = [draw.choice(LENGTHS) for _ in range(requests)]
    numbers, lock = iter(range(requests)), threading.Lock()
    waits: list[float] = []

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            events: queue.Queue[Any] = queue.Queue()
            request = Request(prompts[number % len(prompts)], 0, 0, limits[number])
            settings = engine.BatchSettings("drafter", ignore_eos=True)
            asked = time.perf_counter()
            at_work.submit([engine.Job(request, settings, lambda *event, to=events: to.put(event))])
            _, reason = events.get()
            waits.append(time.perf_counter() - asked)
            while reason is None:
                _, reason = events.get()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    at_work.close()
    return sum(limits) / seconds, statistics.median(waits)


if __name__ == "__main__":
    main()
