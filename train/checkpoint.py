"""Checkpoints of a training run, each complete or absent, and the folder of the run.

OUTPUT/config.yaml               the resolved config of the run
OUTPUT/checkpoints/step-000200/  state/ (weights, optimiser, RNG of every rank), trainer.json,
                                 drafter/, config.yaml, provenance.json, checksums.json
OUTPUT/best, OUTPUT/last         links to the drafters of the best and the latest checkpoint
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from msgspec import Meta

from ..command_line.parse import options_from
from ..heads.artifact import Artifact
from ..heads.documents import Count, Document, read_document
from ..heads.errors import UserError
from ..heads.files import (
    JsonObject,
    damage,
    partial_path,
    remove_partials,
    whole_directory,
    write_checksums,
    write_json,
)
from ..heads.fingerprint import changed_numbers
from .config import RunConfig
from .data.rollouts import RolloutRows
from .reporting import flat

log = logging.getLogger(__name__)

# Options that may differ on a resume: none of them changes what a step learns. They decide what is
# reported and kept, when the run stops, and how the same features reach the trainer. The target may
# have another name: its weights are compared (`RunFolder.check_identity`).
CHANGEABLE_ON_RESUME = {
    "target.path", "target.adapter",
    "batch_rows", "for_", "log_every", "tracker", "checkpoints.keep", "evaluation.every",
    "features.store", "features.server", "features.server_model",
    "features.server_layers",
}  # fmt: skip


class TrainerState(Document, kw_only=True):
    """`trainer.json` of a checkpoint: facts that a resume needs.

    The position in the data is a function of the step.
    """

    what: ClassVar[str] = "the state of a training run"

    step: Count = 0
    """Number of optimiser steps so far."""
    tokens: Count = 0
    """Number of positions so far, padding included."""
    best_tau: float = 0.0
    """Highest tau of all evaluations so far."""
    best_step: Annotated[int, Meta(ge=-1)] = -1
    """Step of that evaluation; -1 before the first one."""
    evaluated: Count = 0
    """Last evaluated step. A run that is stopped at a step with an evaluation leaves the evaluation
    to the resumed run."""
    rows_per_step: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Packed rows of a step; a resume with another number would skip or repeat data."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Number of processes that wrote the checkpoint."""
    engine: str = "replicated"
    """Form of weights and optimiser in the checkpoint, see `parallel.engine_of`."""
    skipped: Count = 0
    """Number of steps whose gradient was not finite."""
    skipped_in_a_row: Count = 0
    """Number of the latest of them, without a good step in between."""
    total_steps: Count = 0
    """Number of steps of the whole run."""
    identity: JsonObject = msgspec.field(default_factory=dict)
    """Hashes of the target's weights and of the data, which the config names by path only, and the
    `numbers` of the target's configuration."""
    schema: Annotated[int, Meta(ge=1)] = 1


class RunFolder:
    """Output folder of a run, with its checkpoints and the links `best` and `last`."""

    def __init__(self, output: str) -> None:
        self.path = Path(output)
        self.checkpoints = self.path / "checkpoints"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        if not self.checkpoints.is_dir():
            return []
        names = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def at(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def save(
        self,
        accelerator: Accelerator,
        state: TrainerState,
        run: RunConfig,
        artifact: Artifact,
        rollouts: RolloutRows | None,
    ) -> None:
        """Write the checkpoint of `state.step` and link it; all ranks call this.

        The folder gets its name only after every rank has written its files.
        """
        # `nullcontext` gives None, in whose place the broadcast puts the main process's folder.
        main = accelerator.is_main_process
        writer = whole_directory(self.at(state.step)) if main else nullcontext()
        with writer as aside:
            # The other ranks write their random states into the main process's unfinished folder.
            aside = Path(broadcast_object_list([str(aside)])[0])
            accelerator.save_state(str(aside / "state"))
            if main:
                write_json(aside / "trainer.json", msgspec.to_builtins(state))
                write_json(aside / "provenance.json", artifact.provenance)
                (aside / "config.yaml").write_text(run.as_yaml())
                artifact.save(aside / "drafter")
                if rollouts is not None:
                    rollouts.save(aside)
            # The checksums cover the files of all ranks, so all must have been written.
            accelerator.wait_for_everyone()
            if main:
                write_checksums(aside)
        # The folder got its final name where the main process left the `with` block.
        accelerator.wait_for_everyone()
        if main:
            self.link("last", state.step)

    def load(self, accelerator: Accelerator, step: int) -> TrainerState:
        """Load a checkpoint into what `accelerator` has prepared, and return its `trainer.json`.

        All ranks call this.
        """
        accelerator.load_state(str(self.at(step) / "state"))
        # accelerate counts micro-batches to know which of them ends a step; a resume on another
        # number of ranks has another number of micro-batches in a step.
        accelerator.step = 0
        return self.state_of(step)

    def state_of(self, step: int) -> TrainerState:
        """Return the contents of a checkpoint's `trainer.json`. Raises `UserError`."""
        remedy = f"delete {self.at(step)} and continue from the checkpoint before it"
        return read_document(self.at(step) / "trainer.json", TrainerState, remedy)[0]

    def rename_damaged(self, after: int) -> None:
        """Rename the checkpoints newer than `after`, all of which are damaged.

        Otherwise the next resume would check them again, and `prune` would keep them as the newest.
        """
        for step in self.steps():
            if step > after:
                # Checkpoints of the same step may be damaged repeatedly, hence the random suffix.
                self.at(step).rename(
                    self.checkpoints / f"damaged-{self.at(step).name}-{uuid.uuid4().hex[:6]}"
                )

    def check_identity(self, step: int, identity: JsonObject) -> None:
        """Raise `UserError` unless target and data are still those of the checkpoint of `step`.

        `identity` is that of `TrainerState`. Called before anything in the run folder is
        overwritten.
        """
        before = self.state_of(step).identity
        for name, value in identity.items():
            if name == "numbers" and isinstance(stored := before.get(name, {}), dict):
                if changes := changed_numbers(stored, value):
                    raise UserError(
                        f"{self.path} holds checkpoints of a run whose target's configuration has "
                        f"changed since ({changes}); change it back, or choose another output"
                    )
            elif before.get(name) != value:
                what = "target has other weights" if name == "target" else f"{name} has changed"
                raise UserError(
                    f"{self.path} holds checkpoints of a run whose {what} since; choose another "
                    "output"
                )

    def prune(self, keep: int, best_step: int) -> None:
        """Delete all checkpoints but the newest `keep` and the one of `best_step`."""
        for step in self.steps()[:-keep]:
            if step != best_step:
                shutil.rmtree(self.at(step))
        # The run holds the folder's lock, and no other rank writes while checkpoints are pruned.
        remove_partials(self.checkpoints, owned=True)
        remove_partials(self.path, owned=True)

    def link(self, name: Literal["best", "last"], step: int) -> None:
        """Point the link OUTPUT/name at the drafter of the checkpoint of `step`."""
        old = self.path / name
        aside = partial_path(old)
        # Relative, so that the run folder can be moved.
        aside.symlink_to(os.path.relpath(self.at(step) / "drafter", self.path))
        if old.is_dir() and not old.is_symlink():  # a copy of the run that followed its links
            shutil.rmtree(old)
        # A rename is atomic: a reader finds the old link or the new one.
        aside.replace(old)


def find_resume(
    folder: RunFolder, run: RunConfig, fill_in: Callable[[RunConfig], None] = lambda stored: None
) -> int | None:
    """Return the step of the newest undamaged checkpoint, or None if the run has none yet.

    `fill_in` sets the options of the stored config that the target determines, as they are in
    `run`. Called before anything is loaded or written. Raises `UserError` if all checkpoints are
    damaged or of another config: to continue would mix two runs, to start again would destroy one.
    A damaged checkpoint is skipped with a warning.
    """
    steps = folder.steps()
    if not steps:
        return None
    while problem := damage(newest := folder.at(steps[-1])):
        log.warning("checkpoint %s is damaged: %s; looking at the one before it", newest, problem)
        steps.pop()
        if not steps:
            raise UserError(
                f"{folder.path} holds no sound checkpoint ({problem}); choose another output"
            )
    # Flat tables, so that the message can name the one key that differs.
    try:
        stored = options_from(type(run), {}, newest / "config.yaml")
        fill_in(stored)
    except UserError as error:  # a run of another method has other keys
        raise UserError(
            f"{folder.path} holds checkpoints of another run ({error}); choose another output"
        ) from error
    before, now = flat(stored.as_json()), flat(run.as_json())
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in CHANGEABLE_ON_RESUME:
            raise UserError(
                f"{folder.path} holds checkpoints of another run ({key} was {before.get(key)}, "
                f"now it is {now.get(key)}); choose another output, or the same config"
            )
    return steps[-1]
