"""Block drafter at work: all drafts of a round in one pass, as a chain or as the best-first tree of
their distributions (DDTree).

The drafter's cache holds keys and values of the target's fused features for the positions before
the root, and nothing else: a block's own rows are overwritten in the next round, and what was
accepted comes again with the target's features.

Shapes: B batch, S positions, A accepted nodes with the root, D drafts, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.artifact import Artifact
from ...heads.dflash import DFlashDrafter
from ...heads.errors import UserError
from ..cache import TreeCache, visible_slots
from ..device import send
from ..proposer import Accepted, Prompts
from ..replay import rank_accuracy
from ..sampling import Draws
from ..target import PREFILL_CHUNK
from ..tree import NO_NODE, DraftTree, TreeShape
from ..tree_settings import TreeSettings, positive
from .autoregressive import attention_over, depth_row
from .growth import Continue, Slots, grow_chain
from .tree_plan import Planned, TreePlan

DEFAULT_NODES = 16
DEFAULT_TREE = TreeSettings()
RANKS = 10  # places among the best that `calibrate` counts


class DFlashProposer(Planned):
    """Block drafter at work.

    Drafts of a block do not depend on each other, so trees are the `nodes` likeliest paths
    (`growth.best_first`), `width` candidates a slot, and going deeper costs nothing.

    `slots` of a block are run, all if None. Slots see each other, so fewer of them draft otherwise:
    as engines do where they are asked for fewer drafts than a block has.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        slots: int | None = None,
        name: str = "dflash",
    ) -> None:
        self.slots, self.first_slot = slots_of(drafter, slots), drafter.first_slot
        self.name, self.taps, self.longest = name, drafter.taps, self.slots - self.first_slot
        self.replan(TreePlan(settings.or_else(length=self.longest, width=1)))
        if self.plan.length > self.longest:
            raise UserError(
                f"a block of this drafter has {self.longest} drafts, not {self.plan.length}; give "
                "a smaller length"
            )
        self._drafter = drafter
        self._device = drafter.fc.weight.device
        self._cache = TreeCache(0, 0)
        # features of new positions, fused [B, A, H], and how many of each row
        self._new: tuple[Tensor, list[int]] | None = None

    @property
    def drafter(self) -> DFlashDrafter:
        """What engines are asked about."""
        return self._drafter

    def prefill(self, prompts: Prompts) -> None:
        batch, length = prompts.ids.shape
        self._cache = TreeCache(
            batch, 2 * length + 64 + self._drafter.shape.block_size, self._device
        )
        self._new = (
            self._drafter.fuse(prompts.hidden.taps),
            [len(tokens) - 1 for tokens in prompts.tokens],
        )

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        self._catch_up()
        return self._draft(self._block(root)[:, : self.plan.length], root, draws)

    def _draft(self, outputs: Tensor, root: Tensor, draws: Draws) -> DraftTree:
        first, go_on = self._logits(outputs, root)
        if not self.plan.threshold:
            return self.plan.draft(first, root, draws, go_on)[0]
        tree = grow_chain(first, root, draws, go_on, self.plan.length)
        return cut(tree, self._confidence(outputs, tree.tokens).cumprod(-1) >= self.plan.threshold)

    def _confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor:
        """How sure `[B, D]` a chain `tokens` `[B, 1 + D]` is of each draft, from the drafts
        before it alone: that every acceptance rule stays lossless where chains are cut rests on it
        (docs/verification.md#non-anticipation). Of the first one it is sure; of a later one as
        its distribution was of the draft before."""
        probs = self._drafter.base_logits(outputs[:, :-1]).float().softmax(-1)
        said = probs.gather(-1, tokens[:, 1:-1, None].clamp(min=0))[..., 0]
        return functional.pad(said, (1, 0), value=1.0)

    def _logits(self, outputs: Tensor, root: Tensor) -> tuple[Tensor, Continue]:
        """Logits `[B, V]` after the root, and those after any node, from the drafting slots'
        `outputs` `[B, D, H]`."""
        slots = Slots(self._drafter.base_logits(outputs))
        return slots.logits[:, 0], slots

    def _catch_up(self) -> None:
        """Add the positions that the last round decided to the context."""
        assert self._new is not None, "prefill first"
        fused, counts = self._new
        cache = self._cache
        for start in range(0, fused.shape[1], PREFILL_CHUNK):
            part = fused[:, start : start + PREFILL_CHUNK]
            width = part.shape[1]
            cache.open(width, masked=True)
            positions = depth_row(tuple(range(width)), self._device) + cache.starts()[:, None]
            for layer, (keys, values) in enumerate(
                self._drafter.context(part, self._drafter.rotary(positions))
            ):
                cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
            cache.commit([min(max(count - start, 0), width) for count in counts])
        self._new = None

    def _block(self, root: Tensor) -> Tensor:
        """The layers' output `[B, D, H]` for the drafting slots of the block at the root; nothing
        of it stays in the cache."""
        cache, drafter = self._cache, self._drafter
        size = self.slots
        cache.open(size, masked=True)
        see = None
        if not cache.uniform:
            everything = torch.ones(1, size, size, dtype=torch.bool, device=self._device)
            see = visible_slots(everything, cache, cache.seen(size))[:, None]
        rotary = drafter.rotary(
            depth_row(tuple(range(size)), self._device) + cache.starts()[:, None]
        )

        attend = attention_over(cache, see)
        state = drafter.embed(root[:, None], size)
        for index in range(drafter.shape.num_layers):
            state = drafter.layer(index, state, rotary, attend)
        return state[:, drafter.first_slot :]

    def commit(self, accepted: Accepted) -> None:
        self._new = (
            self._drafter.fuse(accepted.hidden.taps),
            [len(nodes) for nodes in accepted.nodes],
        )

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        if self._new is not None:
            fused, counts = self._new
            counts = [counts[row] for row in rows]
            self._new = (fused[send(rows, self._device)][:, : max(counts)], counts)

    def finish(self) -> None:
        self._cache, self._new = TreeCache(0, 0), None


def cut(tree: DraftTree, kept: Tensor) -> DraftTree:
    """A chain of which each row keeps its first drafts, those that are `kept` `[B, D]`; true once
    false stays false.

    As long as the longest row: one synchronisation. The node before a cut has no children, so no
    distribution is compared there.
    """
    longest = int(kept.sum(-1).max())
    kept = kept[:, :longest]
    tokens = torch.cat(
        [tree.tokens[:, :1], torch.where(kept, tree.tokens[:, 1 : longest + 1], NO_NODE)], dim=1
    )
    probs = None
    if tree.probs is not None:
        probs = tree.probs[:, : longest + 1] * functional.pad(kept, (0, 1))[..., None]
    return DraftTree(tokens, TreeShape.chain(longest), probs=probs)


def make_proposer(
    artifact: Artifact,
    settings: TreeSettings = DEFAULT_TREE,
    slots: int | None = None,
    name: str | None = None,
) -> DFlashProposer:
    """Return the drafter from disk at work, with the `nodes` likeliest paths of at most `length`
    levels, from `width` candidates a slot (all that could be among them, if None).

    Settings that are None are as the drafter was evaluated in training. `slots`: see
    `DFlashProposer`.
    """
    settings = tree_of(artifact, settings, slots)
    return DFlashProposer(artifact.drafter, settings, slots, name or artifact.method)


def slots_of(drafter: DFlashDrafter, slots: int | None) -> int:
    """Slots of a block to run. Raises `UserError` for more than it has, or for none that drafts."""
    least, most = drafter.first_slot + 1, drafter.shape.block_size
    if slots is None:
        return most
    if positive("slots", slots, least) > most:
        raise UserError(
            f"a block of this drafter has {most} slots, not {slots}; give a smaller number"
        )
    return slots


def tree_of(artifact: Artifact, settings: TreeSettings, slots: int | None) -> TreeSettings:
    """Return the tree settings of a block drafter; what is None becomes what the drafter was
    evaluated with in training. Raises `UserError`."""
    known = artifact.calibration
    drafts = slots_of(artifact.drafter, slots) - artifact.drafter.first_slot
    width, nodes = settings.width, settings.nodes
    if settings.threshold and (nodes is not None or width not in (None, 1)):
        raise UserError("threshold is about chains; leave out nodes and width, or the threshold")
    length = settings.length
    if length is None:
        length = min(known.get("length", drafts), drafts)
    if width == 1 or (width is None and settings.threshold):
        return replace(settings, length=length, width=1)
    if settings.length is None and nodes is not None:
        length = min(length, positive("nodes", nodes))  # a tree needs a node a level
    if nodes is None:
        nodes = int(max(known.get("tree_nodes", DEFAULT_NODES), positive("length", length)))
    return replace(settings, length=length, width=nodes if width is None else width, nodes=nodes)


def calibrate(texts: Sequence[tuple[Tensor, int]], tree_nodes: int) -> dict[str, Any]:
    """How often the rank-r token of each draft is right, and the tree that this is evaluated
    with."""
    accuracy, roots = rank_accuracy(texts, RANKS)
    return {
        "rank_accuracy": accuracy,
        "roots": roots,
        "tree_nodes": tree_nodes,
        "length": min(len(accuracy), tree_nodes),
    }
