"""Options of the commands that read the config file of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ..command_line.fields import fields_of
from ..train.methods.registry import METHODS, MethodName, run_class_named


@dataclass
class RunFile:
    """Options of a command that reads the config file of a run; it takes the run's options too."""

    config: str
    """Config file of the run."""
    method: MethodName | None = field(default=None, kw_only=True)
    """Method of the run; if not given, the keys of the config file or its path
    (configs/eagle/...) determine it."""
    set: list[str] = field(default_factory=list, kw_only=True)
    """Change of a key of the run, such as target.dtype=float32; may be given several times, or
    written as an option of the run: --target.dtype float32."""

    @staticmethod
    def run_keys() -> dict[str, Any]:
        """Return the keys of the runs of all methods, which `--set` takes, and their types."""
        runs = map(run_class_named, METHODS)
        options = (one for run in runs for one in fields_of(run))
        return {one.name: one.kind for one in options if not is_dataclass(one.kind)}
