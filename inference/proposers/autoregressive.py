"""Tools of drafters that write one token after another: a causal model continues the nodes of a
level, over a cache of its own.

Shapes: B batch, N tree nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ..cache import TreeCache
from ..proposer import Accepted
from ..target import Target
from .growth import Level
from .tree_plan import Planner


@lru_cache(maxsize=256)
def depth_row(depths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `depths` as a tensor `[1, N]`; the same few rows are needed in every round."""
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
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        keys, values = cache.update(keys, values, layer)
        shared = queries.shape[1] // keys.shape[1]
        if shared > 1 and mask is not None and keys.device.type == "cuda":
            # Grouped heads with a mask would fall back to a kernel that holds every score.
            keys = keys.repeat_interleave(shared, 1)
            values = values.repeat_interleave(shared, 1)
            shared = 1
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=shared > 1
        )
        return attended.transpose(1, 2).flatten(2)

    return attend


class TreeRunner:
    """Causal model that continues the nodes of a level.

    Its cache has committed the root already, so nodes of depth 1 stand first behind the committed
    positions: depth d is d - 1 positions behind them.
    """

    def __init__(self, model: Target, cache: TreeCache, vocab_size: int) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._depths: tuple[int, ...] = ()

    def __call__(self, level: Level) -> Tensor:
        count = level.tokens.shape[1]
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
        self._cache.stage(count)
        return fit_vocabulary(self._model.head(hidden.last), self._vocab_size)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Return logits over the target's vocabulary of `size` tokens: padding rows of the drafter's
    head are cut, tokens that it lacks are never drafted."""
    if logits.shape[-1] < size:
        missing = logits.new_full((*logits.shape[:-1], size - logits.shape[-1]), -torch.inf)
        logits = torch.cat([logits, missing], dim=-1)
    return logits[..., :size]


def commit_accepted(cache: TreeCache, plan: Planner, slots: Tensor, accepted: Accepted) -> None:
    """Commit in a drafter's cache the accepted drafts that it has run; `slots` `[B, N]` as from
    `Planner.draft`.

    A chain has run all its drafts but the last. Of a tree the accepted leaf may or may not have
    been expanded, which only the device knows: it counts as not run, and the row is one token
    behind, which the next round feeds again.
    """
    drafts = [len(nodes) - 1 for nodes in accepted.nodes]
    if plan.width == 1:
        cache.commit([min(count, cache.staged) for count in drafts])
    else:
        cache.commit(
            [max(count - 1, 0) for count in drafts], slots.gather(1, accepted.path[:, 1:-1])
        )
