"""Proposer of EAGLE: a layer continues the target's features and its own states, as chain or tree.

Row p of the drafter's cache pairs the target's feature of position p with the token at p + 1, and
its output predicts the token at p + 2 (docs/notation.md#positions). With the root at position n the
newest feature is that of n - 1. So row n - 1 holds the root's token, and its output predicts the
nodes of depth 1. A node of depth d becomes a row at position n - 1 + d: it pairs the node's token
with its parent's output, the recycled state, in place of a feature. Dynamic trees are EAGLE-2's
(arXiv 2406.16858). After a round the rows of drafts are dropped.

Shapes: B rows of a batch, N rows of one pass, A rows that are new to the cache, U undecided slots
of the cache, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.artifact import Artifact
from ...heads.layers import RecyclingDrafter
from ..base.tree_settings import TREE_SETTINGS, TreeSettings, positive
from ..rounds.attention import attention_of_nodes
from ..rounds.cache import Counts
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, named
from ..targets.causal_model import PREFILL_CHUNK
from .cached import FeatureProposer
from .contract import Accepted, Prompts
from .growth import Level
from .kind import Kind
from .tree_plan import DEFAULT_TREE

DEFAULT_LENGTH, DEFAULT_WIDTH, DEFAULT_NODES = 5, 8, 25


class EagleProposer(FeatureProposer[RecyclingDrafter]):
    """Proposer of an EAGLE drafter; it drafts a dynamic tree if not set otherwise."""

    def __init__(self, drafter: RecyclingDrafter, settings: TreeSettings = DEFAULT_TREE) -> None:
        """Put a drafter to work. Raises `UserError` for settings that do not go together."""
        super().__init__(drafter, settings.or_else(length=DEFAULT_LENGTH, width=DEFAULT_WIDTH))

    def prefill(self, prompts: Prompts) -> None:
        self._open_cache(prompts, self.plan.expanded + self.plan.length)
        features = self.drafter.fuse(prompts.hidden.taps, prompts.hidden.last)
        ids, lengths = prompts.ids, prompts.lengths
        # `tokens` has the first root at its end, which is not part of the prompt.
        counts = Counts([len(tokens) - 1 for tokens in prompts.tokens], lengths)
        if prompts.cache.static:
            # All positions are run but each prompt's last. The first round catches up with that, as
            # one of as many positions as a tree has levels and a root: so all rounds have the same
            # shapes.
            if features.shape[1] > 1:
                self._advance(ids[:, 1:], features[:, :-1], Counts([], lengths - 1))
            last = (lengths - 1)[:, None, None].expand(-1, 1, features.shape[-1])
            features = functional.pad(features.gather(1, last), (0, 0, 0, self.plan.length))
            ids = functional.pad(ids.gather(1, last[..., 0]), (0, self.plan.length))
            counts = Counts([], torch.ones_like(lengths))
        self._new = (features, ids), counts

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return drafts below `root` `[B]`, from the row of the root on."""
        last, ids = self._catch_up(root), self._columns(draws)
        first, before = self._named(self.drafter.logits(last), ids), last[:, None]
        ran = 0

        def go_on(level: Level) -> Tensor:
            nonlocal before, ran
            # `before` has the outputs of the level before, or of the root's row.
            parents = level.above[..., None].expand(-1, -1, before.shape[-1])
            ran += level.tokens.shape[1]
            # A parent is in the level before, the only one of which outputs are kept.
            state = self.drafter.recycled(before.gather(1, parents))
            # The root's row is committed, so nodes of depth 1 are the first rows after it.
            tokens = level.tokens if ids is None else ids[level.tokens.clamp(min=0)]
            before = self._run(tokens, state, level.visible, level.depth - 1, ran)
            # The next level comes after these rows and sees those that are its ancestors.
            self._cache.stage(level.tokens.shape[1])
            return self._named(self.drafter.logits(before), ids)

        tree = named(self.plan.draft(first, root, draws, go_on)[0], root, ids)
        self._cache.drop()  # accepted drafts come again, with the target's features
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the positions that the last round decided, and commit them.

        Returns the output `[B, H]` of the root's row, which is the last of each batch row.
        """
        assert self._new is not None, "prefill first"
        (features, ids), counts = self._new
        self._new = None
        last_index = (counts.there - 1)[:, None]
        # The features are those of positions p, p + 1, .. n - 1, and `ids` are the tokens of the
        # same positions. Each feature is paired with the token after its own: tokens move one to
        # the left, and the root, at n, goes with the last feature of each batch row. Example: after
        # a prompt x0 .. x3 the features f0 .. f3 are paired with x1, x2, x3 and the root.
        tokens = functional.pad(ids[:, 1:], (0, 1)).scatter(1, last_index, root[:, None])
        return self._advance(tokens, features, counts)

    def _advance(self, tokens: Tensor, features: Tensor, counts: Counts) -> Tensor:
        """Run rows of the target's `features` `[B, A, H]` and `tokens` `[B, A]`, and commit them.

        Returns the output `[B, H]` of the last of each batch row's own `counts`.
        """
        width = features.shape[1]
        last_index = (counts.there - 1)[:, None]
        rows = torch.arange(len(tokens), device=tokens.device)
        # Output at each batch row's last position, as far as the chunks have come. The first chunk
        # replaces these values.
        last = features[:, 0]
        for start in range(0, width, PREFILL_CHUNK):
            chunk = slice(start, min(start + PREFILL_CHUNK, width))
            count = chunk.stop - chunk.start
            # Within the chunk alone: all earlier positions are committed, and those every row sees.
            causal = torch.ones(1, count, count, dtype=torch.bool, device=tokens.device).tril()
            places = torch.arange(count, device=tokens.device)
            outputs = self._run(tokens[:, chunk], features[:, chunk], causal, places, count)
            self._cache.commit_chunk(start, count, counts)
            # Batch rows that ended in an earlier chunk keep the output from there. In a row that
            # continues past this chunk the clamped index reads a value that a later chunk replaces.
            last = torch.where(
                last_index < start,
                last,
                outputs[rows, (last_index[:, 0] - start).clamp(0, count - 1)],
            )
        return last

    def _run(
        self,
        tokens: Tensor,
        state: Tensor,
        visible: Tensor | None,
        offset: Tensor | int,
        slots: int,
    ) -> Tensor:
        """Return the layers' output `[B, N, H]` for rows of `tokens` `[B, N]` and `state`.

        `state` `[B, N, H]` holds fused features or recycled states. The rows are `offset` `[N]`,
        or one for all, after the committed positions, and they are the last of U = `slots`
        undecided slots. `visible` `[1 | B, N, U]` bool is true for the undecided slots that a row
        sees; None: all.
        """
        cache, drafter = self._cache, self.drafter
        window = cache.open(tokens.shape[1])
        # A row is at the position of its feature, one before that of its token: the first row
        # after the committed ones has their number as its position, and siblings share a position.
        positions = cache.starts()[:, None] + offset

        # One undecided slot is the row's own. In a chain (None) a row sees all rows before it.
        seen = None if slots == 1 else visible
        attend = attention_of_nodes(window, seen, slots, self._by_kernel)
        # A missing node has token -1. It runs as token 0, and nothing of it is kept.
        token_part = drafter.token_part(tokens.clamp(0, drafter.shape.vocab_size - 1))
        return drafter.advance(token_part, state, drafter.rotary(positions), attend)

    def commit(self, accepted: Accepted) -> None:
        features = self.drafter.fuse(accepted.hidden.taps, accepted.hidden.last)
        self._new = (features, accepted.ids), accepted.gained


def make_proposer(artifact: Artifact, settings: TreeSettings = DEFAULT_TREE) -> EagleProposer:
    """Return the proposer of a drafter from disk, with a dynamic tree; `width` 1 makes a chain.

    Settings that are None are as the drafter was evaluated in training. Raises `UserError`.
    """
    known = artifact.calibration
    settings = settings.or_else(
        width=known.get("width", DEFAULT_WIDTH), length=known.get("length", DEFAULT_LENGTH)
    )
    if settings.width != 1:
        # A tree needs a node for each of its levels at least.
        least = positive("length", settings.length)
        settings = settings.or_else(nodes=max(known.get("tree_nodes", DEFAULT_NODES), least))
    return EagleProposer(artifact.drafter, settings)


KIND = Kind(make_proposer, tree=TREE_SETTINGS, lookups=True)
