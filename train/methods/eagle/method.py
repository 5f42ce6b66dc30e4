"""Training of EAGLE drafters; the loss is in `losses/unrolled.py`.

EAGLE-3 (arXiv 2503.01840) is unrolled over its own states; EAGLE-1 (arXiv 2401.15077) learns one
step towards the target's next feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....heads import eagle
from ....heads.artifact import Artifact
from ....heads.eagle import (
    CLASSES,
    Eagle3Drafter,
    EagleDrafter,
    EagleShape,
    default_taps,
    drafter_of,
)
from ....heads.errors import UserError
from ....heads.layers import check_taps, chosen_sizes
from ....inference.targets.target import TargetSource
from ...data.batches import Batches
from ...losses.initialization import (
    apply_init_from,
    check_gradients_pass,
    draft_vocabulary,
    kept_shape,
    random_states,
    shrink_logits,
)
from ...losses.unrolled import RecyclingMethod, UnrolledObjective
from ...method import FeaturesRead
from ...outline import FROZEN, TRAINED, MetaTarget, Outline
from .config import EagleConfig, EagleRun

NOISE = 0.1  # of EAGLE-1's features; the taps of EAGLE-3 differ in size too much for one noise


class EagleMethod(RecyclingMethod[EagleRun, EagleDrafter]):
    """Training of EAGLE-1 and EAGLE-3."""

    run_class = EagleRun
    drafter_class = EagleDrafter

    def features_of(self, run: EagleRun, target: TargetSource | MetaTarget) -> FeaturesRead:
        shape = shape_for(run.heads, target.config)
        # No loss is about most rows of a prompt, but later rows attend to them: EAGLE-1 needs the
        # last state everywhere.
        return shape.taps, eagle.CLASSES[shape.version].reads_last

    def resolve(self, run: EagleRun, target: MetaTarget) -> None:
        apply_init_from(run)
        run.objective = run.objective.resolved(run.heads.version)
        shape = shape_for(run.heads, target.config)
        run.heads = replace(
            run.heads,
            taps=list(shape.taps) or None,
            norm_taps=shape.norm_taps,
            norm_output=shape.norm_output,
            hidden_size=shape.hidden_size if run.heads.version == 3 else None,
            intermediate_size=shape.intermediate_size,
        )

    def outline(self, run: EagleRun, target: MetaTarget) -> Outline:
        shape = shape_for(run.heads, target.config)
        drafter = drafter_of(shape, target.embedding_and_head)
        loss = run.objective.resolved(shape.version)
        head = FROZEN if drafter.borrows_head or loss.freeze_head else TRAINED
        return self.unrolled_outline(drafter, loss, target, head)

    def make_drafter(
        self, run: EagleRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> EagleDrafter:
        shape = shape_for(run.heads, target.config)
        if before is not None:
            return drafter_of(kept_shape(run, before, shape), target.embedding_and_head)
        drafter = drafter_of(shape, target.embedding_and_head)
        ids = draft_vocabulary(shape.draft_vocab_size, target, batches)
        norm, tap_sizes = target.final_norm_weight(), target.tap_sizes(shape.taps)
        first_weights(drafter, target.head_weight, norm, ids, tap_sizes)
        loss = run.objective.resolved(shape.version)
        # `shrink_logits` scales the final norm down. A feature loss compares states in the
        # target's own scale, and needs the target's norm as it is.
        if isinstance(drafter, Eagle3Drafter) and not loss.feature_weight:
            states = drafter.norm(random_states(shape.hidden_size, run.seed))
            # Not `drafter.logits`: the drafter is still on the CPU, and a target that lends it the
            # head may be elsewhere.
            lent = target.head_weight if ids is None else target.head_weight[ids]
            rows = lent.to(states) if drafter.lm_head is None else drafter.lm_head.weight
            shrink_logits(drafter.norm, functional.linear(states, rows))
        return drafter

    def make_objective(
        self, run: EagleRun, target: TargetSource, drafter: EagleDrafter
    ) -> UnrolledObjective:
        config, shape = run.objective.resolved(drafter.shape.version), drafter.shape
        if config.feature_weight and shape.hidden_size != shape.target_hidden_size:
            raise UserError(
                "objective.feature_weight compares states of the target's width; leave out "
                "heads.hidden_size"
            )
        if drafter.borrows_head:
            check_gradients_pass(target)
        if shape.shared_head and len(target.head_parameters) > 1:
            raise UserError(
                "the target's output layer has a bias, and engines add none to the logits of an "
                "EAGLE-3; leave out heads.shared_head (objective.freeze_head keeps a copy of the "
                "matrix alone)"
            )
        random_head = shape.hidden_size != shape.target_hidden_size and not run.init_from
        if config.freeze_head and random_head:
            raise UserError(
                "objective.freeze_head keeps the target's head, and a drafter of another width "
                "begins with a random one; leave out heads.hidden_size or freeze_head"
            )
        if config.freeze_head and isinstance(drafter, Eagle3Drafter):
            freeze_head(drafter, norm=bool(config.feature_weight))
        noise = NOISE if shape.version == 1 else 0.0
        return UnrolledObjective(config, drafter, target.head, run.seed, noise)


@torch.no_grad()
def first_weights(
    drafter: EagleDrafter,
    head_weight: Tensor,
    norm_weight: Tensor | None,
    ids: Tensor | None,
    tap_sizes: tuple[float, ...] = (),
) -> None:
    """Set the first weights of an untrained drafter.

    `ids` `[Vd]` are the target ids of the draft vocabulary, None for all tokens. Head and norm
    begin as the target's output matrix `[V, Ht]` and final norm `[Ht]`. `tap_sizes` are the root
    mean squares of the taps: `fc` begins such that all taps weigh the same and the fused state has
    size one. The residual stream grows with depth (to 27 in the quickstart target), and would drown
    what the layer adds to it.
    """
    if ids is not None:
        drafter.set_maps(ids)
    if not isinstance(drafter, Eagle3Drafter):  # it has no head and no norm, and reads no taps
        return
    shape = drafter.shape
    if head_weight.shape[1] == shape.hidden_size:
        if drafter.lm_head is not None:
            # One row of the target's matrix for each token of the draft vocabulary.
            drafter.lm_head.weight.copy_(head_weight if ids is None else head_weight[ids])
        if norm_weight is not None:
            drafter.norm.weight.copy_(norm_weight)
    wide = shape.target_hidden_size
    for i, size in enumerate(tap_sizes):
        columns = drafter.fc.weight[:, i * wide : (i + 1) * wide]
        # The fused state sums F * Ht products. With inputs of this size each has variance 1 /
        # (F * Ht), and the sum has variance 1.
        input_size = 1.0 if shape.norm_taps else size
        torch.nn.init.normal_(columns, std=drafter.fc.weight.shape[1] ** -0.5 / input_size)


def freeze_head(drafter: Eagle3Drafter, norm: bool) -> None:
    """Exclude the head from training, and the final norm too if `norm`."""
    if drafter.lm_head is not None:
        drafter.lm_head.requires_grad_(False)
    drafter.norm.weight.requires_grad_(not norm)


def shape_for(config: EagleConfig, target: Any) -> EagleShape:
    """Return the sizes of the drafter that `config` describes, for a target's transformers config.

    Raises `UserError` for taps that the target does not have.
    """
    hidden, layers = target.hidden_size, target.num_hidden_layers
    taps = tuple(config.taps or ())
    if not taps and not CLASSES[config.version].reads_last:
        taps = default_taps(layers)
    # The last tap, L, is refused: transformers gives it after the final norm, engines before.
    check_taps(taps, 0, layers)
    if config.shared_head and config.hidden_size not in (None, hidden):
        raise UserError(
            f"heads.shared_head takes the target's head, whose rows have its width {hidden}; leave "
            "out heads.hidden_size or shared_head"
        )
    newer = config.version == 3  # it is 3.1 if nothing else is asked for
    return EagleShape(
        version=config.version,
        taps=taps,
        hidden_size=config.hidden_size or hidden,
        target_hidden_size=hidden,
        draft_vocab_size=min(config.draft_vocab_size or target.vocab_size, target.vocab_size),
        norm_taps=newer if config.norm_taps is None else config.norm_taps,
        norm_output=newer if config.norm_output is None else config.norm_output,
        qk_norm=config.qk_norm,
        shared_head=config.shared_head,
        **chosen_sizes(config, target),
    )


METHOD = EagleMethod()
