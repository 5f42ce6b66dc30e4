"""Cost of a bounded ring of feature shards: few shards against as many as the trainer reads.

Extractor and trainer run side by side.

    OMP_NUM_THREADS=1 python scripts/bench/ring.py --method eagle \
        --config configs/eagle/quickstart.yaml --steps 200

The two sizes take turns. Printed: positions a second of the training as its log counts them
(evaluations left out), the most shards and bytes that were on disk at a time, and the share of the
trainer's time that went into waiting for and reading features.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table


class Watcher(threading.Thread):
    """The most that was ever in the folder of shards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self.over = folder, threading.Event()
        self.shards = self.bytes = 0

    def run(self) -> None:
        while not self.over.wait(0.01):
            sizes = []
            for path in [
                *self._folder.glob("*.safetensors"),
                *self._folder.glob(".*.safetensors.*.partial"),
            ]:
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            self.shards, self.bytes = max(self.shards, len(sizes)), max(self.bytes, sum(sizes))


def measure(arguments: argparse.Namespace, ring: int, folder: Path) -> dict[str, float]:
    store = folder / "store"
    module = [sys.executable, "-m", "draftsmith.train"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    extract = [
        "data",
        "extract",
        "--method",
        arguments.method,
        "--config",
        arguments.config,
        "--out",
        str(store),
    ]
    extract += ["--ring", str(ring), "--rows-per-shard", str(arguments.rows_per_shard)]
    extractor = subprocess.Popen([*module, *extract], env=environment, stdout=null, stderr=null)
    while not (store / "manifest.json").is_file():
        assert extractor.poll() is None
        time.sleep(0.1)
    watcher = Watcher(store / "shards")
    watcher.start()
    train = [
        arguments.method,
        "--config",
        arguments.config,
        "--out",
        str(folder / "run"),
        "--features.store",
        str(store),
    ]
    train += [
        "--max-steps",
        str(arguments.steps),
        "--log-every",
        "10",
        "--evaluation.every",
        "99999",
        "--checkpoints.every",
        "99999",
    ]
    subprocess.run([*module, *train], env=environment, check=True, stdout=null, stderr=null)
    assert extractor.wait(60) == 0
    watcher.over.set()
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "tokens_s" in row][1:]
    return {
        # of equally many positions each: the harmonic mean
        "tokens_s": len(rows) / sum(1 / row["tokens_s"] for row in rows),
        "waiting": statistics.mean(row["share_target"] for row in rows),
        "shards": watcher.shards,
        "mb": watcher.bytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ring", type=int, default=4)
    parser.add_argument("--rows-per-shard", type=int, default=8)
    parser.add_argument("--rows-per-step", type=int, default=1, help="rows_per_step of the config")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    # no shard that is never read
    everything = -(-arguments.steps * arguments.rows_per_step // arguments.rows_per_shard)
    found: dict[int, list[dict[str, float]]] = {arguments.ring: [], everything: []}
    for turn in range(arguments.repeats):
        for ring in found:
            with tempfile.TemporaryDirectory() as folder:
                found[ring].append(measure(arguments, ring, Path(folder)))
            print(f"{turn + 1}/{arguments.repeats} ring {ring}: {found[ring][-1]}", file=sys.stderr)
    table = Table("ring", "tokens/s", "share waiting or reading", "most shards", "most MB")
    for ring, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        most = {key: max(run[key] for run in runs) for key in ("shards", "mb")}
        name = f"all {ring}" if ring == everything else str(ring)
        table.add_row(
            name,
            f"{middle['tokens_s']:,.0f}",
            f"{middle['waiting']:.0%}",
            f"{most['shards']:.0f}",
            f"{most['mb']:.1f}",
        )
    console = Console(width=100)
    console.print(table)
    ratios = [a["tokens_s"] / b["tokens_s"] for a, b in zip(*found.values(), strict=True)]
    console.print(
        f"bounded against unbounded, median of {len(ratios)} pairs: {statistics.median(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
