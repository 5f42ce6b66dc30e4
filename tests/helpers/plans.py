"""The run of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.train.method import method_named
from tests.helpers.training import make_config


def run_of(tmp_path: Path, target: Path, method: str, **changes: Any):
    config = make_config(tmp_path, target, method, **changes)
    module = method_named(method.rstrip("1"))
    from draftsmith.train.command_line.parse import parse

    return config, module, parse(module.run_class, ["--config", str(config)], "x")
