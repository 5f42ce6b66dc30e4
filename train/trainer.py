"""Trainer: drafter, objective, features and optimiser under the launcher's engine, and one step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from ..command_line.endings import StopSignals
from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..inference.decode import Request
from ..inference.targets.target import Target, TargetSource
from .config import RunConfig
from .data.batches import Batch, Batches, Document
from .data.features import FeatureSource
from .data.rollouts import Written
from .inputs import Inputs
from .method import AnyMethod
from .objectives import Objective, Sums, TrainingModule, add_sums
from .pace import Pace
from .parallel import check_optimizer, fuses_optimizer, gather, norm_of, prepare, twin_of
from .provenance import data_sets, provenance
from .schedule import make_optimizer, rate_at

log = logging.getLogger(__name__)


class Trainer:
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
        """Make the drafter, fill it from `run.init_from` if that is given, and wrap it.

        Raises `UserError` for settings that do not fit the target, the data or the drafter to start
        from.
        """
        check_optimizer(run.optim, accelerator)
        target = inputs.target
        self.run, self.target, self.accelerator = run, target, accelerator
        self.batches, self.total_steps = batches, total_steps
        before = drafter_before(run, target)
        self._trained: Any = method.make_drafter(run, target, batches, before)
        if before is not None:
            # Of the same shape: `make_drafter` takes that of `before`.
            self._trained.load_state_dict(before.drafter.state_dict())
        self.objective: Objective = method.make_objective(run, target, self._trained)
        self.stop = StopSignals()
        self.source: FeatureSource = inputs.make_source(
            self.objective, batches, lambda: self.stop.asked
        )
        # Before `prepare`: the copy has to be made while the weights are whole.
        self.drafter: Any = twin_of(self._trained, accelerator)
        """The drafter with whole weights, whatever the engine, as of the last `gather`."""
        module = TrainingModule(self._trained, self.objective, run.precision == "bf16")
        # Of drafter and objective, since an objective may have parameters too (the projection of
        # `DistillObjective`).
        optimizer = make_optimizer(run.optim, module, fuses_optimizer(accelerator))
        self.module, self.optimizer = prepare(
            accelerator, module, optimizer, batches.rows, run.optim.clip_norm
        )
        batches.written = self._written(method)
        self.provenance = {**provenance(), "data": batches.table.facts() | self._coverage()}
        if run.features.store is None and (names := data_sets(run.data.sources)):
            self.provenance["data"]["datasets"] = names
        self.pace = Pace(target.device, accelerator.num_processes)
        self.stopping = False
        """True on every rank once any of them was asked to end."""

    def _written(self, method: AnyMethod) -> Written | None:
        """Return the part of the data that is written during training, if there is one.

        Raises `UserError` if it needs a target that is not whole.
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

        def written(prompts: Sequence[Request], seed: int) -> list[Document]:
            self.gather()  # texts are written with the current weights
            return write(prompts, seed)

        return Written(
            config, written, self.batches, self.accelerator, self.total_steps, target.together
        )

    def _coverage(self) -> dict[str, float]:
        """Return the share of the target's tokens in the data that lie in the draft vocabulary.

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
        gradient norm, and the positions that this rank has seen, padding included. If the norm is
        not finite, nothing was changed: the step is left out here, and DeepSpeed, which steps on
        its own, leaves it out itself.
        """
        with self.pace.part("data"):
            if self.batches.written is not None:
                self.batches.written.before_step(index)
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
        with self.pace.part("optimiser"):
            norm = norm_of(
                self.accelerator.clip_grad_norm_(self.module.parameters(), self.run.optim.clip_norm)
            )
            # The norm is that of all ranks before clipping, so either all of them step or none.
            if math.isfinite(norm):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.pace.count(positions)
        return sums, norm, positions

    def _forward_backward(
        self, micro: list[Batch], denominators: dict[str, float], measured: bool
    ) -> Sums:
        """Run all micro-batches forward and backward; return their metric sums, `loss` included.

        `denominators` are the global weights of the loss's terms.
        """
        sums: Sums = {}
        # Engines average gradients over ranks and accelerate averages over micro-batches. Each
        # micro-batch's loss is already its share of the global one, so these have to be summed.
        # Two ranks with two micro-batches and the shares 1, 2, 3, 4 of the loss: the engines would
        # make 10 / 4 of them, and 4 times that is the sum.
        scale = self.accelerator.num_processes * len(micro)
        for batch in micro:
            with self.accelerator.accumulate(self.module):
                with self.pace.part("target"):
                    features = self.source.features(batch)
                with self.pace.part("drafter"):
                    loss, more = self.module(features, denominators, measured)
                    self.accelerator.backward(loss * scale)
            # The losses of a step's micro-batches add up to one loss, hence their counts to 1.
            # Detached, or the sums would keep every graph until the next log.
            add_sums(sums, more | {"loss": (loss.detach(), torch.tensor(1.0 / len(micro)))})
        return sums

    def _global_weights(self, micro: list[Batch]) -> dict[str, float]:
        """Return each term's weight over all micro-batches and ranks of a step.

        The reduction also carries whether this rank was asked to stop, so that all ranks learn of
        it after the same step.
        """
        # Every batch names the same terms of the loss, with 0 for one of which it has no rows.
        totals: dict[str, float] = {}
        for batch in micro:
            for name, weight in self.objective.weights(batch).items():
                totals[name] = totals.get(name, 0.0) + weight
        # In float64, so that a sum of many weights loses nothing: above 2^24 float32 skips numbers.
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


def drafter_before(run: RunConfig, target: TargetSource) -> Artifact | None:
    """Load the drafter `run.init_from` to start from; None if the run names none.

    Raises `UserError` if it is of another target and the run does not say `retarget`.
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
