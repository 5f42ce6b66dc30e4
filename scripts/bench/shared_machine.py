"""What the quickstart's commands cost on a machine that other processes use too.

    python scripts/bench/shared_machine.py             # after ./scripts/quickstart.sh; an hour
    python scripts/bench/shared_machine.py --busy 0,2 --stages eagle

Each stage is a smaller form of one of the quickstart's. It runs with the threads that the command
chooses, and with fixed settings, next to processes that do nothing but compute. The settings take
turns. The table has seconds, the ratio to the quiet machine, and that to the best fixed setting. A
setting that takes `LIMIT` times as long as the best one before it is stopped there, and has inf.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = Path("runs/quickstart")
TARGET = "scripts/quickstart/target"
SETTINGS: dict[str, dict[str, str]] = {
    "chosen": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "two that sleep": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    # GNU OpenMP's own default; naming it keeps the command from choosing another
    "two that spin": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "300000"},
}
THREADS = {name for setting in SETTINGS.values() for name in setting}
LIMIT = 1.5


def stages(folder: Path) -> dict[str, list[str]]:
    """Return the command of each stage; all write into `folder`."""

    def training(method: str, steps: int) -> list[str]:
        config = f"configs/{method}/quickstart.yaml"
        every = ["--evaluation.every", str(steps), "--evaluation.limit", "4"]
        out = ["--out", str(folder / method), "--max-steps", str(steps)]
        return ["train", method, "--config", config, *out, *every]

    return {
        "replies": [
            "data", "regenerate", "--target", TARGET, "--data", str(RUN / "train.prompts.jsonl"),
            "--limit", "128", "--sampling.temperature", "0.8", "--max-new-tokens", "160",
            "--batch-size", "64", "--out", str(folder / "replies.jsonl"),
        ],
        "medusa": training("medusa", 30),
        "eagle": training("eagle", 120),
        "evaluation": [
            "evaluate", "--target", TARGET, "--drafter", str(RUN / "eagle/best"), "--limit", "8",
            "--no-baselines", "--repeats", "1", "--prompts", str(RUN / "test.prompts.jsonl"),
            "--max-new-tokens", "128",
        ],
    }  # fmt: skip


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that compute without end."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(stage: str, setting: str, limit: float) -> float:
    """Return the wall time of a stage with a setting; infinite where it takes more than `limit`."""
    folder = Path(tempfile.mkdtemp())
    environment = {k: v for k, v in os.environ.items() if k not in THREADS}
    environment |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", **SETTINGS[setting]}
    command = [sys.executable, "-m", "draftsmith", *stages(folder)[stage]]
    started = time.monotonic()
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return float("inf")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(command)}: {error.stderr.decode()[-2000:]}")
    finally:
        shutil.rmtree(folder)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--busy", default="0,2,4", help="numbers of busy processes")
    parser.add_argument("--stages", default="replies,medusa,eagle,evaluation")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if not (RUN / "eagle/best").exists():
        sys.exit("error: run ./scripts/quickstart.sh first")
    quiet: dict[str, float] = {}
    print(f"{'stage':<12}{'busy':>5}  {'threads':<16}{'s':>7}{'x quiet':>9}{'x best fixed':>14}")
    for stage in options.stages.split(","):
        for count in map(int, options.busy.split(",")):
            taken: dict[str, list[float]] = {name: [] for name in SETTINGS}
            with busy(count):
                for _ in range(options.repeats):
                    for setting, times in taken.items():
                        known = [one for all_of in taken.values() for one in all_of]
                        limit = LIMIT * min(known) if known else 15 * quiet.get(stage, 60.0)
                        times.append(seconds(stage, setting, limit))
            medians = {name: statistics.median(times) for name, times in taken.items()}
            quiet.setdefault(stage, medians["chosen"])
            best = min(medians[name] for name in SETTINGS if name != "chosen")
            for setting, median in medians.items():
                ratios = f"{median / quiet[stage]:>9.2f}{median / best:>14.2f}"
                print(f"{stage:<12}{count:>5}  {setting:<16}{median:>7.1f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
