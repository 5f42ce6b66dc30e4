"""EAGLE at work: trees or chains by recycling the layer's own states, over a cache that only ever
holds the target's features.

Row p of the drafter's cache pairs the target's feature of position p with the token at p + 1; a
drafted node of depth d is a row at one position after its parent's, fed with its parent's own
output (EAGLE-2's dynamic tree, arXiv 2406.16858).

Shapes: B batch, S positions, N nodes of one forward, A accepted nodes with the root, H hidden size,
G heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.artifact import Artifact
from ...heads.eagle import EagleDrafter, EagleShape
from ...heads.vocabulary import to_target
from ..cache import TreeCache, visible_slots
from ..device import send
from ..proposer import Accepted, Prompts
from ..replay import rank_accuracy
from ..sampling import Draws
from ..target import PREFILL_CHUNK
from ..tree import DraftTree
from ..tree_settings import TreeSettings, positive
from .autoregressive import attention_over, depth_row
from .growth import Level
from .tree_plan import Planned, TreePlan

DEFAULT_LENGTH, DEFAULT_WIDTH, DEFAULT_NODES = 5, 8, 25
DEFAULT_TREE = TreeSettings()
RANKS = 10  # places among the best that `calibrate` counts


class EagleProposer(Planned):
    """EAGLE layer at work; a dynamic tree if not set otherwise."""

    def __init__(
        self,
        drafter: EagleDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        name: str = "eagle",
    ) -> None:
        self.name, self.taps = name, drafter.taps
        settings = settings.or_else(length=DEFAULT_LENGTH, width=DEFAULT_WIDTH)
        self.replan(TreePlan(settings))
        self._drafter = drafter
        self._device = drafter.fc.weight.device
        self._draft_vocab_ids = drafter.draft_vocab_ids
        self._cache = TreeCache(0, 0)
        # fused features [B, A, H], their tokens [B, A], counts [B]
        self._new: tuple[Tensor, Tensor, Tensor] | None = None
        self._counts: list[int] = []

    @property
    def drafter_shape(self) -> EagleShape:
        """What engines are asked about."""
        return self._drafter.shape

    def prefill(self, prompts: Prompts) -> None:
        batch, length = prompts.ids.shape
        self._cache = TreeCache(batch, 2 * length + 64 + self.max_drafted, self._device)
        self._counts = [len(tokens) - 1 for tokens in prompts.tokens]
        self._new = (
            self._drafter.fuse(prompts.hidden.taps, prompts.hidden.last),
            prompts.ids,
            prompts.lengths,
        )

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        last = self._catch_up(root)
        first, before = self._logits(last), last[:, None]
        depths: tuple[int, ...] = ()

        def go_on(level: Level) -> Tensor:
            nonlocal before, depths
            parents = level.above[..., None].expand(-1, -1, before.shape[-1])
            here = (level.depth - 1,) * level.tokens.shape[1]
            depths += here
            state = self._drafter.recycled(before.gather(1, parents))
            before = self._run(level.tokens, state, level.visible, here, len(depths))
            self._cache.stage(len(here))
            return self._logits(before)

        tree, _ = self.plan.draft(first, root, draws, go_on)
        self._cache.staged = 0  # accepted drafts come again, with the target's features
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the rows that the last round decided; the last one's output `[B, H]` is where
        drafting starts."""
        assert self._new is not None, "prefill first"
        features, ids, counts = self._new
        width = features.shape[1]
        at = (counts - 1)[:, None]
        # row p takes the token of p + 1
        tokens = functional.pad(ids[:, 1:], (0, 1)).scatter(1, at, root[:, None])
        rows = torch.arange(len(root), device=root.device)
        last = features[:, 0]  # of the chunks so far, the output at each row's last position
        for start in range(0, width, PREFILL_CHUNK):
            part = slice(start, min(start + PREFILL_CHUNK, width))
            count = part.stop - part.start
            causal = torch.ones(1, count, count, dtype=torch.bool, device=root.device).tril()
            found = self._run(
                tokens[:, part], features[:, part], causal, tuple(range(count)), count
            )
            self._cache.commit([count] * len(root))
            last = torch.where(
                at < start, last, found[rows, (at[:, 0] - start).clamp(0, count - 1)]
            )
        self._cache.lengths = [
            length - width + n for length, n in zip(self._cache.lengths, self._counts, strict=True)
        ]
        self._new = None
        return last

    def _run(
        self,
        tokens: Tensor,
        state: Tensor,
        visible: Tensor | None,
        depths: tuple[int, ...],
        slots: int,
    ) -> Tensor:
        """The layers' output for rows `[B, N]`, `depths` behind the committed ones; `visible` is
        about `slots` undecided ones."""
        cache, drafter = self._cache, self._drafter
        count = tokens.shape[1]
        cache.open(count, masked=True)
        see = None
        alone = count == 1 and (visible is None or slots == 1)  # and so it sees every slot
        if not (alone and cache.uniform):
            if visible is None:  # a chain sees all of itself so far
                visible = torch.ones(1, count, slots, dtype=torch.bool, device=tokens.device)
            see = visible_slots(visible, cache, cache.seen(count))[:, None]
        positions = depth_row(depths, tokens.device) + cache.starts()[:, None]

        attend = attention_over(cache, see)
        part = drafter.token_part(tokens.clamp(0, drafter.shape.vocab_size - 1))
        return drafter.advance(part, state, drafter.rotary(positions), attend)

    def _logits(self, output: Tensor) -> Tensor:
        return to_target(
            self._drafter.logits(output), self._draft_vocab_ids, self._drafter.shape.vocab_size
        )

    def commit(self, accepted: Accepted) -> None:
        self._counts = [len(nodes) for nodes in accepted.nodes]
        self._new = (
            self._drafter.fuse(accepted.hidden.taps, accepted.hidden.last),
            accepted.ids,
            accepted.counts,
        )

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        self._counts = [self._counts[row] for row in rows]
        if self._new is not None:
            index = send(rows, self._device)
            features, ids, counts = (part[index] for part in self._new)
            width = max(self._counts)
            self._new = (features[:, :width], ids[:, :width], counts)

    def finish(self) -> None:
        self._cache, self._new = TreeCache(0, 0), None


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, name: str | None = None
) -> EagleProposer:
    """Return the drafter from disk at work, with a dynamic tree; `width` 1 makes a chain.

    Settings that are None are as the drafter was evaluated in training.
    """
    known = artifact.calibration
    settings = settings.or_else(
        width=known.get("width", DEFAULT_WIDTH), length=known.get("length", DEFAULT_LENGTH)
    )
    if settings.width != 1:
        # A tree needs a node for each of its levels at least.
        least = positive("length", settings.length)
        settings = settings.or_else(nodes=max(known.get("tree_nodes", DEFAULT_NODES), least))
    return EagleProposer(
        artifact.drafter, settings, name or f"eagle{artifact.drafter.shape.version}"
    )


def calibrate(texts: Sequence[tuple[Tensor, int]], tree_nodes: int) -> dict[str, Any]:
    """How often the rank-r token at each depth is right on the texts' own paths, and the tree that
    this is evaluated with."""
    accuracy, roots = rank_accuracy(texts, RANKS)
    length = min(DEFAULT_LENGTH, tree_nodes)
    return {
        "rank_accuracy": accuracy,
        "roots": roots,
        "tree_nodes": tree_nodes,
        "length": length,
        "width": DEFAULT_WIDTH,
    }
