"""Bases of the proposers that own a key-value cache.

Shapes: B rows of a batch, A positions that are new to the cache, H hidden size, Vd draft
vocabulary.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ...heads.layers import LayeredDrafter
from ...heads.vocabulary import to_target
from ..base.tree_settings import MOST, TreeSettings
from ..kernels import operators
from ..kernels.operators import attention_fits
from ..rounds.cache import Counts, Pool, StaticTreeCache, TreeCache
from ..rounds.device import send
from ..rounds.sampling import Draws
from .contract import Prompts
from .tree_plan import DrafterT, Planned, TreePlan


class CachedProposer(Planned[DrafterT]):
    """Proposer of a drafter with a cache, which lasts for one batch."""

    def __init__(self, settings: TreeSettings, device: torch.device, layers: int = 1) -> None:
        """Start without a batch. Raises `UserError` for settings that do not go together.

        The drafter has `layers` with keys whose accepted paths are moved in its cache.
        """
        self.replan(TreePlan(settings))
        self._device = device
        self._layers = layers
        self._cache = TreeCache(0, 0)
        self._pool = Pool[StaticTreeCache]()

    def _open_cache(self, prompts: Prompts, beyond: int, most: int | None = None) -> None:
        """Begin a batch with an empty cache.

        A round writes at most `beyond` slots after the text's, which has `most` positions at most.
        """
        (batch, length), cache = prompts.ids.shape, prompts.cache
        if isinstance(cache, StaticTreeCache):
            # It cannot grow: it has the slots of a round beyond those of the target's.
            size = batch, cache.capacity + beyond
            static = self._pool.pop(size, None)
            static = static or StaticTreeCache(*size, self._device, self._layers)
            static.reset()
            self._cache, static.running = static, cache.running
            return
        # How long replies become is not known. This is a guess: a full cache doubles itself.
        guess = 2 * length + 64
        capacity = (guess if most is None else min(guess, most)) + beyond
        self._cache = TreeCache(batch, capacity, self._device)

    @property
    def own_cache(self) -> TreeCache | None:
        return self._cache

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)

    def finish(self) -> None:
        if isinstance(self._cache, StaticTreeCache):
            self._pool.put(self._cache, self._cache)
        self._cache = TreeCache(0, 0)


LayeredT = TypeVar("LayeredT", bound=LayeredDrafter)


class FeatureProposer(CachedProposer[LayeredT]):
    """Proposer of a drafter that reads the target's features, and may have a draft vocabulary.

    What a round accepts is noted in `commit`, with the target's features, and run when the drafter
    next drafts. So between rounds the cache holds the text alone.
    """

    def __init__(self, drafter: LayeredT, settings: TreeSettings, longest: int = MOST) -> None:
        """Put `drafter` to work; `longest` are the levels that it has at most."""
        weight, shape = drafter.fc.weight, drafter.shape
        super().__init__(settings, weight.device)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        # Few nodes may be run by draftsmith's own kernel of attention then.
        self._takes_kernel = attention_fits(*heads, weight.dtype, weight.device)
        self.name = self.kind = drafter.kind
        self.drafter, self.taps = drafter, drafter.taps
        if drafter.borrows_head:
            # The target's rows are taken now: a compiled function finds no module that changes.
            _ = drafter.borrowed_head
        self.longest = longest
        self._draft_vocab_ids = drafter.draft_vocab_ids
        # Positions that the target has decided and the cache lacks: fused features [B, A, H] and
        # what else the drafter needs of them, and how many of them each row has.
        self._new: tuple[tuple[Tensor, ...], Counts] | None = None

    def prepare_weights(self, reference: bool) -> None:
        self._takes_kernel = self._takes_kernel and not reference

    @property
    def _by_kernel(self) -> bool:
        # A drafter may have been moved, or been given another type, since its trial.
        weight = self.drafter.fc.weight
        return self._takes_kernel and operators.usable(weight.device, weight.dtype)

    def _columns(self, draws: Draws) -> Tensor | None:
        """Return the ids `[Vd]` of the draft vocabulary where drafts can be columns of it."""
        # A greedy choice needs no logits of tokens that are never drafted. Penalties, noise
        # and a plan of another class know tokens by their ids.
        greedy = draws.sampling.plain_greedy and isinstance(self.plan, TreePlan)
        return self._draft_vocab_ids if greedy else None

    def _named(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """Return `logits` `[..., Vd]` as they are with `ids`, else by the target's ids."""
        if ids is not None:
            return logits
        return to_target(logits, self._draft_vocab_ids, self.drafter.shape.vocab_size)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        if self._new is not None:
            index = send(rows, self._device)
            tensors, counts = self._new
            counts = counts.keep(rows, index)
            # The longest row may be among those that left.
            width = self._cache.width(counts, tensors[0].shape[1])
            self._new = tuple(tensor[index][:, :width] for tensor in tensors), counts

    def finish(self) -> None:
        super().finish()
        self._new = None
