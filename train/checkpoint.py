"""Checkpoints that are whole or absent, and the run folder around them.

OUTPUT/config.yaml               the resolved config of the run
OUTPUT/checkpoints/step-000200/  state/ (weights, optimiser, RNG of every rank), trainer.json,
                                 drafter/, config.yaml, provenance.json
OUTPUT/best, OUTPUT/last         links to the drafter of the best and of the latest checkpoint
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..heads.documents import read_document
from ..heads.errors import UserError
from ..heads.files import (
    damage,
    read_yaml,
    remove_partials,
    whole_directory,
    write_checksums,
    write_json,
)
from .documents import TrainerState

log = logging.getLogger(__name__)


class RunFolder:
    """The output folder of a run."""

    def __init__(self, output: str) -> None:
        self.path = Path(output)
        self.checkpoints = self.path / "checkpoints"

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        found = self.checkpoints.glob("step-*") if self.checkpoints.is_dir() else []
        return sorted(
            int(p.name.removeprefix("step-"))
            for p in found
            if p.name.removeprefix("step-").isdigit()
        )

    def at(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def save(
        self,
        accelerator: Accelerator,
        state: TrainerState,
        save_parts: Any,
        config_yaml: str,
        facts: Any,
    ) -> Path:
        """Write the checkpoint of `state.step`: all ranks call this; it exists only once every rank
        has written its part."""
        final = self.at(state.step)
        writer = whole_directory(final) if accelerator.is_main_process else nullcontext()
        with writer as aside:
            aside = Path(broadcast_object_list([str(aside)])[0])
            accelerator.save_state(str(aside / "state"))
            if accelerator.is_main_process:
                write_json(aside / "trainer.json", state.as_json())
                write_json(aside / "provenance.json", facts)
                (aside / "config.yaml").write_text(config_yaml)
                save_parts(aside)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                write_checksums(aside)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._link("last", final / "drafter")
        return final

    def load(self, accelerator: Accelerator, step: int) -> TrainerState:
        accelerator.load_state(str(self.at(step) / "state"))
        accelerator.step = 0  # it counts micro-batches, of which a step may have another number now
        return self.state_of(step)

    def state_of(self, step: int) -> TrainerState:
        """What `trainer.json` of a checkpoint says. Raises `UserError`."""
        remedy = f"delete {self.at(step)} and go on from the checkpoint before it"
        return read_document(self.at(step) / "trainer.json", TrainerState, remedy)[0]

    def set_aside(self, after: int) -> None:
        """Take checkpoints newer than `after` out of the way: those that were passed over for being
        damaged."""
        for step in self.steps():
            if step > after:
                self.at(step).rename(
                    self.checkpoints / f"damaged-{self.at(step).name}-{uuid.uuid4().hex[:6]}"
                )

    def check_identity(self, step: int, identity: dict[str, str]) -> None:
        """Demand that target and data are those of the checkpoint, before anything of it is
        overwritten."""
        before = self.state_of(step).identity
        for what, value in identity.items():
            if before.get(what) != value:
                raise UserError(
                    f"{self.path} holds checkpoints of a run whose {what} has changed since, "
                    "though its path has not; choose "
                    "another output"
                )

    def mark_best(self, step: int) -> None:
        self._link("best", self.at(step) / "drafter")

    def prune(self, keep: int, best_step: int) -> None:
        """Delete all but the newest `keep` checkpoints and the best one."""
        for step in self.steps()[:-keep]:
            if step != best_step:
                shutil.rmtree(self.at(step))
        remove_partials(self.checkpoints)
        remove_partials(self.path)

    def _link(self, name: str, to: Path) -> None:
        """Point the link OUTPUT/name at a folder inside OUTPUT, in one step."""
        aside = self.path / f".{name}.partial"
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(to, self.path))
        old = self.path / name
        if old.is_dir() and not old.is_symlink():  # a copy of the run that followed its links
            shutil.rmtree(old)
        aside.replace(old)


def find_resume(folder: RunFolder, config_yaml: str, resume: bool) -> int | None:
    """The step of the newest sound checkpoint to go on from, or None to start. Called before
    anything is loaded or written.

    A folder with checkpoints of another config is an error: going on would mix two runs, starting
    anew would destroy one. A checkpoint that has been damaged since it was written is passed over,
    aloud.
    """
    steps = folder.steps()
    if not steps:
        return None
    if not resume:
        raise UserError(
            f"{folder.path} already holds checkpoints; choose another output, or go on with "
            "checkpoints.resume=true"
        )
    while found := damage(folder.at(steps[-1])):
        log.warning(
            "checkpoint %s is damaged: %s; looking at the one before it",
            folder.at(steps[-1]),
            found,
        )
        if len(steps) == 1:
            raise UserError(
                f"{folder.path} holds no sound checkpoint ({found}); choose another output"
            )
        steps.pop()
    before = _flat(read_yaml(folder.at(steps[-1]) / "config.yaml"))
    now = _flat(yaml.safe_load(config_yaml))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in FREE_TO_CHANGE:
            raise UserError(
                f"{folder.path} holds checkpoints of another run ({key} was {before.get(key)}, "
                f"now it is {now.get(key)}); choose "
                "another output, or the same config"
            )
    return steps[-1]


FREE_TO_CHANGE = {
    "log_every", "tracker", "project", "checkpoints.resume", "checkpoints.keep",
    "evaluation.patience", "profile.first",
    "profile.steps", "optim.max_skipped", "features.store", "features.server",
    "features.server_model", "features.concurrency",
}  # fmt: skip


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`."""
    if not isinstance(config, dict):
        return {prefix: config}
    return {
        k: v
        for name, value in config.items()
        for k, v in _flat(value, f"{prefix}.{name}".lstrip(".")).items()
    }
