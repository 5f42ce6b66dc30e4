"""Loss of block drafters: blocks at random roots of texts that the target wrote.

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
weight, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....distill.divergences import best_of, log_probs, sum_in_chunks
from ....distill.settings import LABELS_ONLY
from ....heads.dflash import DFlashDrafter
from ....inference.rounds.device import send
from ...data.batches import Batch
from ...data.features import Features
from ...losses.blocks import Anchors, contexts, run_blocks
from ...losses.vocabulary import VocabularyMap, compare_drafts, table
from ...objectives import Objective, Sums, depth_metrics
from .config import BlockLoss

SMOOTHING = 0.5
"""Share of 1 in D-PACE's chances (arXiv 2605.18810), the paper's value. Without it deep positions
learn nothing while the shallow ones are still wrong."""


def survival_weights(chances: Tensor, valid: Tensor) -> Tensor:
    """Return `w_i = sum_{j >= i} prod_{l <= j} c_l` `[R, D]`, without gradient.

    This is what a better draft at depth i earns at its root, in accepted drafts. `chances` `[R, D]`
    are the c, chances of acceptance; where `valid` `[R, D]` is false a depth counts as 1 in the
    products and earns nothing.

    With c = alpha, `sum_i w_i (-log alpha_i)` has the gradient of `-(expected accepted drafts)`:
    end-to-end TV (arXiv 2606.12370) times its number of depths. With c = (1 - s) q(x*) + s,
    s = `SMOOTHING`, and cross-entropy it is D-PACE.
    """
    chances = torch.where(valid, chances.detach(), 1.0)
    survived = chances.cumprod(-1) * valid
    # Sum over j >= i: a cumulative sum from the right.
    return survived.flip(-1).cumsum(-1).flip(-1) * valid


class BlockObjective(Objective):
    """Objective of random blocks, whose drafts are weighed within each block."""

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
        self.config, self.taps = config.resolved(drafter.shape.block_size), drafter.taps
        self._target_head, self._seed, self._drafts = target_head, seed, drafter.drafts
        # Dynamic weights follow from the forward pass, but denominators are summed over all ranks
        # before it. So the loss is divided by the number of drafts that there are to weigh.
        self._decay = torch.ones(self._drafts)
        if gamma := self.config.gamma:  # column d is draft d + 1, so the first has weight 1
            self._decay = torch.tensor([math.exp(-d / gamma) for d in range(self._drafts)])

    def anchors(self, batch: Batch) -> Anchors:
        return Anchors.drawn(batch, self.config.anchors, self._drafts, self._seed)

    def weights(self, batch: Batch) -> dict[str, float]:
        weights = self.anchors(batch).weights * self._decay  # `forward` draws the same anchors
        return {"drafts": float(weights.sum(dtype=torch.float64))}

    def forward(
        self,
        drafter: DFlashDrafter,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        batch, device, config = features.batch, features.last.device, self.config
        anchors = self.anchors(batch)
        context = contexts(drafter, batch, features.taps)
        outputs = run_blocks(drafter, batch, anchors.places, context, memory=config)
        blocks, teachers, *rest = anchors.drafts(batch.ids)
        blocks, text, weights = (send(tensor, device) for tensor in (blocks, *rest))
        last = features.last.flatten(0, 1)
        # In a batch without any draft there is nothing to divide, but the denominator may be 0.
        factors = weights * send(self._decay, device) / max(denominators["drafts"], 1e-9)
        loss, *tables = sum_in_chunks(
            partial(self._chunk, drafter, VocabularyMap(drafter), last, measured),
            # Draft d of anchor a follows the token x[a+d-1], and has the label x[a+d].
            drafter.state(outputs.flatten(0, 1)[blocks], text[:, :-1]),
            (teachers, text[:, 1:], factors),
            drafter.head_parameters,
            config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        losses, right, alpha, *more_tables = tables
        sums = depth_metrics(losses, right, alpha, weights)
        for name, values in zip(self.further_metrics, more_tables, strict=True):
            sums[name] = ((values * weights).sum(), weights.sum())
        return loss, sums

    def _chunk(
        self,
        drafter: DFlashDrafter,
        vocabulary: VocabularyMap,
        last: Tensor,
        measured: bool,
        state: Tensor,
        teachers: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the `table` of R blocks, with the tables of `further_loss`.

        `state` `[R, D, ..]` is as the drafter's head reads it, `last` `[positions, H]` are the
        target's states; `teachers`, `labels` and `factors` (0 for a draft without weight) are
        `[R, D]`. `teachers` are on the CPU, so that finding the distinct ones waits for nothing.
        """
        # Blocks at neighbouring anchors share most of their teachers (draft 2 of anchor 4 and draft
        # 1 of anchor 5 both have p[5]), so the target's head runs once for each distinct position.
        positions, position_of = (
            send(t, last.device) for t in teachers.unique(return_inverse=True)
        )
        config, log_p, best = self.config, None, None
        overlaps = measured or self.reads_overlaps or config.weighting == "survival"
        # As columns of the drafter's head, from here on; -1 for tokens that it does not have.
        labels = vocabulary.columns(labels)
        if overlaps or config.loss not in LABELS_ONLY:
            with torch.no_grad():
                target_log_p = log_probs(self._target_head(last[positions]))
                # of float32 tables, in which a CPU finds the best faster than in bfloat16 logits
                best = vocabulary.columns(best_of(target_log_p))[position_of]
                log_p = vocabulary.restrict(target_log_p)[position_of]
        logits = drafter.logits(state)
        drafts = compare_drafts(
            config.loss, logits, labels, best, log_p, overlaps=overlaps,
            needs_best=config.loss not in LABELS_ONLY,
        )  # fmt: skip
        chances = drafts.overlaps
        if config.weighting == "d-pace":
            with torch.no_grad():
                label_logits = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
                likely = (label_logits - drafts.log_sums).exp() * (labels >= 0)
                chances = (1 - SMOOTHING) * likely + SMOOTHING
        if config.weighting != "decay":
            assert chances is not None
            factors = factors * survival_weights(chances, factors > 0)
        more, tables = self.further_loss(drafter, state, drafts.overlaps)
        return table(drafts, factors, measured, *tables, learned=drafts.losses + more)

    def further_loss(
        self, drafter: DFlashDrafter, state: Tensor, alpha: Tensor | None
    ) -> tuple[Tensor | float, tuple[Tensor, ...]]:
        """Return what a method adds to the losses `[R, D]`, and its tables `[R, D]` for metrics.

        The overlaps `alpha` `[R, D]` are given in any case to a method that `reads_overlaps`.
        """
        return 0.0, ()
