"""Correctness, decoding and training on one GPU: a benchmark at 8B shape, in ten minutes.

    python scripts/bench/gpu.py --out runs/gpu                             # on a machine with a GPU
    python scripts/bench/gpu.py --out /tmp/gpu --device cpu --tiny         # the same code on a CPU

It needs no network, and of the packages torch, transformers, accelerate, safetensors, msgspec,
rich and, for the tests, pytest, hypothesis and peft. What a machine lacks of them can be given as
wheels (`gpu_wheels.sh` gets msgspec and, for the stage `peers`, speculators). Each stage runs in a
process of its own with a limit of its own, so that a fault of the GPU ends that stage alone. Every
figure is printed and appended to OUT/figures.jsonl when it is known: a stage that is cut off leaves
what it had. After each stage OUT/gpu.json and OUT/gpu.md hold everything. Exit code 1: a check
failed.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

STAGES = {  # seconds that each may take, in the order of their worth
    "machine": 30,
    "exactness": 50,
    "tests": 90,
    "eager": 60,
    "graph": 110,
    "training": 130,
    "peers": 100,
}
LEAST = 15  # seconds under which no stage is begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the program")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them, with commas")
    parser.add_argument(
        "--contexts", default="512,4096,16384", type=numbers, help="of the stage graph"
    )
    parser.add_argument("--nodes", default="8,16,32,60", type=numbers, help="sizes of its trees")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to import from")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit of all stages together")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # The end of a stage that runs is that of this process, also where `timeout` ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage:
        run_stage(options)
        return
    stages = options.stages.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        parser.error(f"unknown stage {unknown[0]}; there are {', '.join(STAGES)}")
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"{options.wheels} holds no wheel; write it with scripts/bench/gpu_wheels.sh")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("error: no CUDA device; give --device cpu --tiny", file=sys.stderr)
            raise SystemExit(2)
    raise SystemExit(run_all(options, stages))


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    return tuple(map(int, text.split(",")))


def run_stage(options: argparse.Namespace) -> None:
    """Run one stage in this process."""
    sys.path.append(str(Path(__file__).parent / "peers"))
    import gpu_stages
    import torch
    from gpu_report import Report

    report = Report(options.out / "figures.jsonl", options.stage)
    torch.manual_seed(0)
    try:
        stage = getattr(gpu_stages, options.stage)
        if options.stage == "graph" and not options.tiny:
            stage = partial(stage, nodes=options.nodes, contexts=options.contexts)
        stage(report, torch.device(options.device), options.tiny)
    except Exception as error:  # the failure of a stage is a result
        report.check("runs to its end", False, f"{type(error).__name__}: {str(error)[:300]}")
        raise


def run_all(options: argparse.Namespace, stages: list[str]) -> int:
    """Run the stages one after another; 1 if a check failed."""
    from gpu_report import read, write

    figures = options.out / "figures.jsonl"
    figures.unlink(missing_ok=True)
    if options.wheels is not None:
        unpacked = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
        for wheel in options.wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(unpacked)
        put_on_path(unpacked)
    if importlib.util.find_spec("draftsmith") is None:  # not installed: this checkout
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        Path(folder, "draftsmith").symlink_to(Path(__file__).resolve().parents[2])
        put_on_path(folder)
    started = time.monotonic()
    times: dict[str, float] = {}
    for stage in stages:
        left = 60 * options.minutes - (time.monotonic() - started)
        begun = time.monotonic()
        problem = run_process(options, stage, min(STAGES[stage], left)) if left > LEAST else "late"
        times[stage] = round(time.monotonic() - begun, 1)
        if problem:
            entry = {"stage": stage, "check": "the stage ends well", "holds": False}
            with figures.open("a") as file:
                file.write(json.dumps(entry | {"detail": problem}) + "\n")
        write(options.out, read(figures), times)
    failed = [entry for entry in read(figures) if entry.get("holds") is False]
    print(f"{options.out / 'gpu.md'}: {len(failed)} checks failed, {sum(times.values()):.0f} s")
    for entry in failed:
        print(f"FAILED {entry['stage']}: {entry['check']}: {entry['detail']}")
    return int(bool(failed))


def put_on_path(folder: str) -> None:
    """Let the processes of stages import from `folder`."""
    # An empty part would stand for the current folder.
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def run_process(options: argparse.Namespace, stage: str, seconds: float) -> str:
    """Run a stage in a process of its own; return what went wrong with it, if anything did."""
    print(f"{stage} (at most {seconds:.0f} s)", flush=True)
    command: list[Any] = [sys.executable, __file__, "--out", options.out, "--stage", stage]
    command += ["--device", options.device, *["--tiny"] * options.tiny]
    for name in ("contexts", "nodes"):
        command += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except BaseException as end:
            # Its children too, which would slow down the next stages.
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(end, subprocess.TimeoutExpired):
                raise
            return f"cut off after {seconds:.0f} s"
    return f"exit code {code}" if code else ""


if __name__ == "__main__":
    main()
