"""Tools of autoregressive drafters: models that continue tree nodes, over caches of their own.

Shapes: B rows of a batch, N rows of one pass or tree nodes with the root, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..proposer import Accepted
from ..rounds.cache import Counts, TreeCache
from ..rounds.device import row_of
from ..targets.causal_model import CausalModel
from ..targets.masks import Pass
from .growth import Level
from .tree_plan import Planner


class TreeRunner:
    """Causal model that runs the nodes of one level after another: a `growth.Continue`.

    Its cache has committed the root already, so nodes of depth 1 come first after the committed
    positions. For the cache depth d is therefore d - 1.
    """

    def __init__(self, model: CausalModel, cache: TreeCache, vocab_size: int) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._depths: tuple[int, ...] = ()

    def __call__(self, level: Level) -> Tensor:
        """Return the logits `[B, M, V]` after the M nodes of `level`."""
        count = level.tokens.shape[1]
        # The cache wants the depths of all undecided slots, in the order in which they were run: a
        # mask with a sliding window needs the positions of earlier levels too.
        level_depths = (level.depth - 1,) * count
        self._depths += level_depths
        device = level.tokens.device
        nodes = Pass(
            depths=row_of(level_depths, device),
            visible=level.visible,
            slot_depths=row_of(self._depths, device),
        )
        hidden = self._model.forward(level.tokens, nodes, self._cache)
        # The nodes stay undecided, so that the next level comes after them and can see them.
        self._cache.stage(count)
        return fit_vocabulary(self._model.head(hidden.last), self._vocab_size)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Return logits `[..., size]` over the target's vocabulary, which has `size` tokens.

    Padding rows of the drafter's head are cut. Tokens that it lacks get minus infinity, so that
    they are never drafted.
    """
    if logits.shape[-1] < size:
        missing = logits.new_full((*logits.shape[:-1], size - logits.shape[-1]), -torch.inf)
        logits = torch.cat([logits, missing], dim=-1)
    return logits[..., :size]


def commit_accepted(cache: TreeCache, plan: Planner, slots: Tensor, accepted: Accepted) -> Counts:
    """Commit in a drafter's cache the accepted drafts that it has run.

    Returns how many tokens each row has to run next: the new root, and what the cache then lacks.

    `slots` `[B, N]` are the indices of tree nodes among those run, as from `Planner.draft`.

    A chain has run all its drafts but the last. Of a tree the deepest accepted node may or may not
    have been run, which only the device knows: it counts as not run. The row's cache then lacks
    one token of the text, which the next round runs too.
    """
    drafts = Counts([len(nodes) - 1 for nodes in accepted.nodes], accepted.counts - 1)
    if plan.width == 1:
        # `staged` is what the chain has run: all of it lies in order, so nothing is moved. Example:
        # a chain of 4 drafts has run 3, so of 4 accepted drafts 3 are committed, and of 2 both.
        ran, places = cache.staged, None
        run = Counts([min(count, ran) for count in drafts.here], drafts.there.clamp(max=ran))
    else:
        # Without the root, which was committed before drafting, and without the longest path's last
        # node: of the path 0, 2, 5 the slot of node 2 is committed. Shorter paths are cut by their
        # own counts. They are padded with the root, whose slot is -1, and nothing of that is kept.
        places = slots.gather(1, accepted.path[:, 1:-1])
        run = Counts([max(count - 1, 0) for count in drafts.here], (drafts.there - 1).clamp(min=0))
    cache.commit(run, places)
    next_here = [1 + count - kept for count, kept in zip(drafts.here, run.here, strict=True)]
    return Counts(next_here, drafts.there - run.there + 1)
