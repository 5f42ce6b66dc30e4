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
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...distill.divergences import log_probs, sum_in_chunks
from ...distill.draft_models import (
    DraftModelConfig,
    chosen_layers,
    default_layers,
    make_draft_model,
    size_and_cost,
    smaller,
)
from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.layout import place
from ...heads.pretrained import make_causal_lm
from ...inference.proposers.draft_model import DEFAULT_LENGTH
from ...inference.replay import replay
from ...inference.rounds.device import best_of, send
from ...inference.targets.causal_model import CausalModel, Hidden
from ...inference.targets.masks import Pass, in_documents, with_replies
from ...inference.targets.spread import decoder_layers
from ...inference.targets.target import Target, TargetSource
from ..data.batches import Batch, Batches
from ..data.features import Features, check_packing
from ..data.rollouts import Rollouts, Writer, draft_model_texts
from ..memory import recomputed
from ..method import FeaturesRead, Method
from ..objectives import Sums, compared, depth_metrics
from ..outline import FORWARD, TRAINED, ConfigOnly, Outline, config_at, kept_by, matrix_numbers
from .runs import DistillLoss, DistillRun

log = logging.getLogger(__name__)
_RUNNERS: WeakKeyDictionary[DraftModel, CausalModel] = WeakKeyDictionary()

LONGEST_CHAIN = 12  # drafts per round, at most, of the chains that are compared
THRESHOLDS = (0.0, *(round(0.05 * i, 2) for i in range(1, 16)))
ROWS_AT_ONCE = 1024  # rows whose logits exist at one time while held-out texts are judged
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
    return smaller(config, cast(Any, target), chosen_layers(config, target.num_layers))


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
        # A tied head is the embedding, of which a position reads one row.
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
        ends = {id(p): p.numel() for module in modules for p in module.parameters()}
        layers = matrix_numbers(model) - sum(ends.values())
        decoder = nn.ModuleList(decoder_layers(model.get_decoder(), config.num_hidden_layers)[1])
        kept = kept_by(decoder, config.hidden_size, run.objective.recompute, config=config)
        return Outline(
            drafter,
            logit_rows=run.objective.rows_per_chunk * 3 // 2,
            operations=(TRAINED + FORWARD * run.objective.recompute) * layers,
            head_operations=TRAINED * head,
            **kept,
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


def accepted_runs(right: Tensor, length: int) -> list[int]:
    """Return for each row how many rows from it on are `right` without a break, up to `length`.

    `right` `[S]` is a bool for each root: its next token is the drafter's best one.
    """
    runs, run = [], 0
    for value in reversed(right.tolist()):
        run = run + 1 if value else 0
        runs.append(run)
    return [min(run, length) for run in reversed(runs)]


def adaptive_calibration(outcomes: Sequence[tuple[Tensor, int]]) -> JsonObject:
    """Return the calibration of a draft model: tau and cost of adaptive chains on held-out texts.

    Its key `adaptive` has rows of [threshold, longest, tau, drafts per round], of which each has
    more of the last two than the row before; `best_adaptive` picks one.

    `outcomes` has a pair for each text: the table `[S, 2]` of `DistillMethod.teacher_forced` and
    the start of the reply. Rounds are replayed as in decoding. Drafts past the first wrong one are
    taken to be as likely as those of the text.
    """
    replies = [outcome[start:] for outcome, start in outcomes]
    right = [accepted_runs(reply[:, 0] > 0, LONGEST_CHAIN) for reply in replies]
    measured = []
    for threshold in THRESHOLDS:
        drafts = [chain_lengths(reply[:, 1], threshold, LONGEST_CHAIN) for reply in replies]
        for longest in range(1, LONGEST_CHAIN + 1):
            measured.append([threshold, longest, *tau_and_drafts(right, drafts, longest)])
    # Only settings that no other one beats in both figures: by ascending drafts per round, those
    # with a higher tau than all before.
    front: list[list[float]] = []
    for row in sorted(measured, key=lambda row: (row[3], -row[2])):
        if not front or row[2] > front[-1][2]:
            front.append(row)
    return {"length": DEFAULT_LENGTH, "adaptive": front}


def tau_and_drafts(
    right: list[list[int]], drafts: list[list[int]], longest: int
) -> tuple[float, float]:
    """Return tau and drafts per round of chains of at most `longest` drafts, over all texts.

    At each root of each text, `right` is how many drafts would be accepted and `drafts` how many
    the chain has without the limit.
    """
    emitted = drafted = rounds = 0
    for right_by_root, drafts_by_root in zip(right, drafts, strict=True):
        lengths = [min(count, longest) for count in drafts_by_root]
        # A round accepts what is right, as far as its chain goes.
        accepted = [min(*pair) for pair in zip(right_by_root, lengths, strict=True)]
        root = 0
        for count in replay(accepted, 0, len(accepted)):
            drafted += lengths[root]
            root += count
            emitted += count
            rounds += 1
    return emitted / max(rounds, 1), drafted / max(rounds, 1)


def chain_lengths(sure: Tensor, threshold: float, longest: int) -> list[int]:
    """Return how many drafts an adaptive chain has at each root, at most `longest`.

    `sure` `[S]` is the probability of the draft at each root. A chain ends with the draft that
    brings the product of its drafts' probabilities below `threshold`, as `growth.grow_chain` does.
    """
    lengths = []
    # Drafts past the end of the text are as likely as its last one.
    chances = sure.tolist() + sure[-1:].tolist() * longest
    for root in range(len(sure)):
        products = accumulate(chances[root : root + longest], operator.mul)
        above = sum(1 for _ in takewhile(lambda product: product >= threshold, products))
        lengths.append(min(above + 1, longest))
    return lengths


METHOD = DistillMethod()
