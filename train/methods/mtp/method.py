"""Training of MTP layers: unrolled over their own states, as engines serve them.

The loss is that of EAGLE drafters (`losses/unrolled.py`). A layer that comes with its target, or
with the model that the target was tuned from, is trained further with `--init-from`.
"""

from __future__ import annotations

import torch
from torch import nn

from ....heads.artifact import Artifact
from ....heads.mtp import MtpDrafter, check_layer, shape_for
from ....inference.targets.target import TargetSource
from ...data.batches import Batches
from ...losses.initialization import (
    apply_init_from,
    check_gradients_pass,
    is_centred,
    kept_shape,
    random_states,
    shrink_logits,
)
from ...losses.unrolled import RecyclingMethod, UnrolledObjective
from ...method import FeaturesRead
from ...outline import FROZEN, MetaTarget, Outline
from .config import MtpLoss, MtpRun


class MtpMethod(RecyclingMethod[MtpRun, MtpDrafter]):
    """Training of MTP layers."""

    run_class = MtpRun
    drafter_class = MtpDrafter

    def features_of(self, run: MtpRun, target: TargetSource | MetaTarget) -> FeaturesRead:
        return (), True

    def resolve(self, run: MtpRun, target: MetaTarget) -> None:
        apply_init_from(run)
        run.objective = run.objective.resolved()

    def outline(self, run: MtpRun, target: MetaTarget) -> Outline:
        drafter = MtpDrafter(shape_for(target.config), target.embedding_and_head)
        loss = run.objective.resolved()
        freeze(drafter, loss)
        return self.unrolled_outline(drafter, loss, target, FROZEN)

    def make_drafter(
        self, run: MtpRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> MtpDrafter:
        shape = shape_for(target.config)
        if before is not None:
            return MtpDrafter(kept_shape(run, before, shape), target.embedding_and_head)
        drafter = MtpDrafter(shape, target.embedding_and_head)
        check_layer(drafter, target.config.model_type)
        first_weights(drafter, target, run.seed)
        return drafter

    def make_objective(
        self, run: MtpRun, target: TargetSource, drafter: MtpDrafter
    ) -> UnrolledObjective:
        config = run.objective.resolved()
        check_gradients_pass(target)
        freeze(drafter, config)
        return UnrolledObjective(config, drafter, target.head, run.seed)


@torch.no_grad()
def first_weights(drafter: MtpDrafter, target: TargetSource, seed: int) -> None:
    """Set the first weights of an untrained layer that differ from transformers' own.

    The norm begins with what the target's final norm multiplies by, made small enough that the
    logits of random states are (`shrink_logits`).
    """
    nn.init.normal_(drafter.fc.weight, std=drafter.fc.weight.shape[1] ** -0.5)
    hidden, scale = drafter.shape.hidden_size, target.final_norm_weight()
    scale = torch.ones(hidden) if scale is None else scale.cpu().float()
    drafter.norm.get_parameter("weight").copy_(scale - 1 if is_centred(drafter.norm) else scale)
    logits = target.head(drafter.norm(random_states(hidden, seed)).to(target.device))
    shrink_logits(drafter.norm, logits.cpu())


def freeze(drafter: MtpDrafter, config: MtpLoss) -> None:
    """Exclude from training what `config.trained` does not name."""
    if config.trained == "norms":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_("norm" in name)


METHOD = MtpMethod()
