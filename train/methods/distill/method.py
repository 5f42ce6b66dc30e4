"""Distillation of a draft model (DistillSpec, arXiv 2310.08461): construction and training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ....distill.draft_models import (
    DraftModelConfig,
    chosen_layers,
    cut_config,
    default_layers,
    make_draft_model,
    size_and_cost,
)
from ....heads.artifact import Artifact
from ....heads.draft_model import DraftModel
from ....heads.errors import UserError
from ....heads.files import JsonObject
from ....heads.layout import place
from ....heads.pretrained import make_causal_lm
from ....inference.proposers.draft_model import DEFAULT_LENGTH
from ....inference.rounds.outcome import Hidden
from ....inference.targets.causal_model import CausalModel
from ....inference.targets.spread import decoder_layers
from ....inference.targets.target import Target, TargetSource
from ...data.batches import Batches
from ...data.features import check_packing
from ...data.rollouts import Rollouts, Writer, draft_model_texts
from ...method import Method
from ...outline import TRAINED, MetaTarget, Outline, config_at, matrix_numbers, work_of
from .config import DistillRun
from .loss import DistillObjective

log = logging.getLogger(__name__)
_RUNNERS: WeakKeyDictionary[DraftModel, CausalModel] = WeakKeyDictionary()

STUDIED_TEXTS = 32  # training texts by which a cut is calibrated, at most


def check_draft_model(draft_model: CausalModel, longest: int) -> None:
    """Raise `UserError` for a draft model that lacks what training and decoding rely on.

    These are positions for texts of `longest` tokens, a head that can be called on its own, packed
    documents that do not see each other, and trees.
    """
    if draft_model.max_positions < longest:
        raise UserError(
            f"the draft model has {draft_model.max_positions} positions, data.max_length is "
            f"{longest}; lower it"
        )
    try:
        draft_model.check_head()
        check_packing(draft_model, draft_model.name)
        draft_model.check_tree()
    except UserError as error:
        raise UserError(f"no draft model can be made of it: {error}") from error


def runner_of(drafter: DraftModel) -> CausalModel:
    """Return the draft model with the interface of a target: prefill, trees, head.

    It is one object for each drafter, since `check_packing` notes in it how packed rows are run.
    """
    if drafter not in _RUNNERS:
        model = CausalModel(drafter.model, drafter.tokenizer, "the draft model", frozen=False)
        _RUNNERS[drafter] = model
    return _RUNNERS[drafter]


class DistillMethod(Method[DistillRun, DraftModel]):
    """Distillation of a draft model."""

    run_class = DistillRun
    drafter_class = DraftModel

    def resolve(self, run: DistillRun, target: MetaTarget) -> None:
        options = run.draft_model
        cut = run.init_from is None and options.path is None
        if cut and options.layers is None:
            run.draft_model = replace(options, layers=default_layers(target.num_layers))

    def outline(self, run: DistillRun, target: MetaTarget) -> Outline:
        options = run.draft_model
        if options.path is not None:
            config = config_at(options.path)
        else:
            config = cut_config(cast(Any, target), chosen_layers(options, target.num_layers))
        model = make_causal_lm(config, dtype=torch.float32)
        drafter = DraftModel(model, None, target.vocab_size)
        head = matrix_numbers(model.get_output_embeddings())
        _, layers = decoder_layers(model.get_decoder(), config.num_hidden_layers)
        return Outline(
            drafter,
            logit_rows=run.objective.rows_per_chunk * 3 // 2,
            head_operations=TRAINED * head,
            **work_of(layers, None, config.hidden_size, run.objective.recompute, config=config),
        )

    def make_drafter(
        self, run: DistillRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> DraftModel:
        if before is not None:
            if run.draft_model != DraftModelConfig():
                raise UserError(
                    "init_from and draft_model exclude each other; leave out draft_model"
                )
            draft_model = before.drafter.requires_grad_(True)
            place(draft_model, target.device, torch.float32)
        else:
            whole = isinstance(target, Target) and not target.together
            if run.draft_model.path is None and not whole:
                raise UserError(
                    "a draft model is cut from a whole target; give draft_model.path, or leave out "
                    "target.spread, features.store and features.server"
                )
            draft_model = make_draft_model(
                run.draft_model, target, lambda: batches.sample(STUDIED_TEXTS)
            )
        for line in size_and_cost(draft_model.model, target.model, torch.float32):
            log.info(line)
        check_draft_model(runner_of(draft_model), run.data.max_length)
        return draft_model

    def make_objective(
        self, run: DistillRun, target: TargetSource, drafter: DraftModel
    ) -> DistillObjective:
        return DistillObjective(run.objective, runner_of(drafter), target)

    def writer(
        self, run: DistillRun, target: Target, drafter: DraftModel
    ) -> tuple[Rollouts, Writer] | None:
        if not run.rollouts.share:
            return None
        draft_model = runner_of(drafter)
        return run.rollouts, partial(draft_model_texts, run.rollouts, draft_model, target.eos_ids)

    def teacher_forced(self, drafter: DraftModel, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return an empty table `[S, 0]`: nothing is calibrated."""
        return ids.new_zeros(len(ids), 0)

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        return {"length": DEFAULT_LENGTH}


METHOD = DistillMethod()
