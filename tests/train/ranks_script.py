"""Run under `accelerate launch`: the gradients of one optimiser step, written by the main rank. Not
a test by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file

from draftsmith.command_line.parse import parse
from draftsmith.command_line.process import leave
from draftsmith.inference.targets.target import load_target
from draftsmith.train.config import divided
from draftsmith.train.data.batches import Batch, Batches
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.data.tables import build
from draftsmith.train.loading import Inputs
from draftsmith.train.methods.registry import method_named
from draftsmith.train.trainer import DrafterTrainer


def main() -> None:
    name, config, out, *blank = sys.argv[1:]
    method = method_named(name)
    run = parse(
        method.run_class,
        ["--config", config, "--rows-per-step", "4", "--optim.clip-norm", "1e9"],
        "x",
    )
    accelerator = Accelerator()
    division = divided(run, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = division.passes
    set_seed(run.seed)
    target = load_target(run.target)
    tables = build(run.data, target, run.seed)
    batches = Batches(
        tables.train,
        run.data.max_length,
        division.rows,
        division.passes,
        accelerator.num_processes,
        run.seed,
    )
    if blank:  # the micro-batch of this number, over all ranks, has no replies
        make = batches.micro_batch

        def blanked(step: int, accumulation: int, rank: int) -> Batch:
            batch = make(step, accumulation, rank)
            batch.mask &= accumulation * accelerator.num_processes + rank != int(blank[0])
            return batch

        batches.micro_batch = blanked
    inputs = Inputs(
        target, tables, {}, lambda objective, batches, asked: LiveTarget(target, objective.taps)
    )
    trainer = DrafterTrainer(run, method, inputs, accelerator, batches, 10)
    torch.manual_seed(0)
    # away from the zero start, and alike on every rank
    for parameter in trainer.drafter.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    kept: dict[str, torch.Tensor] = {}
    trainer.optimizer.step = lambda: kept.update(
        {n: p.grad.clone() for n, p in trainer.drafter.named_parameters()}
    )
    sums, _, _ = trainer.step(0)
    count = accelerator.reduce(sums["loss@1"][1].float().clone(), "sum")
    if accelerator.is_main_process:
        save_file({**kept, "tokens": count.reshape(1)}, Path(out))  # type: ignore[union-attr]
    accelerator.wait_for_everyone()
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main()
