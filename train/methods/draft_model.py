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

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...distill.divergences import (
    NEEDS_LABELS,
    divergence,
    log_probs,
    loss_of_logits,
    overlap,
    sum_in_chunks,
)
from ...distill.draft_models import (
    DraftModelConfig,
    chosen_layers,
    default_layers,
    make_draft_model,
    plan_of,
    smaller,
)
from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.fingerprint import changed_numbers
from ...heads.layout import place
from ...heads.pretrained import make_causal_lm
from ...inference.rounds.device import best_of, send
from ...inference.settings import TargetConfig
from ...inference.targets.causal_model import CausalModel, Hidden
from ...inference.targets.masks import Pass, in_documents, with_replies
from ...inference.targets.spread import decoder_layers
from ...inference.targets.target import Target, TargetSource, load_target
from ..data.batches import Batch, Batches
from ..data.features import Features, check_packing
from ..data.rollouts import Rollouts, Writer, decoded_rounds, draft_model_texts
from ..memory import recomputed
from ..method import FeaturesRead, Method
from ..objectives import Sums, depth_metrics
from ..outline import FORWARD, TRAINED, ConfigOnly, Outline, config_at, matrix_numbers
from .adaptive import accepted_runs, adaptive_calibration
from .runs import DistillLoss, DistillRun

log = logging.getLogger(__name__)
_RUNNERS: WeakKeyDictionary[DraftModel, CausalModel] = WeakKeyDictionary()

ROWS_AT_ONCE = 1024  # rows whose logits exist at one time while held-out texts are judged
STUDIED_TEXTS = 32  # training texts by which layers and dimensions are judged


class DistillObjective(nn.Module):
    """Objective of a draft model: a divergence at every row that predicts a reply token."""

    taps: tuple[int, ...] = ()
    all_last = False

    def __init__(
        self,
        config: DistillLoss,
        draft_model: CausalModel,
        target: TargetSource,
        seed: int = 0,
        accepted_weight: float = 1.0,
    ) -> None:
        """`accepted_weight` is that of accepted drafts in texts decoded with the drafter."""
        super().__init__()
        self.config, self._target_head, self._seed = config, target.head, seed
        self._accepted_weight = accepted_weight
        # In a list, so that it never becomes a submodule: its parameters are the drafter's.
        self._draft_model = [draft_model]
        self.projection = None
        if config.recompute and draft_model.mixers:
            raise UserError(
                "objective.recompute does not run the recurrent layers of this draft model; leave "
                "it out, and take shorter rows if memory does not suffice"
            )
        if config.hidden_weight:
            # begins as the identity, cut or padded with zeros where the widths differ
            self.projection = nn.Linear(draft_model.hidden_size, target.hidden_size, bias=False)
            nn.init.eye_(self.projection.weight)
            self.projection.to(target.device)

    def begin(self, progress: float) -> None: ...

    def row_weights(self, batch: Batch) -> Tensor:
        """Return `[B, S]` on the CPU: the weights of the rows' losses, 0 where no label counts."""
        return batch.reply_run(1, 1) * batch.row_weights(self._accepted_weight)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the sum of a batch's row weights, from masks alone."""
        return {"rows": float(self.row_weights(batch).sum(dtype=torch.float64))}

    def forward(
        self,
        drafter: DraftModel,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`."""
        batch, device = features.batch, features.last.device
        draft_model = self._draft_model[0]
        on_device = partial(send, device=device)
        ids = on_device(batch.ids)
        # Tokens that a trimmed draft model does not have are read as its last one, as in decoding.
        known_ids = ids.clamp(max=draft_model.vocab_size - 1)
        layers = []
        if self.config.recompute:
            layers = decoder_layers(draft_model.decoder, draft_model.num_layers)[1]
        within = nullcontext
        if draft_model.attends_in_documents:
            within = partial(in_documents, draft_model.decoder)
        with recomputed(layers, self.config.offload, within):
            packed = Pass(
                positions=on_device(batch.positions),
                documents=batch.documents,
                written=batch.mask,
            )
            hidden = draft_model.forward(known_ids, packed).last.flatten(0, 1)
        weights = self.row_weights(batch).flatten()
        # Found on the CPU, where their number is known without waiting.
        rows = weights.nonzero()[:, 0]
        device_rows = on_device(rows)
        # The denominator is 0 where no rank has a row with weight, and may lie between 0 and 1,
        # since accepted drafts weigh `accepted_weight`.
        factors = on_device(weights[rows]) / max(denominators["rows"], 1e-9)
        last = features.last.flatten(0, 1)
        # A row with weight has its label in its own packed row, so the remainder never wraps.
        labels = ids.flatten()[(device_rows + 1) % ids.numel()]
        hidden = hidden[device_rows]
        temperatures = on_device(self._temperatures(batch).flatten()[rows])
        loss, *tables = sum_in_chunks(
            partial(self._table, draft_model, last, measured),
            hidden,
            (device_rows, labels, temperatures, factors),
            draft_model.head_parameters,
            self.config.rows_per_chunk,
        )
        if self.projection is not None:
            projected, target_states = self.projection(hidden), last[device_rows].to(hidden.dtype)
            distances = functional.smooth_l1_loss(projected, target_states, reduction="none")
            loss = loss + self.config.hidden_weight * (distances.mean(-1) * factors).sum()
        if not measured:
            return loss, {}
        by_depth = (table[:, None] for table in (*tables, torch.ones_like(factors)))
        return loss, depth_metrics(*by_depth)

    def _temperatures(self, batch: Batch) -> Tensor:
        """Return each row's temperature `[B, S]`, on the CPU: one for each document.

        It is a pure function of seed and place in the data, whatever the ranks.
        """
        choices = np.array(self.config.temperatures, np.float32)
        if len(choices) == 1:
            return torch.full(batch.ids.shape, float(choices[0]))
        # One for each document 0 .. max, and one for padding, which is document -1.
        count = int(batch.documents.max()) + 2
        drawn = []
        for number in batch.numbers:
            generator = np.random.default_rng([self._seed, number])
            drawn.append(generator.choice(choices, count))
        return torch.from_numpy(np.stack(drawn)).gather(1, batch.documents + 1)

    def _table(
        self,
        draft_model: CausalModel,
        last: Tensor,
        measured: bool,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the loss of R rows, then tables `[R]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap; the last two at
        temperature 1. `last` `[positions, Ht]` are the target's states, `hidden` `[R, H]` the draft
        model's, of `rows` `[R]`; `labels`, `temperatures` and `factors` are `[R]`.

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
        log_p, found = None, None
        if self.config.temperatures == [1.0]:
            log_p = log_probs(teacher)[:, :size]
            # A label that the draft model lacks is clamped to have a column; its loss is set to 0.
            clamped = labels.clamp(max=size - 1)
            found = loss_of_logits(self.config.loss, logits, log_p, clamped)
            losses = found.losses
            if self.config.loss in NEEDS_LABELS:
                losses = losses.masked_fill(labels >= size, 0.0)
        else:
            losses = self._losses_at(temperatures[:, None], logits, teacher, best)
        loss = (losses * factors).sum()
        if not measured:
            return (loss,)
        # Metrics are at temperature 1, whatever is taught.
        with torch.no_grad():
            right = ((best_of(logits) if found is None else found.best) == best).float()
            if log_p is None:
                log_p = log_probs(teacher)[:, :size]
            log_q = log_probs(logits) if found is None else logits - found.log_sums[:, None]
            alpha = overlap(log_q, log_p)
        return loss, losses, right, alpha

    def _losses_at(
        self, temperatures: Tensor, logits: Tensor, teacher: Tensor, best: Tensor
    ) -> Tensor:
        """Return the losses `[R]` of rows whose `temperatures` `[R, 1]` differ.

        `logits` `[R, Vd]` are the draft model's, `teacher` `[R, V]` the target's, `best` `[R]` the
        target's best tokens, which rows at temperature 0 learn.
        """
        size = logits.shape[-1]
        # Rows at temperature 0 are divided by 1 here; they get the cross-entropy below.
        divisors = torch.where(temperatures > 0, temperatures, 1.0)
        log_p, log_q = log_probs(teacher / divisors)[:, :size], log_probs(logits / divisors)
        known = best.clamp(max=size - 1)
        # The gradient of a divergence of logits / T carries 1 / T; times T all temperatures teach
        # alike.
        losses = divergence(self.config.loss, log_q, log_p, known) * divisors[:, 0]
        if 0.0 not in self.config.temperatures:
            return losses
        greedy_losses = divergence("ce", log_q, log_p, known).masked_fill(best >= size, 0.0)
        return torch.where(temperatures[:, 0] > 0, losses, greedy_losses)


def _draft_model_config(config: DraftModelConfig, target: ConfigOnly) -> Any:
    """Return the transformers config of the draft model that `make_draft_model` would make."""
    if (path := config.path or config.config) is not None:
        draft_model_config = config_at(path)
        if config.config is not None:
            draft_model_config.vocab_size = target.vocab_size
        return draft_model_config
    # Layers cannot be judged without weights, but any choice of them has the same size.
    layers = chosen_layers(config, target.num_layers, lambda: [0.0] * target.num_layers)
    return smaller(config, cast(Any, target), layers)


def whole_of(target: TargetSource, config: TargetConfig) -> Target:
    """Return `target` itself, or the whole target of which only embedding and head are loaded.

    `config` is the run's, which may tell of an adapter. Raises `UserError` where no draft model can
    be cut from it.
    """
    if target.together:
        raise UserError(
            "a draft model is cut from a whole target; give draft_model.path, or leave out "
            "target.spread"
        )
    if isinstance(target, Target):
        return target
    # Features come from a store or a server. The layers are read for the cut alone.
    if config.path != target.name:
        config = TargetConfig(target.name)
    dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
    config = replace(config, dtype=dtype, device=device, compile=False, spread="whole")
    try:
        whole = load_target(config)
    except UserError as error:
        raise UserError(
            "a draft model is cut from the whole target, not from features alone; give "
            f"draft_model.path ({error})"
        ) from error
    quantised = getattr(whole.model, "is_quantized", False)  # refused where the cut is made
    known, read = target.fingerprint(), whole.fingerprint()
    if changes := changed_numbers(known.numbers, read.numbers):
        raise UserError(
            f"a draft model is cut from the whole target, and the configuration of {target.name} "
            f"has changed since these features were made ({changes}); give draft_model.path"
        )
    if not quantised and read.other_weights(known):
        raise UserError(
            f"a draft model is cut from the whole target, and the weights of {target.name} are not "
            "those that these features come from; give draft_model.path"
        )
    return whole


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
    replays_chain = False

    def features_of(self, run: DistillRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        return (), False

    def resolve(self, run: DistillRun, target: ConfigOnly) -> None:
        options = run.draft_model
        cut = run.init_from is None and options.path is None and options.config is None
        if cut and options.layers is None:
            run.draft_model = replace(options, layers=default_layers(target.num_layers))

    def outline(self, run: DistillRun, target: ConfigOnly) -> Outline:
        config = _draft_model_config(run.draft_model, target)
        model = make_causal_lm(config, dtype=torch.float32)
        drafter = DraftModel(model, None, target.vocab_size)
        head = matrix_numbers(model.get_output_embeddings())
        # A tied head is the embedding, of which a position reads one row.
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
        ends = {id(p): p.numel() for module in modules for p in module.parameters()}
        layers = matrix_numbers(model) - sum(ends.values())
        return Outline(
            drafter,
            logit_rows=run.objective.rows_per_chunk,
            operations=(TRAINED + FORWARD * run.objective.recompute) * layers,
            head_operations=TRAINED * head,
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
            source = target
            if run.draft_model.path is None and run.draft_model.config is None:
                source = whole_of(target, run.target)
            draft_model = make_draft_model(
                run.draft_model, source, lambda: batches.sample(STUDIED_TEXTS)
            )
        for line in plan_of(draft_model.model, target.model).lines(torch.float32):
            log.info(line)
        check_draft_model(runner_of(draft_model), run.data.max_length)
        return draft_model

    def make_objective(
        self, run: DistillRun, target: TargetSource, drafter: DraftModel
    ) -> DistillObjective:
        weight = run.errors.accepted_weight
        return DistillObjective(run.objective, runner_of(drafter), target, run.seed, weight)

    def writers(
        self, run: DistillRun, target: Target, drafter: DraftModel
    ) -> list[tuple[str, Rollouts, Writer]]:
        """Return what writes rollouts of the draft model, and decodes texts with its drafts."""
        draft_model = runner_of(drafter)
        write = partial(draft_model_texts, run.rollouts, draft_model, target.eos_ids)
        return [
            ("rollouts", run.rollouts, write),
            ("errors", run.errors, partial(decoded_rounds, run.errors, target, drafter)),
        ]

    def outcome(self, drafter: DraftModel, hidden: Hidden, ids: Tensor, start: int) -> Tensor:
        return self.teacher_forced(drafter, hidden, ids, start)

    @torch.no_grad()
    def teacher_forced(
        self, drafter: DraftModel, hidden: Hidden, ids: Tensor, start: int = 0
    ) -> Tensor:
        """Return `[S, 2]`: correctness and probability of the draft model's best tokens.

        Row t has 1 if the best token after x[t] is the text's own x[t+1], else 0, and its
        probability. Rows past the model's last position are 0. `hidden` is not read.
        """
        draft_model = runner_of(drafter)
        seen = ids[: draft_model.max_positions].clamp(max=draft_model.vocab_size - 1)
        # the last row has no token after it: -1 equals no best token
        following = functional.pad(ids, (0, 1), value=-1)[1 : len(seen) + 1].split(ROWS_AT_ONCE)
        outcomes = []
        layout = with_replies([start], len(seen))
        states = draft_model.forward(seen[None], layout).last[0].split(ROWS_AT_ONCE)
        for rows, labels in zip(states, following, strict=True):
            probs = draft_model.head(rows).float()[:, : drafter.vocab_size].softmax(-1)
            chances, best = probs.max(-1)
            outcomes.append(torch.stack([(best == labels).float(), chances], dim=-1))
        return functional.pad(torch.cat(outcomes), (0, 0, 0, len(ids) - len(seen)))

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        return adaptive_calibration(outcomes)

    def accepted_by_root(self, outcome: Tensor, calibration: JsonObject) -> list[int]:
        return accepted_runs(outcome[:, 0] > 0, calibration["length"])


METHOD = DistillMethod()
