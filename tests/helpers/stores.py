"""Feature stores of tiny targets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import PYTHON, tiny_target
from tests.helpers.training import (
    environment,
    make_config,
)

PLAIN = {
    "distill": {"rollouts": {}},
}


def config_for(folder: Path, target: Path, method: str, **changes: Any) -> Path:
    """As in test_loop, without texts written on the way, and with a draft model that needs no
    target to be made."""
    folder.mkdir(exist_ok=True)
    more = dict(PLAIN.get(method, {}))
    if method == "distill":
        draft_model = folder.parent / "draft_model"
        if not draft_model.is_dir():
            small = tiny_target(seed=5, num_hidden_layers=1)
            small.model.save_pretrained(draft_model)
            small.tokenizer.save_pretrained(draft_model)
        more["draft_model"] = {"path": str(draft_model)}
    return make_config(folder, target, method, **(more | changes))


def extract(
    config: Path, store: Path, method: str, *options: Any
) -> subprocess.CompletedProcess[str]:
    # The folder of a run is none of the store's, and a config may lack it.
    without_out = config.with_name("extract.yaml")
    values = yaml.safe_load(config.read_text())
    without_out.write_text(yaml.safe_dump({k: v for k, v in values.items() if k != "out"}))
    command = [
        PYTHON,
        "-m",
        "draftsmith.train",
        "data",
        "extract",
        "--method",
        method.rstrip("1"),
        "--config",
        str(without_out),
    ]
    command += ["--out", str(store), "--rows-per-shard", "3", *map(str, options)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
