"""Training step: drafter, objective, features and optimiser under the launcher's engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from ..command_line.process import StopSignals
from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..inference.decode import Request
from ..inference.targets.target import Target, TargetSource
from .config import RunConfig
from .data.batches import Batch, Batches, Document
from .data.features import FeatureSource
from .data.rollouts import RolloutRows
from .loading import Inputs
from .method import AnyMethod
from .objectives import Objective, Sums, TrainingModule, add_sums
from .optimizer import make_optimizer, rate_at
from .parallel import (
    check_optimizer,
    fuses_optimizer,
    gather,
    norm_as_number,
    prepare,
    whole_copy_of,
)
from .provenance import data_sets, provenance

log = logging.getLogger(__name__)

STEP_PARTS = ("data", "target", "drafter", "optimiser")
"""Parts of a step.

data: making batches and adding up their weights; target: the target's features; drafter: its
forward and backward passes; optimiser: clipping, and the change of the weights."""


class StepTimer:
    """Time of each part of this rank's steps since the last report."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._cuda, self._ranks = device.type == "cuda", ranks
        self.restart()

    def restart(self) -> None:
        """Begin to count again, as after an evaluation, which is not part of a step."""
        self._spans: list[tuple[str, Any, Any]] = []
        self._since, self._positions = time.perf_counter(), 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as `name`, one of `STEP_PARTS`."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        """Return the time, as an event on a CUDA device, for which nothing waits until `report`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, positions: int) -> None:
        """Add positions, padding included, that this rank has trained on."""
        self._positions += positions

    def report(self) -> dict[str, float]:
        """Return the speed since the last report, and begin to count again.

        `tokens_s` are positions per second over all ranks; `share_*` the share of each part in this
        rank's time.
        """
        # One wait for each report: after the last event all earlier ones have occurred too.
        if self._cuda and self._spans:
            self._spans[-1][2].synchronize()
        # Not 0, even if two reports follow each other within one tick of the clock.
        passed = max(time.perf_counter() - self._since, 1e-9)
        seconds: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
        for name, start, end in self._spans:
            # `elapsed_time` is in milliseconds.
            seconds[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        metrics = {"tokens_s": self._positions * self._ranks / passed}
        metrics |= {f"share_{name}": spent / passed for name, spent in seconds.items()}
        self.restart()
        return metrics


class DrafterTrainer:
    """Drafter, optimiser and feature source, prepared for the launcher's engine."""

    def __init__(
        self,
        run: RunConfig,
        method: AnyMethod,
        inputs: Inputs,
        accelerator: Accelerator,
        batches: Batches,
        total_steps: int,
    ) -> None:
        """Make the drafter, load the weights of `run.init_from` if that is given, and wrap it.

        Raises `UserError` for settings that do not fit the target, the data or that drafter.
        """
        check_optimizer(run.optim, accelerator)
        target = inputs.target
        self.run, self.target, self.accelerator = run, target, accelerator
        self.batches, self.total_steps = batches, total_steps
        before = initial_drafter(run, target)
        self._trained: Any = method.make_drafter(run, target, batches, before)
        if before is not None:
            # `make_drafter` gave the drafter the shape of `before`.
            self._trained.load_state_dict(before.drafter.state_dict())
        self.objective: Objective = method.make_objective(run, target, self._trained)
        self.stop = StopSignals()
        self.source: FeatureSource = inputs.make_source(
            self.objective, batches, lambda: self.stop.asked
        )
        # Before `prepare`: the copy has to be made while the weights are whole.
        self.drafter: Any = whole_copy_of(self._trained, accelerator)
        """The drafter with whole weights under every engine, as of the last `gather`."""
        module = TrainingModule(self._trained, self.objective, run.precision == "bf16")
        # An objective may have parameters too (the projection of `DistillObjective`).
        optimizer = make_optimizer(run.optim, module, fuses_optimizer(accelerator))
        self.module, self.optimizer = prepare(
            accelerator, module, optimizer, batches.rows, run.optim.clip_norm
        )
        batches.rollouts = self._rollouts(method)
        self.provenance = {**provenance(), "data": batches.table.facts() | self._coverage()}
        if run.features.store is None and (names := data_sets(run.data.sources)):
            self.provenance["data"]["datasets"] = names
        self.timer = StepTimer(target.device, accelerator.num_processes)
        self.stopping = False
        """True on every rank once any of them was asked to stop."""

    def _rollouts(self, method: AnyMethod) -> RolloutRows | None:
        """Return the part of the data that is written during training, or None.

        Raises `UserError` if it needs the whole target and only a part of it is loaded.
        """
        target = self.target
        # A target that is not whole is refused below, before the writer is called.
        found = method.writer(self.run, cast(Target, target), self.drafter)
        if found is None:
            return None
        if not isinstance(target, Target):
            raise UserError(
                "rollouts.share needs the whole target, to judge texts; leave out the features "
                "section"
            )
        config, write = found

        def write_now(prompts: Sequence[Request], seed: int) -> list[Document]:
            self.gather()  # texts are written with the current weights
            return write(prompts, seed)

        return RolloutRows(
            config, write_now, self.batches, self.accelerator, self.total_steps, target.together
        )

    def _coverage(self) -> dict[str, float]:
        """Return the share of the data's reply tokens that are in the draft vocabulary.

        The table is empty for a drafter that proposes all tokens.
        """
        if (vocab_ids := getattr(self.drafter, "draft_vocab_ids", None)) is None:
            return {}
        counts = self.batches.token_counts(len(self.drafter.t2d))
        return {"vocabulary_coverage": float(counts[vocab_ids.cpu()].sum() / counts.sum())}

    def gather(self) -> None:
        """Copy the trained weights into `drafter`; all ranks call this."""
        gather(self._trained, self.drafter)

    def step(self, index: int, measured: bool = True) -> tuple[Sums, float, int]:
        """Do one optimiser step (`index` from 0); all ranks call this.

        Returns the metric sums of this rank (without `measured` only that of the loss), the global
        gradient norm, and the number of positions on this rank, padding included. If the norm is
        not finite, the weights stay as they are: the step is skipped here, and DeepSpeed, which
        steps itself, skips it too.
        """
        with self.timer.part("data"):
            if self.batches.rollouts is not None:
                self.batches.rollouts.before_step(index)
            micro = [
                self.batches.micro_batch(index, a, self.accelerator.process_index)
                for a in range(self.batches.accumulation)
            ]
            denominators = self._global_weights(micro)
        # Before the forward pass, since DeepSpeed steps within its backward pass.
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.run.optim, index, self.total_steps)
        positions = sum(batch.ids.numel() for batch in micro)
        sums = self._forward_backward(micro, denominators, measured)
        with self.timer.part("optimiser"):
            norm = norm_as_number(
                self.accelerator.clip_grad_norm_(self.module.parameters(), self.run.optim.clip_norm)
            )
            # All ranks have the same norm, from before clipping, so either all step or none.
            if math.isfinite(norm):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.timer.count(positions)
        return sums, norm, positions

    def _forward_backward(
        self, micro: list[Batch], denominators: dict[str, float], measured: bool
    ) -> Sums:
        """Run all micro-batches forward and backward; return their metric sums, `loss` included.

        `denominators` are the global weights of the loss's terms.
        """
        sums: Sums = {}
        # Engines average gradients over ranks and accelerate averages over micro-batches. Each
        # micro-batch's loss is already its share of the global one, so they have to be summed. Two
        # ranks with two micro-batches and the losses 1, 2, 3, 4: the average is 10 / 4, and 4 times
        # that is the sum.
        scale = self.accelerator.num_processes * len(micro)
        for batch in micro:
            with self.accelerator.accumulate(self.module):
                with self.timer.part("target"):
                    features = self.source.features(batch)
                with self.timer.part("drafter"):
                    loss, more = self.module(features, denominators, measured)
                    self.accelerator.backward(loss * scale)
            # The losses of a step's micro-batches add up to one loss, so their counts add up to 1.
            # Detached, since the sums would keep every graph until the next log.
            add_sums(sums, more | {"loss": (loss.detach(), torch.tensor(1.0 / len(micro)))})
        return sums

    def _global_weights(self, micro: list[Batch]) -> dict[str, float]:
        """Return each term's weight over all micro-batches and ranks of a step.

        The reduction also carries whether this rank was asked to stop, so that all ranks stop after
        the same step.
        """
        # Every batch has the same terms of the loss, with 0 for a term without rows.
        totals: dict[str, float] = {}
        for batch in micro:
            for name, weight in self.objective.weights(batch).items():
                totals[name] = totals.get(name, 0.0) + weight
        # In float64, since float32 does not hold every count above 2^24.
        sums = torch.tensor([*totals.values(), float(self.stop.asked)], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            sums = cast(Tensor, self.accelerator.reduce(sums.to(self.accelerator.device), "sum"))
        *counts, ranks_asked = sums.tolist()
        self.stopping = ranks_asked > 0
        return dict(zip(totals, counts, strict=True))

    def artifact(self, calibration: JsonObject, step: int) -> Artifact:
        """Return the drafter as of the last `gather`, as an artifact to save."""
        return Artifact(
            self.drafter, self.target.fingerprint(), calibration, {**self.provenance, "step": step}
        )


def initial_drafter(run: RunConfig, target: TargetSource) -> Artifact | None:
    """Load the drafter `run.init_from`; None if the run starts from random weights.

    Raises `UserError` if it is of another target and `run.retarget` is false.
    """
    if run.init_from is None:
        return None
    differences: list[str] = []
    loaded = Artifact.load(
        run.init_from, target.fingerprint(), target.embedding_and_head, differences.append
    )
    if differences and not run.retarget:
        raise UserError(f"{'; '.join(differences)}; give --retarget to train it for this target")
    for line in differences:
        log.warning("%s; training it for this target", line)
    return loaded
