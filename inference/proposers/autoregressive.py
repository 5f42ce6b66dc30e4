"""Tools of autoregressive drafters: models that continue tree nodes, over caches of their own.

Shapes: B rows of a batch, N rows of one pass or tree nodes with the root, G attention heads, Gkv
key-value heads, E size of an attention head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ..cache import TreeCache
from ..proposer import Accepted
from ..targets.causal_model import CausalModel
from .growth import Level
from .tree_plan import Planner


@lru_cache(maxsize=256)
def depth_row(depths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `depths` as a tensor `[1, N]`, cached, as every round needs the same few."""
    return torch.tensor([depths], device=device)


def attention_over(
    cache: TreeCache, mask: Tensor | None
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Return the attention of a drafter's layers over its cache.

    The function takes a layer's index, queries `[B, N, G, E]`, keys and values `[B, N, Gkv, E]`;
    it writes keys and values into `cache`, which must be open for N positions, and returns
    `[B, N, G * E]`. `mask` `[1 | B, 1, N, slots]` is true where a query sees a slot; None: every
    query sees every slot.
    """

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # Caches and torch's attention want the axis of the heads before that of the positions.
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        keys, values = cache.update(keys, values, layer)
        # Attention head g reads key-value head g // shared.
        shared = queries.shape[1] // keys.shape[1]
        if shared > 1 and mask is not None and keys.device.type == "cuda":
            # On CUDA, grouped heads with a mask would fall back to a kernel that holds all scores.
            # Two key-value heads for four attention heads become 0, 0, 1, 1.
            keys = keys.repeat_interleave(shared, 1)
            values = values.repeat_interleave(shared, 1)
            shared = 1
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=shared > 1
        )
        return attended.transpose(1, 2).flatten(2)

    return attend


class TreeRunner:
    """Causal model that runs the nodes of one level after another: a `growth.Continue`.

    Its cache has committed the root already, so nodes of depth 1 stand first behind the committed
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
        hidden = self._model.forward_tree(
            level.tokens,
            level.visible,
            depth_row(level_depths, device),
            depth_row(self._depths, device),
            self._cache,
        )
        # The nodes stay undecided, so that the next level stands behind them and can see them.
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


def commit_accepted(cache: TreeCache, plan: Planner, slots: Tensor, accepted: Accepted) -> None:
    """Commit in a drafter's cache the accepted drafts that it has run.

    `slots` `[B, N]` are the indices of tree nodes among those run, as from `Planner.draft`.

    A chain has run all its drafts but the last. Of a tree the deepest accepted node may or may not
    have been run, which only the device knows: it counts as not run. The row's cache is then one
    token behind the text, and the next round feeds that token again.
    """
    drafts = [len(nodes) - 1 for nodes in accepted.nodes]
    if plan.width == 1:
        # `staged` is what the chain has run: all of it lies in order, so nothing is moved. Example:
        # a chain of 4 drafts has run 3, so of 4 accepted drafts 3 are committed, and of 2 both.
        cache.commit([min(count, cache.staged) for count in drafts])
    else:
        # Without the root, which was committed before drafting, and without the longest path's last
        # node: of the path 0, 2, 5 the slot of node 2 is committed. Shorter paths are cut by their
        # own counts. They are padded with the root, whose slot is -1, and nothing of that is kept.
        cache.commit(
            [max(count - 1, 0) for count in drafts], slots.gather(1, accepted.path[:, 1:-1])
        )
