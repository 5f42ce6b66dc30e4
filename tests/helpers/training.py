"""Small training runs: their configurations, launches and logs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import PYTHON
from tests.helpers.rows import chat, write

WRITTEN = {"share": 0.3, "every": 3, "limit": 6, "max_new_tokens": 12}

METHODS: dict[str, dict[str, Any]] = {
    # its norms are about 0.25, DSpark's too, EAGLE-1's 0.35, EAGLE-3's 0.9
    "medusa": {"heads": {"num_heads": 3}, "optim": {"clip_norm": 0.1}},
    "eagle": {
        "heads": {"taps": [0, 1], "draft_vocab_size": 80},
        "objective": {"steps": 3},
        "optim": {"clip_norm": 0.5},
    },
    "eagle1": {"heads": {"version": 1}, "optim": {"clip_norm": 0.1}},
    "mtp": {"objective": {"steps": 2}, "optim": {"clip_norm": 0.1}},
    "dflash": {
        "heads": {"taps": [1], "num_layers": 1, "block_size": 4, "mask_token": 2},
        "objective": {"anchors": 20},
        "optim": {"optimizer": "muon", "clip_norm": 0.5},
    },
    "dspark": {
        "heads": {
            "taps": [1],
            "num_layers": 1,
            "block_size": 3,
            "markov_rank": 4,
            "mask_token": 2,
            "draft_vocab_size": 80,
        },
        "objective": {"anchors": 20, "loss": "lk-hybrid"},
        "optim": {"optimizer": "adamw", "clip_norm": 0.1},
    },
    "distill": {
        "draft_model": {"layers": 1},
        "rollouts": WRITTEN,
    },
}


def make_config(tmp_path: Path, target: Path, method: str = "medusa", **changes: Any) -> Path:
    """A run of a few seconds on the tiny target, with replies of very unequal length."""
    rows = [
        chat(f"question {i}", " ".join(["the"] * (3 + (7 * i) % 40)) + f" {i}") for i in range(60)
    ]
    held = [chat(f"held {i}", f"out {i} reply of some words") for i in range(8)]
    config: dict[str, Any] = {
        "out": str(tmp_path / "run"),
        "target": {"path": str(target), "device": "cpu"},
        "data": {
            "sources": [
                {"path": write(tmp_path / "train.jsonl", rows), "name": "train"},
                {"path": write(tmp_path / "held.jsonl", held), "name": "held"},
            ],
            "held_out": {"by": "source", "sources": ["held"]},
            "max_length": 160,
        },
        "max_steps": 20,
        "rows_per_step": 2,
        "batch_rows": 1,
        "log_every": 1,
        "evaluation": {"every": 10, "limit": 4, "max_new_tokens": 16, "tree_nodes": 6},
        "checkpoints": {"every": 5},
    }
    config.update(METHODS[method] | changes)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


LAUNCH = [
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


def environment(**more: str) -> dict[str, str]:
    """Ranks start as forks (`PYTHON_EXEC` is torchrun's), whatever their launcher runs in."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHON_EXEC": PYTHON,
    }
    return {**os.environ, **fixed, **more}


def launch(*arguments: Any, ranks: int = 1, **more: Any) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` as the README has it."""
    many = ["--multi_gpu"] if ranks > 1 else []
    base = [
        PYTHON,
        "-m",
        "accelerate.commands.launch",
        *LAUNCH,
        *many,
        "--num_processes",
        str(ranks),
    ]
    return subprocess.run(
        [*base, *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=240,
    )


def train(
    config: Path, *options: Any, ranks: int = 1, method: str = "medusa", **more: Any
) -> subprocess.CompletedProcess[str]:
    done = launch(
        "-m",
        "draftsmith.train",
        method.rstrip("1"),
        "--config",
        config,
        *options,
        ranks=ranks,
        **more,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Setting accelerator" not in done.stdout, "a warning of deepspeed's, with no GPU here"
    return done


def logged(output: str, name: str) -> dict[int, float]:
    """step -> `loss`, `tau_measured` or `tau_estimated` as the lines of a run say them."""
    form = {
        "loss": r"loss (\S+)",
        "tau_measured": r"tau (\S+) (?:\(.*\) )?on held-out prompts",
        "tau_estimated": r"tau (\S+) estimated",
    }[name]
    found = {}
    for line in output.splitlines():
        if said := re.match(rf"step +(\d+)/\d+  .*?{form}", line):
            found[int(said[1])] = float(said[2])
    return found


def resumed_at(done: subprocess.CompletedProcess[str]) -> int:
    """The step that a run went on from; 0 if it began again, which would end in equal weights."""
    found = re.search(r"continuing from step (\d+)", done.stderr)
    return int(found[1]) if found else 0


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (run / "checkpoints" / f"step-{step:06d}" / "drafter").glob("*.safetensors")
    return load_file(file)
