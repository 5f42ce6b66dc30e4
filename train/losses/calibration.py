"""Calibration by ranks: places of a text's own tokens among the best drafts of the training pass.

Shapes: S positions of a text, D drafts of a round, K best tokens of a draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...heads.files import JsonObject
from ...inference.proposers.eagle import DEFAULT_LENGTH, DEFAULT_WIDTH
from ...inference.replay import RANKS, rank_of
from ..data.batches import Batch, collate
from ..method import DrafterT, Method, RunT


class RankedMethod(Method[RunT, DrafterT]):
    """Base of methods whose `teacher_forced` returns ranks, `[S, D]`."""

    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return how often the rank-r draft is right at each depth, and the tree of evaluation.

        `rank_accuracy` is `[D][RANKS]`, of the roots of all replies with a token at every depth.
        """
        depths = outcomes[0][0].shape[1]
        # The last roots of a text lack tokens at the deeper depths; without them the depths are
        # comparable.
        replies = [ranks[start : max(len(ranks) - depths, start)] for ranks, start in outcomes]
        ranks, accuracy = torch.cat(replies), []
        for depth in range(depths):
            hits = [int((ranks[:, depth] == rank).sum()) for rank in range(RANKS)]
            accuracy.append([count / max(len(ranks), 1) for count in hits])
        known = {"rank_accuracy": accuracy, "roots": len(ranks), "tree_nodes": tree_nodes}
        return known | self.tree_of_evaluation(depths, tree_nodes)

    def tree_of_evaluation(self, depths: int, tree_nodes: int) -> JsonObject:
        """Return the settings of the tree, of at most `tree_nodes`, that the calibration stores."""
        return {"length": min(DEFAULT_LENGTH, tree_nodes), "width": DEFAULT_WIDTH}


def batch_of_text(ids: Tensor) -> Batch:
    """Return a text `[S]` as a batch of one document, on the CPU, all of which is reply."""
    return collate([[(ids.cpu().numpy(), np.ones(len(ids), np.bool_))]])


def ranks_in(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the rank `[...]` of the tokens `columns` `[...]` by `logits` `[..., V]`, 0 the best.

    It is -1 for a token that is not among the best `RANKS`.
    """
    return rank_of(columns, logits.topk(min(RANKS, logits.shape[-1])).indices)


def ranks_by_root(
    ids: Tensor, depths: int, columns: Tensor, logits_of: Callable[[int, int], Tensor]
) -> Tensor:
    """Return the ranks `[S, D]` of a text's own tokens among drafts made at the row before a root.

    Row n, column d is about x[n+1+d], the draft of depth d + 1 from root n; it is -1 where the
    token is not among the best, cannot be drafted, or lies outside the text. `columns` `[S]` are
    those of the text `ids` `[S]`; `logits_of(d, rows)` gives the logits `[rows, V]` of the drafts
    that the first rows make at depth d + 1.
    """
    ranks = torch.full((len(ids), depths), -1, dtype=torch.long, device=ids.device)
    for d in range(min(depths, len(ids) - 2)):
        # Rows t = 0 .. S - 3 - d have a label x[t+2+d], and the root of row t is t + 1. With 5
        # tokens and d = 1: rows 0 and 1, labels x[3] and x[4], roots 1 and 2.
        rows = len(ids) - 2 - d
        ranks[1 : 1 + rows, d] = ranks_in(logits_of(d, rows), columns[2 + d :])
    return ranks
