"""Proposer of block drafters: all drafts of a round in one pass, as a chain or a best-first tree.

A block is at the root: slot 0 holds the root's token, and the others mask tokens, in place of
which the drafter predicts. The best-first tree is DDTree's (arXiv 2604.12989), of the likeliest
paths through the slots' distributions.

The drafter's cache holds keys and values of the target's fused features for the positions before
the root, and nothing else: a block's own rows are overwritten in the next round, and what was
accepted comes again with the target's features.

Shapes: B rows of a batch, A positions that are new to the cache, D drafts, b slots of a block, H
hidden size, V vocabulary, S positions of a text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.dflash import DFlashDrafter
from ...heads.errors import UserError
from ..base.tree_settings import TREE_SETTINGS, TreeSettings, positive
from ..rounds.attention import attention_of_nodes
from ..rounds.cache import Counts
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, named
from ..targets.causal_model import PREFILL_CHUNK
from .cached import FeatureProposer
from .contract import Accepted, Prompts
from .growth import Continue, Slots
from .kind import Kind
from .tree_plan import DEFAULT_TREE, tree_of


class DFlashProposer(FeatureProposer[DFlashDrafter]):
    """Proposer of a DFlash drafter.

    Drafts of a block do not depend on each other. So a tree has the `nodes` likeliest paths, with
    `width` candidates for each slot (`growth.best_first`), and deeper trees cost nothing.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        slots: int | None = None,
    ) -> None:
        """Put a drafter to work. Raises `UserError` for more drafts or slots than a block has.

        `slots` are the slots of a block that are run; None: all. Slots see each other, so that
        fewer of them give other drafts, as in engines that are asked for fewer drafts than a block
        has.
        """
        self.slots, self.first_slot = slots_of(drafter, slots), drafter.first_slot
        longest = self.slots - self.first_slot
        super().__init__(drafter, settings.or_else(length=longest, width=1), longest)
        if self.plan.length > self.longest:
            raise UserError(
                f"a block of this drafter has {self.longest} drafts, not {self.plan.length}; give "
                "a smaller length"
            )

    def prefill(self, prompts: Prompts) -> None:
        self._open_cache(prompts, self.drafter.shape.block_size)
        features = self.drafter.fuse(prompts.hidden.taps)
        counts = [len(tokens) - 1 for tokens in prompts.tokens]
        self._new = (features,), Counts(counts, prompts.lengths)
        if prompts.cache.static:
            # All at once, so that every round catches up with as many positions: here none.
            self._catch_up()
            none = features.new_zeros(len(counts), self.plan.length + 1, features.shape[-1])
            self._new = (none,), Counts([], torch.zeros_like(prompts.lengths))

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        self._catch_up()
        ids = self._columns(draws)
        first, go_on = self._logits(self._block(root)[:, : self.plan.length], root, ids)
        return named(self.plan.draft(first, root, draws, go_on)[0], root, ids)

    def _logits(self, outputs: Tensor, root: Tensor, ids: Tensor | None) -> tuple[Tensor, Continue]:
        """Return the logits `[B, V]` after the root, and a function of those after any node.

        `outputs` `[B, D, H]` are those of the drafting slots, `root` `[B]` the roots' tokens. With
        `ids` `[Vd]` the logits are those of the draft vocabulary alone, `[B, Vd]`, and nodes hold
        columns of them.
        """
        slots = Slots(self._named(self.drafter.base_logits(outputs), ids))
        return slots.logits[:, 0], slots

    def _catch_up(self) -> None:
        """Write keys and values of the positions that the last round decided into the cache.

        They are context: other rows attend to them, but they have no queries, so no layer is run.
        """
        assert self._new is not None, "prefill first"
        (fused,), counts = self._new
        cache = self._cache
        for start in range(0, fused.shape[1], PREFILL_CHUNK):
            chunk = fused[:, start : start + PREFILL_CHUNK]
            width = chunk.shape[1]
            window = cache.open(width)
            # A feature is at its own position. The committed ones are 0 .. length - 1, since
            # every position before the root has been committed.
            positions = torch.arange(width, device=self._device) + cache.starts()[:, None]
            # The cache has the axis of the heads before that of the positions, the layers after
            # it.
            for layer, (keys, values) in enumerate(
                self.drafter.context(chunk, self.drafter.rotary(positions))
            ):
                window.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
            cache.commit_chunk(start, width, counts)
        self._new = None

    def _block(self, root: Tensor) -> Tensor:
        """Return the layers' output `[B, D, H]` in the drafting slots of the block at `root` `[B]`.

        Nothing of it stays in the cache: its rows are never committed.
        """
        cache, drafter = self._cache, self.drafter
        size = self.slots
        window = cache.open(size)
        # The context ends before the root, so its length is the root's position a, and slot j
        # is at a + j.
        positions = torch.arange(size, device=self._device) + cache.starts()[:, None]
        rotary = drafter.rotary(positions)
        # All slots see each other and the whole context.
        attend = attention_of_nodes(window, None, size, self._by_kernel)
        state = drafter.embed(root[:, None], size)
        for index in range(drafter.shape.num_layers):
            state = drafter.layer(index, state, rotary, attend)
        # The first draft is of position a + 1. DFlash makes it in slot 1, and has no use for the
        # output of the root's slot; DSpark makes it in slot 0.
        return state[:, drafter.first_slot :]

    def commit(self, accepted: Accepted) -> None:
        self._new = (self.drafter.fuse(accepted.hidden.taps),), accepted.gained


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, slots: int | None = None
) -> DFlashProposer:
    """Return the proposer of a drafter from disk, with a best-first tree; `width` 1 makes a chain.

    The tree has the `nodes` likeliest paths of at most `length` levels, from `width` candidates for
    each slot, or from all that can be among them if `width` is None. Other settings that are None
    are as the drafter was evaluated in training. `slots` are as in `DFlashProposer`. Raises
    `UserError`.
    """
    return DFlashProposer(artifact.drafter, settings_for(artifact, settings, slots), slots)


def settings_for(artifact: Artifact, settings: TreeSettings, slots: int | None) -> TreeSettings:
    """Return tree settings with the values of training for those that are None."""
    drafts = slots_of(artifact.drafter, slots) - artifact.drafter.first_slot
    return tree_of(settings, artifact.calibration, drafts)


def slots_of(drafter: DFlashDrafter, slots: int | None) -> int:
    """Return the number of slots to run. Raises `UserError` for too many, or none that drafts."""
    least, most = drafter.first_slot + 1, drafter.shape.block_size
    if slots is None:
        return most
    if positive("slots", slots, least) > most:
        raise UserError(
            f"a block of this drafter has {most} slots, not {slots}; give a smaller number"
        )
    return slots


KIND = Kind(make_proposer, tree=TREE_SETTINGS, own=("slots",), lookups=True)
