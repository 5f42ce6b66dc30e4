"""Tokens per CPU-second and per second of several checkouts, alternating on the same prompts.

    git worktree add ../old COMMIT
    OMP_NUM_THREADS=1 python scripts/bench/checkouts.py --checkout ../old --checkout . \
        --drafter none --drafter scripts/quickstart/drafters/eagle3:length=7,width=10,nodes=60

Each checkout decodes in a process of its own, which loads the target and all drafters once. Every
prompt is decoded by every checkout before the next one, `--repeats` times; the run of median CPU
time counts. `--load` gives options of `draftsmith.inference.load`, such as '{"compile": true}', for
one more entry of each checkout. The texts are compared too. `--count` counts
operators of torch and calls in Python of a round, which do not depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS = [f"def {name}(self, value):" for name in ("add", "read", "close", "parse", "__init__")]
PROMPTS += ["class Stack:", "import os\n", "for item in items:", "return the sum of", "def f(x):"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--checkout", action="append", default=[])
    parser.add_argument("--load", action="append", default=[], help="options of load, as JSON")
    parser.add_argument("--target", default="scripts/quickstart/target")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--prompts", type=Path, help="JSON list of texts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", action="store_true", help="operators and calls, not times")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        serve(arguments, json.loads(arguments.child))
        return
    ways = [(checkout, {}) for checkout in arguments.checkout]
    for options in arguments.load:
        ways += [(checkout, json.loads(options)) for checkout in arguments.checkout]
    report(arguments, ways)


def serve(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Answer each line of standard input, [drafter, texts], with what decoding them cost."""
    from draftsmith.inference import load

    decoders = {}
    for spec in arguments.drafter:
        decoders[spec] = load(arguments.target, spec, device="cpu", **options)
    for line in sys.stdin:
        spec, texts = json.loads(line)
        decode = partial(
            decoders[spec].generate,
            texts,
            arguments.max_new_tokens,
            batch_size=len(texts),
            temperature=arguments.temperature,
        )
        wall, cpu = time.perf_counter(), time.process_time()
        replies = decode()
        cost = [time.process_time() - cpu, time.perf_counter() - wall]
        if arguments.count:
            cost = counts(decode)
        tokens = [reply.token_ids for reply in replies]
        rounds = sum(len(reply.rounds) for reply in replies)
        print(json.dumps([cost, tokens, rounds]), flush=True)


def counts(function: Callable[[], Any]) -> list[float]:
    """Return the operators of torch and the calls in Python that a function needs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Operators() as seen:
        function()
    profile = cProfile.Profile()
    profile.runcall(function)
    entries: Any = profile.getstats()
    return [seen.count, sum(entry.callcount for entry in entries)]


def report(arguments: argparse.Namespace, ways: list[tuple[str, dict[str, Any]]]) -> None:
    """Decode alternately and print a row for each drafter and way."""
    texts = json.loads(arguments.prompts.read_text()) if arguments.prompts else PROMPTS
    batches = [texts[i : i + arguments.batch] for i in range(0, len(texts), arguments.batch)]
    folder = tempfile.TemporaryDirectory()
    children = []
    for number, (checkout, options) in enumerate(ways):
        children.append(start(checkout, options, Path(folder.name, str(number))))
    for spec in arguments.drafter:
        costs: list[list[list[float]]] = [[] for _ in ways]
        answers: list[list[Any]] = [[] for _ in ways]
        for number, batch in enumerate(batches):
            runs: list[list[Any]] = [[] for _ in ways]
            for turn in range(arguments.repeats + (number == 0)):
                for way, child in enumerate(children):
                    answer = ask(child, spec, batch)
                    # the first run of all warms up, and compiles
                    if turn or number:
                        runs[way].append(answer)
            for way in range(len(ways)):
                medians = [statistics.median(run[0][i] for run in runs[way]) for i in (0, 1)]
                costs[way].append(medians)
                answers[way].append(runs[way][0][1:])
        show(spec, ways, costs, answers, arguments.count)
    for child in children:
        child.stdin.close()
        child.wait()


def start(checkout: str, options: dict[str, Any], folder: Path) -> Any:
    """Return the process of a checkout, which loads its models meanwhile.

    `folder` is made for it, so that Python finds the checkout as the package draftsmith.
    """
    folder.mkdir()
    (folder / "draftsmith").symlink_to(Path(checkout).resolve())
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(options)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(child: Any, spec: str, batch: list[str]) -> Any:
    child.stdin.write(json.dumps([spec, batch]) + "\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        sys.exit("a checkout's process ended; its message stands above")
    return json.loads(line)


def show(
    spec: str,
    ways: list[tuple[str, dict[str, Any]]],
    costs: list[list[list[float]]],
    answers: list[list[Any]],
    count: bool,
) -> None:
    """Print tokens per CPU-second and per second of each way, and as ratios to the first.

    With `count`: operators and calls of a round.
    """
    print(f"\n{spec}")
    base: list[float] = []
    for way, (checkout, options) in enumerate(ways):
        tokens = sum(len(ids) for texts, _ in answers[way] for ids in texts)
        rounds = sum(count for _, count in answers[way])
        totals = [sum(cost[i] for cost in costs[way]) for i in (0, 1)]
        speeds = [total / rounds if count else tokens / total for total in totals]
        base = base or speeds
        same = sum(a[0] == b[0] for a, b in zip(answers[way], answers[0], strict=True))
        ratios = [speed / first for speed, first in zip(speeds, base, strict=True)]
        what = ("operators", "calls a round") if count else ("tokens per CPU-second", "per second")
        figures = [
            f"{speed:.0f} {name} ({ratio:.3f}x)"
            for speed, name, ratio in zip(speeds, what, ratios, strict=True)
        ]
        print(
            f"  {checkout} {options or ''}: {', '.join(figures)}, {rounds} rounds, {same} of "
            f"{len(answers[way])} texts equal"
        )


if __name__ == "__main__":
    main()
