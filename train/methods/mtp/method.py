"""Training of MTP layers: unrolled over their own states, as engines serve them.

The loss is that of EAGLE drafters (`train/losses/unrolled.py`). A layer that comes with its target,
or with the model that the target was tuned from, is trained on with `--init-from`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....heads import mtp
from ....heads.artifact import Artifact
from ....heads.mtp import MtpDrafter, check_layer, shape_for
from ....inference.targets.target import TargetSource
from ...data.batches import Batches
from ...losses.first_weights import (
    check_gradients_pass,
    set_scale,
    shape_before,
    start_uncertain,
    take_heads_before,
)
from ...losses.ranks import RecyclingMethod
from ...losses.unrolled import UnrolledObjective
from ...method import FeaturesRead
from ...outline import FROZEN, ConfigOnly, Outline, work_of
from ..eagle.method import STATES
from .config import MtpLoss, MtpRun


class MtpMethod(RecyclingMethod[MtpRun, MtpDrafter]):
    """Training of MTP layers."""

    run_class = MtpRun
    drafter_class = MtpDrafter

    def features_of(self, run: MtpRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        return (), True

    def resolve(self, run: MtpRun, target: ConfigOnly) -> None:
        take_heads_before(run)
        run.objective = run.objective.resolved()

    def outline(self, run: MtpRun, target: ConfigOnly) -> Outline:
        drafter = MtpDrafter(shape_for(run.heads, target.config), target.embedding_and_head)
        loss = run.objective.resolved()
        freeze(drafter, loss)
        steps = loss.steps or 1
        head = drafter.shape.hidden_size * drafter.shape.vocab_size
        return Outline(
            drafter,
            logit_rows=loss.rows_per_chunk * (steps + 1),
            head_operations=FROZEN * head * steps,
            **work_of(
                drafter.layers, drafter.fc, drafter.shape.hidden_size, loss.recompute,
                repeated=steps, config=target.config,
            ),
        )  # fmt: skip

    def make_drafter(
        self, run: MtpRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> MtpDrafter:
        if before is not None:
            shape = shape_before(run, target, before, mtp)
            return MtpDrafter(shape, target.embedding_and_head)
        drafter = MtpDrafter(shape_for(run.heads, target.config), target.embedding_and_head)
        check_layer(drafter, target.config.model_type)
        scale = target.final_norm_weight()
        first_weights(drafter, target, scale, torch.Generator().manual_seed(run.seed))
        return drafter

    def make_objective(
        self, run: MtpRun, target: TargetSource, drafter: MtpDrafter
    ) -> UnrolledObjective:
        config = run.objective.resolved()
        check_gradients_pass(target)
        freeze(drafter, config)
        return UnrolledObjective(config, drafter, target.head, run.seed)


@torch.no_grad()
def first_weights(
    drafter: MtpDrafter, target: TargetSource, scale: Tensor | None, generator: torch.Generator
) -> None:
    """Set the first weights of an untrained layer that differ from transformers' own.

    `scale` `[H]` is what the target's final norm multiplies by, None if that is not known. The norm
    begins with it, made small enough that the logits of random states are (`start_uncertain`).
    """
    nn.init.normal_(drafter.fc.weight, std=drafter.fc.weight.shape[1] ** -0.5)
    hidden = drafter.shape.hidden_size
    scale = torch.ones(hidden) if scale is None else scale.cpu().float()
    set_scale(drafter.norm, scale)
    states = torch.randn(STATES, hidden, generator=generator)
    logits = target.head(drafter.norm(states).to(target.device))
    start_uncertain(drafter.norm, logits.cpu())


def freeze(drafter: MtpDrafter, config: MtpLoss) -> None:
    """Exclude from training what `config.trained` does not name."""
    if config.trained == "norms":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_("norm" in name)


METHOD = MtpMethod()
