"""Training of block drafters: blocks at random roots of texts that the target wrote.

The labels of a block are the tokens that follow its anchor in the text (DFlash, arXiv 2602.06036).
Index table (docs/objectives.md#index-tables): draft d of a block at anchor a, d = 1, 2, .., has the
label x[a+d], the teacher p[a+d-1] and the weight R(a .. a+d), whichever slot makes it.

Example: prompt 0 .. 3, reply 4 .. 8, three drafts a block. Roots are 4 .. 7, since nothing follows
8.

    anchor   labels           teachers         weights
    4        x5   x6   x7     p4   p5   p6     1  1  1
    5        x6   x7   x8     p5   p6   p7     1  1  1
    6        x7   x8   -      p6   p7   -      1  1  0
    7        x8   -    -      p7   -    -      1  0  0

Shapes: B packed rows, S positions, Sa anchors of a packed row, D drafts of a block, R blocks with
weight, H hidden size, V vocabulary, Vd draft vocabulary, n roots that are run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....distill.divergences import best_of, log_probs, sum_in_chunks
from ....distill.settings import LABELS_ONLY
from ....heads import dflash
from ....heads.artifact import Artifact
from ....heads.dflash import DFlashDrafter
from ....heads.files import JsonObject
from ....inference.rounds.device import send
from ....inference.targets.causal_model import Hidden
from ....inference.targets.target import TargetSource
from ...data.batches import Batch, Batches
from ...data.features import Features
from ...losses.blocks import Anchors, contexts, run_blocks
from ...losses.first_weights import (
    attend_nearby,
    block_weights,
    check_gradients_pass,
    rescale,
    shape_before,
    start_uncertain,
    take_heads_before,
)
from ...losses.ranks import batch_of_text, comparable_roots, rank_calibration, ranks_in
from ...losses.vocabulary import VocabularyMap, draft_vocabulary, mask_token_for, warn_of_mask_token
from ...method import FeaturesRead, Method
from ...objectives import Sums, compared, depth_metrics, survival_weights
from ...outline import FROZEN, TRAINED, ConfigOnly, Outline, work_of
from .config import BlockLoss, DFlashRun

SPREAD = 0.25
"""Standard deviation of an untrained drafter's logits. It is small because states that are made
from a mask token's embedding give the tokens of texts low probabilities."""
PLACES = 32  # roots whose blocks `forced_blocks` runs at one time


class BlockObjective:
    """Objective of random blocks, whose drafts are weighed within each block."""

    all_last = False
    reads_overlaps = False
    """True if `further_loss` needs the overlaps in every step, measured or not."""
    further_metrics: tuple[str, ...] = ()
    """Names of the metrics that the tables of `further_loss` give."""

    def __init__(
        self,
        config: BlockLoss,
        drafter: DFlashDrafter,
        target_head: Callable[[Tensor], Tensor],
        seed: int = 0,
    ) -> None:
        """`target_head` maps `[..., H]` after the final norm to logits `[..., V]`."""
        self.config, self.taps = config, drafter.taps
        self._target_head, self._seed = target_head, seed
        self._drafts, size = drafter.drafts, drafter.shape.block_size
        gamma = config.gamma or default_gamma(size)
        # Column d is draft d + 1, so the first draft has weight 1.
        self._decay = torch.tensor([math.exp(-d / gamma) for d in range(self._drafts)])
        # Dynamic weights follow from the forward pass, but denominators are summed over all ranks
        # before it. So the loss is divided by the number of drafts that there are to weigh.
        if config.weighting != "decay":
            self._decay = torch.ones(self._drafts)

    def anchors(self, batch: Batch) -> Anchors:
        return Anchors.drawn(batch, self.config.anchors, self._drafts, self._seed)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the sum of the weights of a batch's drafts, from masks alone."""
        weights = self.anchors(batch).weights * self._decay  # `forward` draws the same anchors
        return {"drafts": float(weights.sum(dtype=torch.float64))}

    def forward(
        self,
        drafter: DFlashDrafter,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of a batch and its metric sums, see `Objective.forward`."""
        batch, device, config = features.batch, features.last.device, self.config
        anchors = self.anchors(batch)
        context = contexts(drafter, batch, features.taps)
        outputs = run_blocks(drafter, batch, anchors.places, context, memory=config)
        # Weights only fall within a block, so a block whose first draft has none has none at all.
        # The index is made on the CPU, where its length is known without waiting.
        blocks = anchors.weights[..., 0].flatten().nonzero()[:, 0]
        device_blocks = send(blocks, device)
        # Draft d of anchor a: the token before it x[a+d-1], the label x[a+d], the teacher p[a+d-1].
        before = anchors.ahead(batch.ids, device, 0).flatten(0, 1)[device_blocks]
        labels = anchors.ahead(batch.ids, device, 1).flatten(0, 1)[device_blocks]
        # Teachers are indices into the states of all packed rows end to end: position t of row r
        # is number r * S + t.
        numbers = torch.arange(batch.ids.numel()).view(batch.ids.shape)
        teachers = anchors.ahead(numbers, torch.device("cpu"), 0).flatten(0, 1)[blocks]
        weights = send(anchors.weights.flatten(0, 1)[blocks], device)
        last = features.last.flatten(0, 1)
        # In a batch without any draft there is nothing to divide, but the denominator may be 0.
        factors = weights * send(self._decay, device) / max(denominators["drafts"], 1e-9)
        loss, *tables = sum_in_chunks(
            partial(self._table, drafter, last, VocabularyMap(drafter), measured),
            drafter.state(outputs.flatten(0, 1)[device_blocks], before),
            (teachers, labels, factors),
            drafter.head_parameters,
            config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        losses, right, alpha, *more_tables = tables
        sums = depth_metrics(losses, right, alpha, weights)
        for name, table in zip(self.further_metrics, more_tables, strict=True):
            sums[name] = ((table * weights).sum(), weights.sum())
        return loss, sums

    def _table(
        self,
        drafter: DFlashDrafter,
        last: Tensor,
        vocabulary: VocabularyMap,
        measured: bool,
        state: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the loss of R blocks, then tables `[R, D]` if it is `measured`.

        The tables are: losses, 1 where the best token is the target's, overlap, and those of
        `further_loss`. `state` `[R, D, ..]` is as the drafter's head reads it, `last`
        `[positions, H]` are the target's states; `teachers`, `labels` and `factors` (0 for a draft
        without weight) are `[R, D]`. `teachers` are on the CPU, so that finding the distinct ones
        waits for nothing.
        """
        # Blocks at neighbouring anchors share most of their teachers (draft 2 of anchor 4 and draft
        # 1 of anchor 5 both have p[5]), so the target's head runs once for each distinct position.
        positions, position_of = (
            send(t, last.device) for t in teachers.unique(return_inverse=True)
        )
        config, log_p, best, outside = self.config, None, None, None
        overlaps = measured or self.reads_overlaps or config.weighting == "survival"
        # As columns of the drafter's head, from here on; -1 for tokens that it does not have.
        labels = vocabulary.columns(labels)
        if overlaps or config.loss not in LABELS_ONLY:
            with torch.no_grad():
                target_log_p = log_probs(self._target_head(last[positions]))
                # of float32 tables, in which a CPU finds the best faster than in bfloat16 logits
                best = vocabulary.columns(best_of(target_log_p))[position_of]
                log_p = vocabulary.restrict(target_log_p)[position_of]
        if vocabulary.reduced and config.loss not in LABELS_ONLY:
            assert best is not None
            outside = best < 0
        drafts = compared(
            config.loss, drafter.logits(state), labels, best, log_p,
            outside=outside, overlaps=overlaps, d_pace=config.weighting == "d-pace",
        )  # fmt: skip
        losses, scale = drafts.losses, factors
        if config.weighting != "decay":
            assert drafts.chances is not None
            scale = factors * survival_weights(drafts.chances, factors > 0)
        more, tables = self.further_loss(drafter, state, drafts.overlaps)
        loss = ((losses + more) * scale).sum()
        if not measured:
            return (loss,)
        assert drafts.right is not None and drafts.overlaps is not None
        return loss, losses, drafts.right, drafts.overlaps, *tables

    def further_loss(
        self, drafter: DFlashDrafter, state: Tensor, alpha: Tensor | None
    ) -> tuple[Tensor | float, tuple[Tensor, ...]]:
        """Return what a method adds to the losses `[R, D]`, and its tables `[R, D]` for metrics.

        The overlaps `alpha` `[R, D]` are given in any case to a method that `reads_overlaps`.
        """
        return 0.0, ()


def forced_blocks(
    drafter: DFlashDrafter, hidden: Hidden, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run a block at every position of a text, in order, and yield n roots at a time.

    Yields the blocks' outputs `[n, D, H]`, the text's token before each draft `[n, D]` and the
    text's token in its place `[n, D]`, -1 past the end.

    Example: in a text of 5 tokens, root 3 with three drafts has x3 x4 x4 before them (past the end
    the last token is repeated, which nothing reads) and x4 -1 -1 in their places.
    """
    length, batch = len(ids), batch_of_text(ids)
    context = contexts(drafter, batch, tuple(tap[None] for tap in hidden.taps))
    depths = torch.arange(1, drafter.drafts + 1, device=ids.device)
    for start in range(0, length, PLACES):
        roots = torch.arange(start, min(start + PLACES, length))
        # Always as many blocks: kernels of other sizes would be compiled for each.
        padded = functional.pad(roots, (0, PLACES - len(roots)), value=length - 1)
        outputs = run_blocks(drafter, batch, padded[None], context)[0, : len(roots)]
        positions = roots.to(ids.device)[:, None] + depths
        labels = torch.where(positions < length, ids[positions.clamp(max=length - 1)], -1)
        before = ids[(positions - 1).clamp(max=length - 1)]
        yield outputs, before, labels


def start(drafter: DFlashDrafter, target: TargetSource, batches: Batches) -> None:
    """Give an untrained drafter what it can have of its target and of the texts.

    The order matters: `attend_nearby` is fitted to fused taps, so their scales come before it, and
    the size of the first logits follows from all of it.
    """
    shape = drafter.shape
    ids = draft_vocabulary(shape.draft_vocab_size or shape.vocab_size, target, batches)
    block_weights(drafter, target.final_norm_weight(), ids)
    # `keep=False`: nothing is trained yet, so what the drafter computes may change.
    rescale(drafter, target.tap_sizes(drafter.taps), keep=False)
    # One position is left over, because a server writes a token with every request.
    ids = batches.sample_ids(target.max_positions - 1)
    taps = tuple(tap.cpu() for tap in target.tap_sample(ids, drafter.taps))
    attend_nearby(drafter, taps, torch.tensor(ids))
    # Blocks read taps alone, so any tensor does in place of the last state. The first roots are
    # enough to judge the size of logits by.
    hidden = Hidden(taps[0], taps)
    outputs, _, _ = next(forced_blocks(drafter, hidden, torch.tensor(ids)))
    # The drafter is still on the CPU and in float32, the target's head may be elsewhere.
    states = drafter.norm(outputs).to(target.device, target.dtype)
    start_uncertain(drafter.norm, target.embedding_and_head.head(states).cpu(), SPREAD)


def ready(target: TargetSource, drafter: DFlashDrafter) -> None:
    """Make a drafter, new or from disk, fit to learn.

    Raises `UserError` in float16, where gradients cannot pass.
    """
    check_gradients_pass(target)
    # On disk the scales of the taps are multiplied into `fc`, so a loaded drafter has none. They
    # are taken out again, which changes nothing that it computes: with them in it, `fc` has small
    # weights for large inputs, and a step of the optimiser changes it too much.
    if bool((drafter.tap_scales == 1).all()):
        rescale(drafter, target.tap_sizes(drafter.taps), keep=True)


def default_gamma(block_size: int) -> float:
    """Return the length of weighting decay: half of a block's slots."""
    return float((block_size + 1) // 2)


class DFlashMethod(Method[DFlashRun, DFlashDrafter]):
    """Training of DFlash drafters, and what DSpark's shares with it."""

    run_class = DFlashRun
    drafter_class = DFlashDrafter
    objective_class = BlockObjective
    configs: Any = dflash
    """Module of the drafter's configuration, with `shape_for`."""

    def shape(self, run: DFlashRun, target: TargetSource | ConfigOnly) -> Any:
        """Return the drafter's shape, with any mask token where none is chosen yet."""
        return self.configs.shape_for(run.heads, target.config, run.heads.mask_token or 0)

    def features_of(self, run: DFlashRun, target: TargetSource | ConfigOnly) -> FeaturesRead:
        return self.shape(run, target).taps, False

    def resolve(self, run: DFlashRun, target: ConfigOnly) -> None:
        take_heads_before(run)
        shape = self.shape(run, target)
        run.heads = replace(
            run.heads, taps=list(shape.taps), intermediate_size=shape.intermediate_size
        )
        if run.objective.weighting == "decay" and run.objective.gamma is None:
            run.objective = replace(run.objective, gamma=default_gamma(shape.block_size))

    def outline(self, run: DFlashRun, target: ConfigOnly) -> Outline:
        """Return the run's `Outline`.

        Every position is context once: `fc`, then keys and values of each layer. The layers
        themselves run over the slots of all blocks, however few roots a packed row has, the head
        over the drafts of those at roots.
        """
        shape = self.shape(run, target)
        drafter = self.drafter_class(shape, target.embedding_and_head)
        passes = run.objective.anchors * shape.block_size / run.data.max_length
        head = shape.hidden_size * (shape.draft_vocab_size or shape.vocab_size)
        work = work_of(
            drafter.layers, drafter.fc, shape.hidden_size, run.objective.recompute, passes
        )
        keys_values = 2 * shape.num_kv_heads * shape.head_dim
        work["operations"] += TRAINED * keys_values * shape.hidden_size * shape.num_layers
        work["kept"] += (shape.hidden_size + keys_values) * shape.num_layers
        return Outline(
            drafter,
            logit_rows=run.objective.rows_per_chunk * drafter.drafts,
            head_operations=FROZEN * head * drafter.drafts,
            most_roots=run.objective.anchors / run.data.max_length,
            **work,
        )

    def make_drafter(
        self, run: DFlashRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> DFlashDrafter:
        """Return a drafter, see `Method.make_drafter`.

        A drafter that is trained on keeps its shape, which is logged. Raises `UserError` if no mask
        token is fit.
        """
        if before is not None:
            warn_of_mask_token(before.drafter.shape.mask_token, target, batches)
            shape = shape_before(run, target, before, self.configs)
            return self.drafter_class(shape, target.embedding_and_head)
        mask_token = mask_token_for(run.heads.mask_token, target, batches)
        shape = self.configs.shape_for(run.heads, target.config, mask_token)
        drafter = self.drafter_class(shape, target.embedding_and_head)
        start(drafter, target, batches)
        return drafter

    def make_objective(
        self, run: DFlashRun, target: TargetSource, drafter: DFlashDrafter
    ) -> BlockObjective:
        ready(target, drafter)
        return self.objective_class(run.objective, drafter, target.head, run.seed)

    @torch.no_grad()
    def teacher_forced(self, drafter: DFlashDrafter, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return ranks `[S, D]` by the training pass.

        Row n, column d - 1 is the place of the text's own token x[n+d] among the best of draft d
        from root n. It is -1 where the token is not among the best, or lies outside the text.
        """
        vocabulary = VocabularyMap(drafter)
        ranks = []
        for outputs, before, labels in forced_blocks(drafter, hidden, ids):
            logits = drafter.logits(drafter.state(outputs, before))
            ranks.append(ranks_in(logits, vocabulary.columns(labels)))
        return torch.cat(ranks)

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the rank accuracies of the drafter, and the tree of evaluation."""
        ranks = comparable_roots(outcomes)
        length = min(ranks.shape[1], tree_nodes)
        return rank_calibration(ranks, tree_nodes) | {"length": length}


METHOD = DFlashMethod()
