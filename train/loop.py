"""The training loop, one for every method.

A step: count the weights of all its micro-batches over all ranks, then forward and backward each
with those counts as denominators, clip, step (`trainer.Trainer`). So ranks and accumulations only
share work, they do not change the objective.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from ..heads.artifact import OWN_FILE, Artifact, not_a_drafter
from ..heads.errors import UserError
from ..heads.files import check_output_folder
from ..inference.console import Progress
from ..inference.conversations.sources import source_files
from ..inference.stored import manifest_of
from ..inference.target import resolve_device
from ..inference.target_files import check_there
from .checkpoint import RunFolder, TrainerState, find_resume
from .config import RunConfig
from .data.batches import Batches
from .endings import Stopped
from .estimate import check_affordable
from .evaluation import HeldOutEvaluation, evaluate
from .inputs import inputs_of
from .objectives import Sums, acceptance_lengths, add_sums
from .parallel import end_training, engine_of, load_models_whole, on_main
from .profiling import profiler
from .schedule import rate_at
from .trainer import Trainer

log = logging.getLogger(__name__)

CANDIDATE = ".candidate"
METRICS_FILE = "metrics.jsonl"
UNSEEN = ("share_target", "share_drafter", "share_optimiser", "skipped")


def train(run: Any, method: ModuleType, config_yaml: str) -> Path:
    """Train one drafter to its end and return the folder of the best one.

    `method` is a module of `train/methods/`. Raises `Stopped` after a last checkpoint if the run
    was asked to end.
    """
    folder = RunFolder(run.output)
    check_before_loading(run)
    check_affordable(run, method, int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=run.accumulation,
        log_with=None if run.tracker == "none" else run.tracker,
        project_dir=run.output,
        # The other ranks wait while one prepares the data; ten minutes, the default, may not be
        # enough.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
    )
    load_models_whole(accelerator)
    resume_from = on_main(
        accelerator, lambda: find_resume(folder, config_yaml, run.checkpoints.resume)
    )
    if resume_from is not None:
        before = on_main(accelerator, lambda: folder.state_of(resume_from))
        if before.engine != (now := engine_of(accelerator)):
            raise UserError(
                f"{run.output} was trained under {before.engine}, this launch is {now}; use the "
                "same accelerate config, or start "
                f"another output with init_from {folder.path}/last"
            )
        if before.engine.startswith("deepspeed") and before.ranks != accelerator.num_processes:
            raise UserError(
                f"{run.output} was trained by {before.ranks} ranks, and DeepSpeed's checkpoints "
                "cannot be read by "
                f"{accelerator.num_processes}; use as many, or start another output with "
                f"init_from {folder.path}/last"
            )
        accelerator.gradient_accumulation_steps = accumulation_for(
            before.rows_per_step, run, accelerator
        )
    set_seed(run.seed)
    inputs = inputs_of(
        run,
        accelerator,
        folder.path,
        lambda found: folder.check_identity(resume_from, found) if resume_from else None,
    )
    batches = Batches(
        inputs.tables.train, run.data.max_length, run.batch_rows,
        accelerator.gradient_accumulation_steps,
        accelerator.num_processes, run.seed,
    )  # fmt: skip
    total_steps = steps_of(run, batches)
    trainer = Trainer(run, method, inputs, accelerator, batches, total_steps)
    state = TrainerState(
        rows_per_step=batches.rows_per_step, total_steps=total_steps, identity=inputs.identity,
        engine=engine_of(accelerator),
        ranks=accelerator.num_processes,
    )  # fmt: skip
    if resume_from is not None:
        state = resume(folder, resume_from, trainer)
    taps = trainer.drafter.taps
    texts = inputs.make_texts(taps) if inputs.make_texts is not None else None
    held_out = HeldOutEvaluation(
        inputs.target, inputs.tables.held_out, run.evaluation, accelerator, method, taps, texts
    )
    if accelerator.is_main_process:
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "config.yaml").write_text(config_yaml)
    if run.tracker != "none":
        accelerator.init_trackers(run.project, config={"config": config_yaml})
    _announce(run, trainer, batches, total_steps, state)
    try:
        run_loop(trainer, folder, state, held_out, config_yaml)
    finally:
        end_training(accelerator)
    if trainer.stopping:
        raise Stopped(trainer.stop.status or 128 + signal.SIGTERM)
    trainer.source.finish()
    return folder.path / "best"


def resume(folder: RunFolder, step: int, trainer: Trainer) -> TrainerState:
    """Bring the trainer to where the checkpoint of `step` was."""
    state = folder.load(trainer.accelerator, step)
    for part in trainer.batches.rollouts:
        part.load(folder.at(step))
    state.ranks = trainer.accelerator.num_processes
    if trainer.accelerator.is_main_process:
        folder.set_aside(step)
    if state.best_step >= 0 and not folder.at(state.best_step).is_dir():
        log.warning(
            "the best checkpoint so far, step %d, is gone; the best of those to come will be kept",
            state.best_step,
        )
        state.best_step, state.best_tau = -1, 0.0
    if state.best_step >= 0 and trainer.accelerator.is_main_process:
        # the process may have died between the checkpoint and the link
        folder.mark_best(state.best_step)
    trainer.gather()
    return state


def steps_of(run: RunConfig, batches: Batches) -> int:
    """Optimiser steps of the run: `max_steps`, or `epochs` passes over the packed rows."""
    return run.max_steps or max(1, math.ceil(run.epochs * batches.packs / batches.rows_per_step))


def accumulation_for(rows: int, run: RunConfig, accelerator: Accelerator) -> int:
    """Forward passes of a rank in a step of `rows` rows, as in the checkpoint, on the ranks that
    there are now."""
    ranks, ours = accelerator.num_processes, run.batch_rows * accelerator.num_processes
    if rows % ours:
        raise UserError(
            f"{run.output} was trained with {rows} rows a step, which {ranks} ranks of "
            f"{run.batch_rows} rows cannot share "
            "evenly; use another number of ranks, or the same as before"
        )
    if rows != ours * run.accumulation and accelerator.is_main_process:
        log.warning(
            "going on with %d ranks and accumulation %d instead of %d: the same rows in each "
            "step, added up in another order, so "
            "equal to the uninterrupted run but for rounding",
            ranks, rows // ours, run.accumulation,
        )  # fmt: skip
    return rows // ours


def check_before_loading(run: Any) -> None:
    """What can be found wrong before a model is loaded."""
    check_output_folder(run.output, "--output")
    if run.features.store is None:
        resolve_device(run.target.device)
        check_there(run.target.path)
        for source in run.data.sources:
            source_files(source.path)
    else:
        manifest_of(run.features.store)
    if run.init_from is not None and not Path(run.init_from, OWN_FILE).is_file():
        raise not_a_drafter(Path(run.init_from))
    if run.tracker != "none" and find_spec(run.tracker) is None:
        raise UserError(
            f"tracker is {run.tracker}, but it is not installed; pip install {run.tracker}"
        )


def run_loop(
    trainer: Trainer,
    folder: RunFolder,
    state: TrainerState,
    held_out: HeldOutEvaluation,
    config_yaml: str,
) -> None:
    """From `state.step` to the last step: step, log, evaluate, save, stop."""
    run, accelerator, total = trainer.run, trainer.accelerator, trainer.total_steps
    progress = Progress(
        total=total, initial=state.step, desc=f"training {trainer.drafter.method}", unit=" steps"
    )
    sums: Sums = {}

    def due():
        return state.step == total or (state.step and state.step % run.evaluation.every == 0)

    if due() and state.evaluated != state.step:
        evaluate_and_save(trainer, folder, state, held_out, config_yaml, progress)
    stop = state.step >= total or out_of_patience(run, state)
    trainer.pace.restart()
    with profiler(run.profile, folder.path, accelerator.process_index) as profiled:
        while not stop:
            more, norm, positions = trainer.step(state.step)
            profiled()
            state.step, state.tokens = (
                state.step + 1,
                state.tokens + positions * accelerator.num_processes,
            )
            progress.update()
            if good := math.isfinite(norm):
                add_sums(sums, more)
                state.skipped_in_a_row = 0
            else:
                skip(trainer, folder, state)
            evaluating = due()
            saving = trainer.stopping or (good and state.step % run.checkpoints.every == 0)
            if sums and (evaluating or saving or state.step % run.log_every == 0):
                metrics = means(sums, accelerator)
                metrics |= {
                    "grad_norm": norm,
                    "lr": rate_at(run.optim, state.step - 1, total),
                    **trainer.pace.report(),
                }
                metrics["skipped"] = state.skipped
                _log(state.step, total, metrics, accelerator, progress, folder.path)
                if not math.isfinite(metrics["loss"]):  # before anything of it is saved
                    raise UserError(
                        f"the loss is not finite at step {state.step}; lower optim.lr, or use "
                        "precision=no"
                    )
                sums = {}
            if evaluating and not trainer.stopping:
                stop = (
                    evaluate_and_save(trainer, folder, state, held_out, config_yaml, progress)
                    or state.step == total
                )
            elif saving:
                trainer.gather()
                save(trainer, folder, state, held_out.calibrate(trainer.drafter)[0], config_yaml)
            if evaluating or saving:
                trainer.pace.restart()
            if trainer.stopping and not stop:
                stop = True
                log.warning(
                    "asked to stop: saved step %d of %d; the same command goes on from there",
                    state.step,
                    total,
                )
    progress.close()
    if accelerator.is_main_process:
        shutil.rmtree(folder.path / CANDIDATE, ignore_errors=True)


def skip(trainer: Trainer, folder: RunFolder, state: TrainerState) -> None:
    """Count a step whose gradient was not finite; give up when it is one too many, or when weights
    are ruined already."""
    state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
    trainer.gather()
    ruined = not all(bool(weight.isfinite().all()) for weight in trainer.drafter.parameters())
    if ruined or state.skipped_in_a_row > trainer.run.optim.max_skipped:
        path = trainer.keep_batch(state.step - 1, folder.path)
        raise UserError(
            f"the gradient is not finite at step {state.step}, {state.skipped_in_a_row} in a row; "
            "lower optim.lr or "
            f"optim.clip_norm, or look at what it saw: {path}; the same command goes on from the "
            "last checkpoint"
        )
    if trainer.accelerator.is_main_process:
        log.warning(
            "the gradient is not finite at step %d: skipped (%d so far)", state.step, state.skipped
        )


def evaluate_and_save(
    trainer: Trainer,
    folder: RunFolder,
    state: TrainerState,
    held_out: HeldOutEvaluation,
    config_yaml: str,
    progress: Progress,
) -> bool:
    """Measure the drafter as saved, keep it if it is the best so far; true if the run should stop
    early."""
    trainer.gather()
    scratch = folder.path / CANDIDATE

    def save_candidate(artifact: Artifact) -> Path:
        if trainer.accelerator.is_main_process:
            artifact.save(scratch)
        trainer.accelerator.wait_for_everyone()
        return scratch

    estimate, measured, calibration = evaluate(
        held_out, trainer.drafter, lambda found: trainer.artifact(found, state.step), save_candidate
    )
    tau = estimate.tau if measured is None else measured.tau
    better, state.evaluated = tau > state.best_tau, state.step
    state.evaluations_without_gain = 0 if better else state.evaluations_without_gain + 1
    if better:
        state.best_tau, state.best_step = tau, state.step
    save(trainer, folder, state, calibration, config_yaml)
    metrics = {
        "tau_training": estimate.tau_training, "tau_rows": estimate.tau_rows,
        "tau_drafted": estimate.tau_drafted,
        "tau_estimated": estimate.tau, "loop_share": held_out.loop_share,
        **{f"surv@{d}": s for d, s in enumerate(estimate.survival, 1)},
    }  # fmt: skip
    if measured is not None:
        low, high = measured.interval
        metrics |= {
            "tau_measured": measured.tau,
            "tau_measured_low": low,
            "tau_measured_high": high,
        }
        metrics |= {f"tau@{bucket}": value for bucket, value in measured.by_position.items()}
    _log(state.step, trainer.total_steps, metrics, trainer.accelerator, progress, folder.path)
    return out_of_patience(trainer.run, state)


def out_of_patience(run: RunConfig, state: TrainerState) -> bool:
    """Whether measured tau has not risen for as many evaluations as the run allows."""
    return 0 < run.evaluation.patience <= state.evaluations_without_gain


def save(
    trainer: Trainer,
    folder: RunFolder,
    state: TrainerState,
    calibration: dict[str, Any],
    config_yaml: str,
) -> None:
    artifact = trainer.artifact(calibration, state.step)

    def save_parts(aside: Path) -> None:
        artifact.save(aside / "drafter")
        for part in trainer.batches.rollouts:
            part.save(aside)

    folder.save(trainer.accelerator, state, save_parts, config_yaml, artifact.provenance)
    if trainer.accelerator.is_main_process:
        if state.best_step == state.step:
            folder.mark_best(state.step)  # before the former best is pruned
        folder.prune(trainer.run.checkpoints.keep, state.best_step)


def means(sums: Sums, accelerator: Accelerator) -> dict[str, float]:
    """Metrics over all ranks since the last log: sums reduced, then divided once."""
    names = ["loss", *(name for name in sums if name != "loss")]
    table = torch.stack(
        [torch.stack([sums[n][0].double().cpu(), sums[n][1].double().cpu()]) for n in names]
    )
    if accelerator.num_processes > 1:
        table = cast(Tensor, accelerator.reduce(table.to(accelerator.device), "sum")).cpu()
        table[0, 1] /= accelerator.num_processes  # each rank holds its share of one global loss
    found = {
        name: total / count if count else float("nan")
        for name, (total, count) in zip(names, table.tolist(), strict=True)
    }
    return found | acceptance_lengths(found)


def _log(
    step: int,
    total: int,
    metrics: dict[str, float],
    accelerator: Accelerator,
    progress: Progress,
    folder: Path,
) -> None:
    if accelerator.is_main_process:
        with (folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        # The file has all of them.
        shown = {
            n: v
            for n, v in metrics.items()
            if not n.startswith(UNSEEN) and ("@" not in n or n.endswith("@1"))
        }
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        progress.say(f"step {step}/{total}  {text}")
    if accelerator.trackers:
        accelerator.log(metrics, step=step)


def _announce(
    run: Any, trainer: Trainer, batches: Batches, total: int, state: TrainerState
) -> None:
    if not trainer.accelerator.is_main_process:
        return
    size = sum(p.numel() for p in trainer.drafter.parameters())
    start = f", going on from step {state.step}" if state.step else ""
    log.info(
        "%s drafter of %.2fM parameters for %s; %d packed rows (%.0f%% full), %d rows a step, %d "
        "steps on %d ranks%s",
        trainer.drafter.method, size / 1e6, trainer.target.name, batches.packs, 100 * batches.fill,
        batches.rows_per_step,
        total, trainer.accelerator.num_processes, start,
    )  # fmt: skip
