"""Training loop of every method: steps, logs, evaluations, checkpoints, and an orderly stop.

A step (`trainer.DrafterTrainer.step`) adds up the weights of its micro-batches over all ranks, and
uses these sums as denominators of each micro-batch's loss. So the objective does not depend on how
ranks and forward passes share the rows of a step (docs/objectives.md#global-denominators).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed

from ..command_line.process import StopRequested
from ..heads.artifact import Artifact, read_own_file
from ..heads.errors import UserError
from ..heads.files import JsonObject, whole_file
from ..inference.base.console import ProgressReporter, plural
from ..inference.base.output_paths import check_output_folder
from ..inference.conversations.sources import source_files
from ..inference.evaluation.training_log import METRICS_FILE, repair_metrics
from ..inference.proposers.custom_drafters import reported
from ..inference.targets.spread import on_first
from ..inference.targets.stored import manifest_of
from ..inference.targets.target import resolve_device
from ..inference.targets.target_files import check_target_exists
from .checkpoint import RunFolder, TrainerState, find_resume
from .config import Callback, RunConfig, divided, interval
from .data.batches import Batches
from .estimate import check_affordable, log_serving_engines
from .evaluation import EvaluationAborted, HeldOutEvaluation, warn_of_difference
from .loading import load_inputs
from .method import AnyMethod
from .objectives import Sums, add_sums, means
from .optimizer import rate_at
from .outline import MetaTarget, target_of_run
from .parallel import (
    disable_zero3_loading,
    end_training,
    engine_of,
    lock_output,
    log_engine,
    make_accelerator,
)
from .reporting import check_tracker, evaluation_line, start_tracker, step_line, track
from .trainer import DrafterTrainer

log = logging.getLogger(__name__)

MAX_SKIPPED = 10  # steps in a row without a finite gradient: no run has recovered from more
CANDIDATE = ".candidate"  # folder in the run's output for the drafter to be measured


def train(run: RunConfig, method: AnyMethod, callbacks: Sequence[Callback] = ()) -> Path:
    """Train one drafter to its end and return the folder of the best one.

    Every rank has the same number of `callbacks`. Raises `StopRequested` after a last checkpoint if
    the run was asked to stop, and `UserError` for what the user can correct.
    """
    with reported(type(method)):
        check_before_loading(run, method)
        # After this the run is complete, as its folder, its trackers and its checks need it.
        target = check_with_target(run, method, int(os.environ.get("WORLD_SIZE", "1")))
        log_serving_engines(run, method)
        accelerator = make_accelerator(run)
        log_engine(accelerator)
        disable_zero3_loading(accelerator)
        with lock_output(run.out):
            return _train(run, method, target, accelerator, callbacks)


def _train(
    run: RunConfig,
    method: AnyMethod,
    target: MetaTarget,
    accelerator: Accelerator,
    callbacks: Sequence[Callback],
) -> Path:
    """Train in a folder that is locked against other launches; see `train`."""
    folder = RunFolder(run.out)
    # One rank decides for all: a shared file system may show a folder to some machines later than
    # to others.
    resume_from = on_first(
        lambda: find_resume(folder, run, lambda stored: method.resolve(stored, target))
    )
    if resume_from is not None:
        check_resume(run, folder, resume_from, accelerator)
    division = divided(run, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = division.passes

    def check(identity: JsonObject) -> None:
        if resume_from is not None:
            folder.check_identity(resume_from, identity)

    # The same on every rank, so that all begin with equal weights from the global generator.
    set_seed(run.seed)
    inputs = load_inputs(run, accelerator, folder.path, check)
    batches = Batches(
        inputs.tables.train, run.data.max_length, division.rows, division.passes,
        accelerator.num_processes, run.seed,
    )  # fmt: skip
    steps_of_epochs = math.ceil(run.epochs * batches.packs / batches.rows_per_step)
    total_steps = run.max_steps or max(1, steps_of_epochs)
    trainer = DrafterTrainer(run, method, inputs, accelerator, batches, total_steps)
    if resume_from is not None:
        state = resume(folder, resume_from, trainer)
    else:
        state = TrainerState(
            rows_per_step=batches.rows_per_step, total_steps=total_steps,
            identity=inputs.identity, engine=engine_of(accelerator),
            ranks=accelerator.num_processes,
        )  # fmt: skip
    taps = trainer.drafter.taps
    texts = inputs.make_texts(taps) if inputs.make_texts is not None else None
    held_out = HeldOutEvaluation(
        inputs.target, inputs.tables, run.evaluation, accelerator, method, taps, texts
    )
    # Not earlier: a run that is refused above leaves the config of the folder as it was.
    if accelerator.is_main_process:
        with whole_file(folder.path / "config.yaml") as aside:
            aside.write_text(run.as_yaml())
        repair_metrics(folder.path / METRICS_FILE)
    start_tracker(accelerator, run)
    try:
        TrainingLoop(trainer, folder, state, held_out, callbacks).run()
    finally:
        end_training(accelerator)
    if trainer.stopping:
        # If another rank got the signal, this one ends as by SIGTERM.
        raise StopRequested(trainer.stop.status or 128 + signal.SIGTERM)
    trainer.source.finish()
    best = folder.path / "best"
    if accelerator.is_main_process:
        for callback in callbacks:
            callback.on_end(best)
    return best


def check_resume(run: RunConfig, folder: RunFolder, step: int, accelerator: Accelerator) -> None:
    """Raise `UserError` if this launch cannot read the checkpoint of `step`.

    The reason is another engine, or another number of ranks under DeepSpeed. Other engines only
    warn of another number of ranks.
    """
    before, ranks = on_first(lambda: folder.state_of(step)), accelerator.num_processes
    if before.engine != (now := engine_of(accelerator)):
        raise UserError(
            f"{run.out} was trained under {before.engine}, this launch is {now}; use the same "
            f"accelerate config, or start another output with init_from {folder.path}/last"
        )
    if before.engine.startswith("deepspeed") and before.ranks != ranks:
        raise UserError(
            f"{run.out} was trained by {before.ranks} ranks, and DeepSpeed's checkpoints cannot "
            f"be read by {ranks}; use as many, or start another output with "
            f"init_from {folder.path}/last"
        )
    if before.ranks != ranks and accelerator.is_main_process:
        log.warning(
            "continuing with %d ranks instead of %d: each step has the same rows, added up in "
            "another order, so that the run equals the uninterrupted one except for rounding",
            ranks, before.ranks,
        )  # fmt: skip


def resume(folder: RunFolder, step: int, trainer: DrafterTrainer) -> TrainerState:
    """Load the checkpoint of `step` into the trainer and return its state; all ranks call this."""
    state = folder.load(trainer.accelerator, step)
    if (rollouts := trainer.batches.rollouts) is not None:
        rollouts.load(folder.at(step))
    state.ranks = trainer.accelerator.num_processes
    if state.best_step >= 0 and not folder.at(state.best_step).is_dir():
        log.warning(
            "the best checkpoint so far, step %d, was deleted; the best of the rest of the run "
            "will be kept",
            state.best_step,
        )
        state.best_step, state.best_tau = -1, 0.0
    if trainer.accelerator.is_main_process:
        folder.rename_damaged(step)
        # The process may have died between the end of a checkpoint and its link.
        folder.link("last", step)
        if state.best_step >= 0:
            folder.link("best", state.best_step)
    trainer.gather()
    return state


def check_before_loading(run: RunConfig, method: AnyMethod) -> None:
    """Raise `UserError` for the errors that can be found before a model is loaded."""
    check_output_folder(run.out, "--out")
    resolve_device(run.target.device)
    if run.features.store is None:
        check_target_exists(run.target.path)
        for source in run.data.sources:
            source_files(source)
    else:
        manifest_of(run.features.store)
    if run.init_from is not None:
        name, before = method.drafter_class.method, read_own_file(Path(run.init_from)).method
        if before != name:
            raise UserError(
                f"init_from {run.init_from} is a drafter of method {before}; this run trains {name}"
            )
    check_tracker(run.tracker)


def check_with_target(run: RunConfig, method: AnyMethod, ranks: int) -> MetaTarget:
    """Fill in the options that the target determines, and return its specification.

    No weights are read. Raises `UserError` for settings that do not fit the target, such as packed
    rows that are longer than its positions, and for a run that `ranks` cannot share or this machine
    cannot hold.
    """
    target = target_of_run(run)
    if run.features.live and run.data.max_length > target.max_positions:
        raise UserError(
            f"data.max_length is {run.data.max_length}, but the target has "
            f"{target.max_positions} positions; lower it"
        )
    method.resolve(run, target)
    divided(run, ranks)
    check_affordable(run, method, ranks)
    return target


class TrainingLoop:
    """Steps of a run from its state to its end, with logs, evaluations and checkpoints.

    All ranks call every method, since each of these actions has collective operations; each
    decision is the same on all of them.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        folder: RunFolder,
        state: TrainerState,
        held_out: HeldOutEvaluation,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Log what will be trained, and begin to show the progress."""
        self.trainer, self.folder, self.state, self.held_out = trainer, folder, state, held_out
        self.config, self.accelerator = trainer.run, trainer.accelerator
        self.callbacks, self._ended = callbacks, False  # ended: by a callback
        self._evaluate_every = interval(self.config.evaluation.every, trainer.total_steps)
        self._announce()
        self.progress = ProgressReporter(
            total=trainer.total_steps, desc=f"training {trainer.drafter.method}", unit=" steps"
        )
        self.progress.skip(state.step)

    def run(self) -> None:
        """Train from `state.step` to the last step.

        Ends earlier if the run was asked to stop (after a checkpoint), or by a callback.
        """
        trainer, state, total = self.trainer, self.state, self.trainer.total_steps
        sums: Sums = {}
        # A run that was asked to stop left this step's evaluation to the resumed run.
        if self._evaluation_due() and (state.evaluated != state.step or state.best_step < 0):
            self._evaluate_and_save()
        finished = self._finished()
        trainer.timer.restart()
        while not finished:
            measured = self._log_possible(state.step + 1)
            more, norm, positions = trainer.step(state.step, measured)
            state.step += 1
            # Not exact, since ranks differ a little in padding; that would need another reduction.
            state.tokens += positions * self.accelerator.num_processes
            self.progress.update()
            if good := math.isfinite(norm):
                add_sums(sums, more)
                state.skipped_in_a_row = 0
            else:
                self._skip()
            evaluating = self._evaluation_due()
            saving = trainer.stopping or (good and state.step % self.config.checkpoints.every == 0)
            if sums and (evaluating or saving or state.step % self.config.log_every == 0):
                self._log_training(sums, norm)
                sums = {}
                # If a callback has ended the run, evaluate as after the last step.
                evaluating = evaluating or self._ended
            # A scheduler that stops a run gives it little time, so it saves without an evaluation.
            if evaluating and not trainer.stopping:
                self._evaluate_and_save()
                finished = self._finished()
            elif saving:
                trainer.gather()
                calibration = self.held_out.calibrate(trainer.drafter)
                self._save(trainer.artifact(calibration, state.step))
            # Both are left out of the reported speed.
            if evaluating or saving:
                trainer.timer.restart()
            finished = finished or trainer.stopping
        if trainer.stopping and self.accelerator.is_main_process:
            log.warning(
                "asked to stop: saved step %d of %d; the same command continues from there",
                state.step, total,
            )  # fmt: skip
        self.progress.close()
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder.path / CANDIDATE, ignore_errors=True)

    def _announce(self) -> None:
        """Log the drafter's size, the amount of data and the length of the run."""
        if not self.accelerator.is_main_process:
            return
        trainer, batches = self.trainer, self.trainer.batches
        size = sum(p.numel() for p in trainer.drafter.parameters())
        start = f", continuing from step {self.state.step}" if self.state.step else ""
        total, rows = trainer.total_steps, batches.rows_per_step
        log.info(
            "%s drafter of %.2fM parameters for %s; %s (%.0f%% full)",
            trainer.drafter.method, size / 1e6, trainer.target.name,
            plural(batches.packs, "packed row"), 100 * batches.fill,
        )  # fmt: skip
        log.info(
            "a step has %s, at most %s: %s on each of %s in %s; %s, %d of warm-up, %s%s",
            plural(rows, "row"), plural(rows * batches.max_length, "token"),
            plural(rows // self.accelerator.num_processes, "row"),
            plural(self.accelerator.num_processes, "rank"),
            plural(batches.accumulation, "pass"), plural(total, "step"),
            round(self.config.optim.warmup_share * total),
            plural(math.ceil(total / self._evaluate_every), "evaluation"), start,
        )  # fmt: skip

    def _log_possible(self, step: int) -> bool:
        """Return whether a log, and so the metrics of this step, may be due after `step` steps."""
        config = self.config
        intervals = (config.log_every, self._evaluate_every, config.checkpoints.every)
        return step == self.trainer.total_steps or any(step % every == 0 for every in intervals)

    def _evaluation_due(self) -> bool:
        """Return whether the drafter is evaluated after the steps so far.

        A drafter of `init_from` is evaluated before its first step too.
        """
        step = self.state.step
        if step == 0:
            return self.config.init_from is not None
        return step == self.trainer.total_steps or step % self._evaluate_every == 0

    def _finished(self) -> bool:
        """Return whether the run ends here."""
        done = self.state.step >= self.trainer.total_steps
        return done or self._ended or self.trainer.stopping

    def _log_training(self, sums: Sums, norm: float) -> None:
        """Log the metrics `sums` of the steps since the last log.

        `norm` is the gradient norm of the last step. Raises `UserError` for a loss that is not
        finite, before anything of that state is saved.
        """
        state, total = self.state, self.trainer.total_steps
        metrics = {
            **means(sums, self.accelerator),
            "grad_norm": norm,
            "lr": rate_at(self.config.optim, state.step - 1, total),
            **self.trainer.timer.report(),
            "skipped": state.skipped,
        }
        left_s = self.progress.left_s()
        self._log(metrics, step_line(state.step, total, metrics, left_s))
        if not math.isfinite(metrics["loss"]):
            raise UserError(
                f"the loss is not finite at step {state.step}; lower optim.lr, or use precision=no"
            )
        self._call(lambda callback: callback.on_step(state.step, metrics))

    def _skip(self) -> None:
        """Count a step that was skipped because its gradient was not finite.

        Raises `UserError` after more than `MAX_SKIPPED` in a row, or if a weight is not finite,
        from which no later step recovers.
        """
        trainer, state = self.trainer, self.state
        state.skipped += 1
        state.skipped_in_a_row += 1
        trainer.gather()
        # The whole weights are the same on every rank, and so is the decision.
        ruined = not all(bool(weight.isfinite().all()) for weight in trainer.drafter.parameters())
        if ruined or state.skipped_in_a_row > MAX_SKIPPED:
            raise UserError(
                f"the gradient is not finite at step {state.step}, {state.skipped_in_a_row} in a "
                "row; lower optim.lr or optim.clip_norm; the same command continues from the last "
                "checkpoint"
            )
        if self.accelerator.is_main_process:
            log.warning(
                "the gradient is not finite at step %d: skipped (%d so far)",
                state.step, state.skipped,
            )  # fmt: skip

    def _evaluate_and_save(self) -> None:
        """Measure the saved drafter, note if it is the best, write a checkpoint, and log.

        If the run is asked to stop meanwhile, the checkpoint is written without a measurement.
        """
        trainer, state, held_out = self.trainer, self.state, self.held_out
        trainer.gather()
        calibration = held_out.calibrate(trainer.drafter)
        artifact = trainer.artifact(calibration, state.step)
        metrics = held_out.estimate(artifact)
        candidate = self.folder.path / CANDIDATE
        if self.accelerator.is_main_process:
            artifact.save(candidate)
        # The other ranks load the folder too.
        self.accelerator.wait_for_everyone()
        try:
            metrics |= held_out.measure(candidate, lambda: trainer.stop.asked)
        except EvaluationAborted:
            # `state.evaluated` is an earlier step, so the resumed run begins with this evaluation.
            trainer.stopping = True
            self._save(artifact)
            return
        if "tau_measured" in metrics:
            warn_of_difference(metrics)
        tau = metrics.get("tau_measured", metrics["tau_estimated"])
        # Without a round, as when every reply is one token, tau is NaN. It counts as 0, since some
        # drafter has to be the best.
        tau = 0.0 if math.isnan(tau) else tau
        # Before `_save`, which writes `state` for a resume.
        state.evaluated = state.step
        if tau > state.best_tau or state.best_step < 0:
            state.best_tau, state.best_step = tau, state.step
        self._save(artifact)
        best = state.best_tau, state.best_step
        self._log(metrics, evaluation_line(state.step, trainer.total_steps, metrics, *best))
        self._call(lambda callback: callback.on_evaluate(state.step, metrics))

    def _save(self, artifact: Artifact) -> None:
        """Write the checkpoint of the state, link it, and delete old ones."""
        folder, state = self.folder, self.state
        rollouts = self.trainer.batches.rollouts
        folder.save(self.accelerator, state, self.config, artifact, rollouts)
        if self.accelerator.is_main_process:
            if state.best_step == state.step:
                # Before the previous best is deleted, so that the link always has a target.
                folder.link("best", state.step)
            folder.prune(self.config.checkpoints.keep, state.best_step)
        drafter, best = folder.at(state.step) / "drafter", state.best_step == state.step
        self._call(lambda callback: callback.on_checkpoint(state.step, drafter, best))

    def _call(self, event: Callable[[Callback], bool | None]) -> None:
        """Call the callbacks on the main process, and note on all ranks if one ends the training.

        All ranks call this; without callbacks nothing is sent.
        """
        if self.callbacks:
            ended = on_first(lambda: any([event(callback) is True for callback in self.callbacks]))
            self._ended = self._ended or ended

    def _log(self, metrics: dict[str, float], line: str) -> None:
        """Append metrics to `metrics.jsonl`, print a line of them, and send all to trackers."""
        step = self.state.step
        if self.accelerator.is_main_process:
            # JSON has no NaN: a metric without a count is null, which `read_metrics` reads as NaN.
            row: JsonObject = {"step": step}
            for name, value in metrics.items():
                row[name] = value if math.isfinite(value) else None
            with (self.folder.path / METRICS_FILE).open("a") as file:
                file.write(json.dumps(row) + "\n")
            self.progress.say(line)
        track(self.accelerator, metrics, step)
