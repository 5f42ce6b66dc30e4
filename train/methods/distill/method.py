"""Distillation of a draft model from the target's distributions (DistillSpec, arXiv 2310.08461).

It learns at every position of a reply. Index table (docs/objectives.md#index-tables): row t reads
the text up to x[t], its label is x[t+1], its teacher p[t], its weight R(t+1).

Example: prompt 0 .. 3, reply 4 .. 8. Rows 3 .. 7 learn the labels x[4] .. x[8] from p[3] .. p[7]:
the first reply token too, which the other methods leave to the prefill.

Shapes: B packed rows, S positions, R rows with weight, H hidden size, Ht the target's, V
vocabulary, Vd the draft model's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ....distill.divergences import best_of, log_probs, sum_in_chunks
from ....distill.draft_models import (
    DraftModelConfig,
    chosen_layers,
    default_layers,
    make_draft_model,
    size_and_cost,
    smaller,
)
from ....heads.artifact import Artifact
from ....heads.draft_model import DraftModel
from ....heads.errors import UserError
from ....heads.files import JsonObject
from ....heads.layout import place
from ....heads.pretrained import make_causal_lm
from ....inference.proposers.draft_model import DEFAULT_LENGTH
from ....inference.rounds.device import send
from ....inference.targets.causal_model import CausalModel, Hidden
from ....inference.targets.masks import Pass, in_documents
from ....inference.targets.spread import decoder_layers
from ....inference.targets.target import Target, TargetSource
from ...data.batches import Batch, Batches
from ...data.features import Features, check_packing
from ...data.rollouts import Rollouts, Writer, draft_model_texts
from ...losses.memory import recomputed
from ...method import FeaturesRead, Method
from ...objectives import Sums, compared, depth_metrics
from ...outline import TRAINED, ConfigOnly, Outline, config_at, matrix_numbers, work_of
from .config import DistillLoss, DistillRun

log = logging.getLogger(__name__)
_RUNNERS: WeakKeyDictionary[DraftModel, CausalModel] = WeakKeyDictionary()

STUDIED_TEXTS = 32  # training texts by which a cut is calibrated, at most


class DistillObjective:
    """Objective of a draft model: a divergence at every row that predicts a reply token."""

    taps: tuple[int, ...] = ()
    all_last = False

    def __init__(self, config: DistillLoss, draft_model: CausalModel, target: TargetSource) -> None:
        self.config, self._target_head, self._draft_model = config, target.head, draft_model
        if config.recompute and draft_model.mixers:
            raise UserError(
                "objective.recompute does not run the recurrent layers of this draft model; leave "
                "it out, and take shorter rows if memory does not suffice"
            )

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of a batch's rows with a label that counts, from masks alone."""
        return {"rows": float(batch.reply_run(1, 1).sum())}

    def forward(
        self,
        drafter: DraftModel,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`."""
        batch, device = features.batch, features.last.device
        draft_model = self._draft_model
        on_device = partial(send, device=device)
        ids = on_device(batch.ids)
        # Tokens that a draft model does not have are read as its last one, as in decoding.
        known_ids = ids.clamp(max=draft_model.vocab_size - 1)
        layers = []
        if self.config.recompute:
            layers = decoder_layers(draft_model.decoder, draft_model.num_layers)[1]
        within = nullcontext
        if draft_model.attends_in_documents:
            within = partial(in_documents, draft_model.decoder)
        with recomputed(layers, within):
            packed = Pass(
                positions=on_device(batch.positions),
                documents=batch.documents,
                written=batch.mask,
            )
            hidden = draft_model.forward(known_ids, packed).last.flatten(0, 1)
        # Found on the CPU, where their number is known without waiting.
        rows = batch.reply_run(1, 1).flatten().nonzero()[:, 0]
        device_rows = on_device(rows)
        # The denominator is 0 where no rank has a row with weight.
        factors = on_device(torch.ones(len(rows))) / max(denominators["rows"], 1e-9)
        last = features.last.flatten(0, 1)
        # A row with weight has its label in its own packed row, so the remainder never wraps.
        labels = ids.flatten()[(device_rows + 1) % ids.numel()]
        hidden = hidden[device_rows]
        loss, *tables = sum_in_chunks(
            partial(self._table, draft_model, last, measured),
            hidden,
            (device_rows, labels, factors),
            draft_model.head_parameters,
            self.config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        by_depth = (table[:, None] for table in (*tables, torch.ones_like(factors)))
        return loss, depth_metrics(*by_depth)

    def _table(
        self,
        draft_model: CausalModel,
        last: Tensor,
        measured: bool,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the loss of R rows, then tables `[R]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap. `last`
        `[positions, Ht]` are the target's states, `hidden` `[R, H]` the draft model's, of `rows`
        `[R]`; `labels` and `factors` are `[R]`.

        Tokens that the draft model does not have keep their share of the target's distribution, so
        the overlap counts them as missed.
        """
        with torch.no_grad():
            teacher = self._target_head(last[rows])
            best = best_of(teacher)
        # A draft model may have padding rows past the target's vocabulary, which are never drafted,
        # or fewer tokens than the target: `size` is the number of tokens that both have.
        logits = draft_model.head(hidden)[:, : teacher.shape[-1]]
        size = logits.shape[-1]
        log_p = log_probs(teacher)[:, :size]
        # A label that the draft model lacks has no column, and so no loss.
        labels = torch.where(labels < size, labels, -1)
        drafts = compared(self.config.loss, logits, labels, best, log_p, overlaps=measured)
        loss = (drafts.losses * factors).sum()
        if not measured:
            return (loss,)
        assert drafts.right is not None and drafts.overlaps is not None
        return loss, drafts.losses, drafts.right, drafts.overlaps


def _draft_model_config(config: DraftModelConfig, target: ConfigOnly) -> Any:
    """Return the transformers config of the draft model that `make_draft_model` would make."""
    if config.path is not None:
        return config_at(config.path)
    return smaller(cast(Any, target), chosen_layers(config, target.num_layers))


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

    def features_of(self, run: DistillRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        return (), False

    def resolve(self, run: DistillRun, target: ConfigOnly) -> None:
        options = run.draft_model
        cut = run.init_from is None and options.path is None
        if cut and options.layers is None:
            run.draft_model = replace(options, layers=default_layers(target.num_layers))

    def outline(self, run: DistillRun, target: ConfigOnly) -> Outline:
        config = _draft_model_config(run.draft_model, target)
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
        """Return the draft model that the run asks for, or the one in `before`, and log its cost.

        Raises `UserError` where it cannot be made, or cannot be trained and decoded with.
        """
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
        """Return what writes rollouts of the draft model."""
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
