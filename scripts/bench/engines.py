"""Cost of each training engine, and the gain of a second rank: EAGLE on CPU ranks of one thread.

    OMP_NUM_THREADS=1 python scripts/bench/engines.py --config configs/eagle/quickstart.yaml \
        --steps 40

One rank with two forward passes a step; two ranks with one each under DDP, FSDP2, ZeRO-2 and
ZeRO-3: the same rows in each step. Runs take turns; of each the median of tokens/s as its own log
says, evaluations left out. Efficiency: tokens/s over twice one rank's. Peak memory is the largest
rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ENGINES = ("one rank", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3")
KINDS = {"FSDP2": "fsdp2", "ZeRO-2": "deepspeed-zero2", "ZeRO-3": "deepspeed-zero3"}
RANK_SCRIPT = Path(__file__).with_name("engine_rank.py")


def command_of(engine: str, arguments: list[str]) -> list[str]:
    train = ["-m", "draftsmith.train", "eagle", *arguments]
    if engine == "one rank":
        return [sys.executable, *train]
    if engine == "DDP":
        launch = [
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
        ]
        return [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *launch,
            "--multi_gpu",
            "--num_processes",
            "2",
            *train,
        ]
    name = engine.lower().replace("-", "")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    return [*torchrun, str(RANK_SCRIPT), name, "eagle", *arguments]


def measure(engine: str, config: str, steps: int, folder: Path) -> tuple[float, float]:
    """Tokens/s of one run, and the peak resident MiB of its largest process."""
    arguments = [
        "--config",
        config,
        "--out",
        str(folder),
        "--max-steps",
        str(steps),
        "--log-every",
        "5",
    ]
    arguments += [
        "--rows-per-step",
        "2",
        "--evaluation.limit",
        "2",
        "--evaluation.every",
        "9999",
    ]
    arguments += [
        "--evaluation.max-new-tokens",
        "8",
        "--checkpoints.every",
        "9999",
        "--objective.single-step-share",
        "0",
        "--optim.optimizer",
        "adamw",  # DeepSpeed takes no Muon
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command_of(engine, arguments),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0.0
    while process.poll() is None:
        for child in [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]:
            try:
                peak = max(peak, child.memory_info().rss / 2**20)
            except psutil.Error:
                continue
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 0, engine
    ran_under = json.loads(next(folder.glob("checkpoints/*/trainer.json")).read_text())["engine"]
    assert ran_under == KINDS.get(engine, "replicated"), ran_under
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_s"] for row in rows[1:] if "tokens_s" in row), peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
    for turn in range(arguments.repeats):
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as folder:
                found[engine].append(
                    measure(engine, arguments.config, arguments.steps, Path(folder, "run"))
                )
            print(
                f"{turn + 1}/{arguments.repeats} {engine}: {found[engine][-1][0]:.0f} tokens/s",
                file=sys.stderr,
            )
    base = statistics.median(speed for speed, _ in found["one rank"])
    table = Table(
        "engine", "ranks", "tokens/s", "against one rank", "efficiency", "peak MiB a rank"
    )
    for engine, runs in found.items():
        speed, ranks = statistics.median(s for s, _ in runs), 1 if engine == "one rank" else 2
        peak = max(p for _, p in runs)
        table.add_row(
            engine,
            str(ranks),
            f"{speed:,.0f}",
            f"{speed / base:.2f}x",
            f"{speed / base / ranks:.0%}",
            f"{peak:,.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
