"""The training loop, one for every method.

A step: count the weights of all its micro-batches over all ranks, then forward and backward each with those counts as
denominators, clip, step. So ranks and accumulations only share work, they do not change the objective.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor
from tqdm import tqdm

from ..heads.artifact import OWN_FILE, Artifact
from ..heads.errors import UserError
from ..inference.target import Target, check_there, load_target, resolve_device
from . import data as data_module
from .batches import Batch, Batches
from .checkpoint import RunFolder, TrainerState, find_resume
from .config import RunConfig
from .evaluation import HeldOut, evaluate
from .features import FeatureSource, LiveTarget
from .objectives import Objective, Sums, TrainingModule, acceptance_lengths, add_sums
from .provenance import provenance
from .schedule import make_optimizer, rate_at
from .written import Written

log = logging.getLogger(__name__)

CANDIDATE = ".candidate"
METRICS_FILE = "metrics.jsonl"


def train(run: Any, method: ModuleType, config_yaml: str) -> Path:
    """Train one drafter to its end and return the folder of the best one. `method` is a file of this folder (train/medusa.py)."""
    folder = RunFolder(run.output)
    resume_from = find_resume(folder, config_yaml, run.checkpoints.resume)
    check_before_loading(run)
    accelerator = Accelerator(
        mixed_precision=run.precision,
        log_with=None if run.tracker == "none" else run.tracker,
        project_dir=run.output,
        # The other ranks wait while one prepares the data; ten minutes, the default, may not be enough.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
    )
    set_seed(run.seed)
    target = load_target(_on_rank(run.target, accelerator))
    if run.data.max_length > target.max_positions:
        raise UserError(
            f"data.max_length is {run.data.max_length}, but the target has {target.max_positions} positions; lower it"
        )
    identity = {
        "target": target.fingerprint().weights_hash,
        "data": data_module.tables_key(run.data, target, run.seed),
    }
    if resume_from is not None:
        folder.check_identity(resume_from, identity)
    with accelerator.main_process_first():
        tables = data_module.prepare(run.data, target, folder.path / "data", run.seed)
    batches = Batches(
        tables.train, run.data.max_length, run.batch_rows, run.accumulation, accelerator.num_processes, run.seed
    )  # fmt: skip
    total_steps = steps_of(run, batches)
    trainer = Trainer(run, method, target, accelerator, batches, total_steps)
    state = TrainerState(rows_per_step=batches.rows_per_step, total_steps=total_steps, identity=identity)
    if resume_from is not None:
        state = folder.load(accelerator, resume_from)
        for part in batches.written:
            part.load(folder.at(resume_from))
        if state.best_step >= 0 and accelerator.is_main_process:
            folder.mark_best(state.best_step)  # the process may have died between the checkpoint and the link
        if state.rows_per_step != batches.rows_per_step:
            raise UserError(
                f"{run.output} was trained with {state.rows_per_step} rows a step, now there are {batches.rows_per_step}; use as "
                "many ranks as before, or change accumulation to match"
            )
    held_out = HeldOut(target, tables.held_out, run.evaluation, accelerator, method, trainer.drafter.taps)
    if accelerator.is_main_process:
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "config.yaml").write_text(config_yaml)
    if run.tracker != "none":
        accelerator.init_trackers(run.project, config={"config": config_yaml})
    _announce(run, trainer, batches, total_steps, state)
    try:
        run_loop(trainer, folder, state, held_out, config_yaml)
    finally:
        accelerator.end_training()
    return folder.path / "best"


def steps_of(run: RunConfig, batches: Batches) -> int:
    """Optimiser steps of the run: `max_steps`, or `epochs` passes over the packed rows."""
    return run.max_steps or max(1, math.ceil(run.epochs * batches.packs / batches.rows_per_step))


def _on_rank(target: Any, accelerator: Accelerator) -> Any:
    """The target's config with this rank's device, unless the user named one."""
    if target.device == "auto":
        target.device = str(accelerator.device)
    elif torch.device(target.device).type != accelerator.device.type:
        raise UserError(
            f"target.device is {target.device}, but accelerate trains on {accelerator.device}; leave target.device at auto"
        )
    return target


def check_before_loading(run: Any) -> None:
    """What can be found wrong before a model is loaded."""
    resolve_device(run.target.device)
    check_there(run.target.path)
    for source in run.data.sources:
        data_module.source_files(source)
    if run.init_from is not None and not Path(run.init_from, OWN_FILE).is_file():
        raise UserError(f"init_from {run.init_from} is not a drafter: it has no {OWN_FILE}")
    if run.tracker != "none" and find_spec(run.tracker) is None:
        raise UserError(f"tracker is {run.tracker}, but it is not installed; pip install {run.tracker}")


class Trainer:
    """Drafter, optimiser and feature source, prepared for the launcher's engine."""

    def __init__(
        self, run: Any, method: ModuleType, target: Target, accelerator: Accelerator, batches: Batches, total_steps: int
    ) -> None:
        self.run, self.target, self.accelerator = run, target, accelerator
        self.batches, self.total_steps = batches, total_steps
        before = drafter_before(run, target, method) if run.init_from is not None else None
        self.drafter: Any = method.make_drafter(run, target, batches, before)
        if before is not None:
            warm_start(self.drafter, before, run.init_from or "")
        self.objective: Objective = method.make_objective(run, target, self.drafter)
        self.source: FeatureSource = LiveTarget(target, self.objective.taps)
        module = TrainingModule(self.drafter, self.objective)
        self.optimizer: Any
        self.module, self.optimizer = accelerator.prepare(module, make_optimizer(run.optim, module))
        parts = [part for part in method.writers(run, target, self.drafter) if part[1].share]
        if sum(config.share for _, config, _ in parts) > 1:
            raise UserError("rollouts.share and errors.share add up to more than 1; lower one of them")
        batches.written = [Written(name, config, write, batches, accelerator, total_steps) for name, config, write in parts]
        self.provenance = provenance()

    def step(self, index: int) -> tuple[Sums, Any, int]:
        """One optimiser step (0-based): metric sums of this rank, global gradient norm, positions seen by this rank."""
        self.objective.begin(index / self.total_steps)
        self.batches.before_step(index)
        micro = [self.batches.micro_batch(index, a, self.accelerator.process_index) for a in range(self.run.accumulation)]
        denominators = self._global_weights(micro)
        sums: Sums = {}
        for number, batch in enumerate(micro):
            last = number == len(micro) - 1
            with self.accelerator.no_sync(self.module) if not last else nullcontext():
                loss, more = self.module(self.source.features(batch), denominators)
                # DDP averages gradients over ranks; the denominators are global, so the sum is what is wanted.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            add_sums(sums, more | {"loss": (loss.detach(), torch.tensor(1.0 / len(micro)))})
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.run.optim.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.run.optim, index, self.total_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums, norm, sum(batch.ids.numel() for batch in micro)

    def _global_weights(self, micro: list[Batch]) -> dict[str, float]:
        """Each term's weight over all micro-batches of the step and all ranks, known before the first forward."""
        local = [self.objective.weights(batch) for batch in micro]
        names = list(local[0])
        sums = torch.tensor([sum(weights[name] for weights in local) for name in names], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            sums = cast(Tensor, self.accelerator.reduce(sums.to(self.accelerator.device), "sum"))
        return dict(zip(names, sums.tolist(), strict=True))

    def artifact(self, calibration: dict[str, Any], step: int) -> Artifact:
        return Artifact(self.drafter, self.target.fingerprint(), calibration, {**self.provenance, "step": step})


def run_loop(trainer: Trainer, folder: RunFolder, state: TrainerState, held_out: HeldOut, config_yaml: str) -> None:
    """From `state.step` to the last step: step, log, evaluate, save, stop."""
    run, accelerator, total = trainer.run, trainer.accelerator, trainer.total_steps
    progress = tqdm(
        total=total, initial=state.step, desc=f"training {trainer.drafter.method}", unit=" steps",
        disable=None if accelerator.is_main_process else True,
    )  # fmt: skip
    sums: Sums = {}
    clock, since_log = time.monotonic(), 0
    stop = state.step >= total or out_of_patience(run, state)
    while not stop:
        more, norm, positions = trainer.step(state.step)
        add_sums(sums, more)
        since_log += positions * accelerator.num_processes
        state.step, state.tokens = state.step + 1, state.tokens + positions * accelerator.num_processes
        progress.update()
        last = state.step == total
        evaluating = last or state.step % run.evaluation.every == 0
        saving = state.step % run.checkpoints.every == 0
        if evaluating or saving or state.step % run.log_every == 0:
            now = time.monotonic()
            metrics = means(sums, accelerator)
            metrics |= {"grad_norm": float(norm), "lr": rate_at(run.optim, state.step - 1, total)}
            metrics["tokens_s"] = since_log / (now - clock)
            _log(state.step, total, metrics, accelerator, progress, folder.path)
            if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):  # before anything of it is saved
                raise UserError(f"the loss is not finite at step {state.step}; lower optim.lr, or use precision=no")
            sums, clock, since_log = {}, now, 0
        if evaluating:
            stop = evaluate_and_save(trainer, folder, state, held_out, config_yaml, progress) or last
            clock = time.monotonic()
        elif saving:
            save(trainer, folder, state, held_out.calibrate(trainer.drafter)[0], config_yaml)
            clock = time.monotonic()
    progress.close()
    if accelerator.is_main_process:
        shutil.rmtree(folder.path / CANDIDATE, ignore_errors=True)


def evaluate_and_save(
    trainer: Trainer, folder: RunFolder, state: TrainerState, held_out: HeldOut, config_yaml: str, progress: tqdm
) -> bool:
    """Measure the drafter as saved, keep it if it is the best so far; true if the run should stop early."""
    scratch = folder.path / CANDIDATE

    def save_candidate(artifact: Artifact) -> Path:
        if trainer.accelerator.is_main_process:
            artifact.save(scratch)
        trainer.accelerator.wait_for_everyone()
        return scratch

    estimate, measured, calibration = evaluate(
        held_out, trainer.drafter, lambda found: trainer.artifact(found, state.step), save_candidate
    )
    better = measured.tau > state.best_tau
    state.evaluations_without_gain = 0 if better else state.evaluations_without_gain + 1
    if better:
        state.best_tau, state.best_step = measured.tau, state.step
    save(trainer, folder, state, calibration, config_yaml)
    metrics = {
        "tau_training": estimate.tau_training, "tau_rows": estimate.tau_rows, "tau_walked": estimate.tau_walked,
        "tau_estimated": estimate.tau, "tau_measured": measured.tau,
        "tau_measured_low": measured.interval[0], "tau_measured_high": measured.interval[1],
        "loop_share": held_out.loop_share,
        **{f"surv@{d}": s for d, s in enumerate(estimate.survival, 1)},
        **{f"tau@{bucket}": value for bucket, value in measured.by_position.items()},
    }  # fmt: skip
    _log(state.step, trainer.total_steps, metrics, trainer.accelerator, progress, folder.path)
    return out_of_patience(trainer.run, state)


def out_of_patience(run: RunConfig, state: TrainerState) -> bool:
    """Whether measured tau has not risen for as many evaluations as the run allows."""
    return 0 < run.evaluation.patience <= state.evaluations_without_gain


def save(trainer: Trainer, folder: RunFolder, state: TrainerState, calibration: dict[str, Any], config_yaml: str) -> None:
    artifact = trainer.artifact(calibration, state.step)

    def save_parts(aside: Path) -> None:
        artifact.save(aside / "drafter")
        for part in trainer.batches.written:
            part.save(aside)

    folder.save(trainer.accelerator, state, save_parts, config_yaml, artifact.provenance)
    if trainer.accelerator.is_main_process:
        if state.best_step == state.step:
            folder.mark_best(state.step)  # before the former best is pruned
        folder.prune(trainer.run.checkpoints.keep, state.best_step)


def drafter_before(run: Any, target: Target, method: ModuleType) -> Artifact:
    """The drafter to start from, which must be of this method and, unless the run says `retarget`, of this very target."""
    differences: list[str] = []
    loaded = Artifact.load(run.init_from, target.fingerprint(), target.ends, differences.append)
    if loaded.method != (name := method.__name__.rpartition(".")[2]):
        raise UserError(f"init_from {run.init_from} is a drafter of method {loaded.method}; this run trains {name}")
    if differences and not run.retarget:
        raise UserError(f"{'; '.join(differences)}; give --retarget to train it for this target")
    for line in differences:
        log.warning("%s; training it for this target", line)
    return loaded


def warm_start(drafter: Any, before: Artifact, folder: str) -> None:
    """Fill `drafter` with the weights of another of the same shape."""
    try:
        drafter.load_state_dict(before.drafter.state_dict())
    except RuntimeError as error:
        reason = [line.strip() for line in str(error).splitlines()][1]
        raise UserError(f"init_from {folder} has another shape than this run's heads: {reason}") from error


def means(sums: Sums, accelerator: Accelerator) -> dict[str, float]:
    """Metrics over all ranks since the last log: sums reduced, then divided once."""
    names = ["loss", *(name for name in sums if name != "loss")]
    table = torch.stack([torch.stack([sums[n][0].double().cpu(), sums[n][1].double().cpu()]) for n in names])
    if accelerator.num_processes > 1:
        table = cast(Tensor, accelerator.reduce(table.to(accelerator.device), "sum")).cpu()
        table[0, 1] /= accelerator.num_processes  # each rank holds its share of one global loss
    found = {name: total / count if count else float("nan") for name, (total, count) in zip(names, table.tolist(), strict=True)}
    return found | acceptance_lengths(found)


def _log(step: int, total: int, metrics: dict[str, float], accelerator: Accelerator, progress: tqdm, folder: Path) -> None:
    if accelerator.is_main_process:
        with (folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        shown = {name: value for name, value in metrics.items() if "@" not in name or name.endswith("@1")}  # the file has all
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        progress.write(f"step {step}/{total}  {text}")
    if accelerator.trackers:
        accelerator.log(metrics, step=step)


def _announce(run: Any, trainer: Trainer, batches: Batches, total: int, state: TrainerState) -> None:
    if not trainer.accelerator.is_main_process:
        return
    size = sum(p.numel() for p in trainer.drafter.parameters())
    start = f", going on from step {state.step}" if state.step else ""
    log.info(
        "%s drafter of %.2fM parameters for %s; %d packed rows (%.0f%% full), %d rows a step, %d steps on %d ranks%s",
        trainer.drafter.method, size / 1e6, trainer.target.name, batches.packs, 100 * batches.fill, batches.rows_per_step,
        total, trainer.accelerator.num_processes, start,
    )  # fmt: skip
