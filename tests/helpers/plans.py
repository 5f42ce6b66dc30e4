"""The run of a plan, and a batch of its full rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.methods.registry import method_named
from tests.helpers.training import make_config


def run_of(tmp_path: Path, target: Path, method: str, **changes: Any):
    config = make_config(tmp_path, target, method, **changes)
    module = method_named(method.rstrip("1"))
    from draftsmith.command_line.parse import parse

    return config, module, parse(module.run_class, ["--config", str(config)], "x")


def full_batch(run: Any, reply_share: float) -> Batch:
    """A batch of one document a row; the last `reply_share` of each is reply."""
    length = run.data.max_length
    written = np.arange(length) >= round(length * (1 - reply_share))
    return collate([[(np.zeros(length, int), written)]] * run.batch_rows)
