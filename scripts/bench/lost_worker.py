"""What a lost worker costs: extraction and regeneration with workers that are killed.

    python scripts/bench/lost_worker.py --workers 4

Real processes on this machine stand for nodes: `data extract` under `accelerate launch`, and
`data regenerate` with a share for each worker, for the quickstart's target. One worker is killed
with SIGKILL half-way. The other workers of a regeneration end their shares; those of an extraction
are ended by the launcher. Then the rest is done by one worker fewer, as on a cluster that has lost
a node. Printed is what was complete by then, whether any of it was done again, and how the rest of
the conversations was divided; exit code 1 if the result differs in any byte of a shard, or in any
reply, from that of one worker that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

TARGET = "scripts/quickstart/target"
ROWS_PER_SHARD = 2
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=240)
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error("--workers must be at least 2: one is lost")
    table = Table("", "all", "complete by then", "of these done again", "left for the others")
    with tempfile.TemporaryDirectory() as folder:
        same = [
            regenerate(Path(folder), arguments.workers, arguments.conversations, table),
            extract(Path(folder), arguments.workers, table),
        ]
    Console(width=100).print(table)
    print("the results are those of one undisturbed worker" if all(same) else "RESULTS DIFFER")
    raise SystemExit(not all(same))


def draftsmith(*arguments: Any, ranks: int = 1) -> subprocess.Popen[str]:
    if "extract" not in arguments:
        command = [sys.executable, "-c", "from draftsmith.commands.cli import main; main()"]
        return started([*command, *map(str, arguments)])
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks)]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--num_cpu_threads_per_process", "1", "-m"]
    return started([*command, "draftsmith.train", *map(str, arguments)])


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def wait_for(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args[:8]))}...: {errors[-2000:]}")  # type: ignore[index]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a condition; end the program if `process` ends first."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"a worker ended before it was to be killed: {process.stderr.read()}")  # type: ignore[union-attr]
        time.sleep(0.01)


def regenerate(folder: Path, workers: int, conversations: int, table: Table) -> bool:
    """Lose a worker that regenerates; return whether the replies are those of one worker."""
    prompts = folder / "prompts.jsonl"
    functions = [sys.executable, "scripts/quickstart/functions.py", "--split", "train"]
    command = [*functions, "--count", str(conversations), "--out", str(prompts)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    common = ["data", "regenerate", "--target", TARGET, "--data", prompts, "--batch-size", 4]
    common += ["--sampling.temperature", 0.8, "--max-new-tokens", 48]
    shares = folder / "replies"

    def begun(count: int) -> list[subprocess.Popen[str]]:
        return [
            draftsmith(*common, "--out", shares, "--share", f"{i}/{count}") for i in range(count)
        ]

    wait_for(draftsmith(*common, "--out", folder / "alone.jsonl"))
    alone = replies_in([folder / "alone.jsonl"])
    half = len(alone) // workers // 2
    running = begun(workers)
    victim = shares / f"share-{workers - 1:04d}-of-{workers:04d}.jsonl"
    wait_until(lambda: victim.exists() and victim.read_text().count("\n") >= half, running[-1])
    running[-1].kill()
    running[-1].wait()
    for worker in running[:-1]:  # the others end their shares
        wait_for(worker)
    done = len(replies_in(sorted(shares.glob("*.jsonl"))))
    before = {path: path.stat().st_size for path in shares.glob("*.jsonl")}
    for worker in begun(workers - 1):
        wait_for(worker)
    added = [
        len(replies_in([path])) for path in sorted(shares.glob("*.jsonl")) if path not in before
    ]
    found = replies_in(sorted(shares.glob("*.jsonl")))
    again = sum(added) - (len(alone) - done)
    left = " + ".join(map(str, added))
    table.add_row("conversations", str(len(alone)), str(done), str(again), left)
    return found == alone


def replies_in(files: list[Path]) -> dict[str, list[int]]:
    """Return the token ids of every complete conversation of `files`, by its id."""
    replies: dict[str, list[int]] = {}
    for path in files:
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                replies[row["id"]] = row["token_ids"]
    return replies


def extract(folder: Path, workers: int, table: Table) -> bool:
    """Lose a worker that extracts; return whether the shards are those of one worker."""
    config = yaml.safe_load(Path("configs/eagle/quickstart.yaml").read_text())
    config["out"] = str(folder / "run")
    config["data"]["sources"] = [{"path": str(folder / "replies"), "name": "train"}]
    config["data"]["held_out"] = {"by": "row", "share": 0.05}
    config["evaluation"] |= {"limit": 2, "max_new_tokens": 16}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    common = ["data", "extract", "--method", "eagle", "--config", folder / "run.yaml"]
    common += ["--rows-per-shard", ROWS_PER_SHARD]
    wait_for(draftsmith(*common, "--out", folder / "alone"))
    alone = shards_in(folder / "alone")
    store = folder / "store"
    running = draftsmith(*common, "--out", store, ranks=workers)
    wait_until(lambda: len(shards_in(store)) >= len(alone) // 2, running)
    ranks = psutil.Process(running.pid).children(recursive=True)
    lost = next(rank for rank in ranks if rank.environ().get("RANK") == str(workers - 1))
    lost.kill()
    running.communicate()  # the launcher ends the other workers
    before = shards_in(store)
    written = changes_in(store)
    wait_for(draftsmith(*common, "--out", store, ranks=workers - 1))
    again = sum(changes_in(store)[name] != when for name, when in written.items())
    left = len(alone) - len(before)
    table.add_row("shards", str(len(alone)), str(len(before)), str(again), str(left))
    return shards_in(store) == alone


def changes_in(store: Path) -> dict[str, int]:
    """Return when every complete shard was written."""
    notes = sorted((store / "shards").glob("shard-*.json"))
    return {note.stem: note.stat().st_mtime_ns for note in notes}


def shards_in(store: Path) -> dict[str, bytes]:
    """Return the bytes of every complete shard."""
    notes = sorted((store / "shards").glob("shard-*.json"))
    return {note.stem: note.with_suffix(".safetensors").read_bytes() for note in notes}


if __name__ == "__main__":
    main()
