"""EAGLE at work: a layer continues the target's features and its own states, as chain or tree.

Row p of the drafter's cache pairs the target's feature of position p with the token at p + 1, and
its output predicts the token at p + 2 (docs/notation.md#positions). With the root at position n the
newest feature is that of n - 1. So row n - 1 holds the root's token, and its output predicts the
nodes of depth 1. A node of depth d becomes a row at position n - 1 + d: it pairs the node's token
with its parent's output, the recycled state, in place of a feature. Dynamic trees are EAGLE-2's
(arXiv 2406.16858).

Between rounds the cache holds rows of the target's features only. Rows of drafts are dropped, and
those that were accepted come again, made of the target's features.

Shapes: B rows of a batch, N rows of one pass, A rows that are new to the cache, U undecided slots
of the cache, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.artifact import Artifact
from ...heads.eagle import EagleDrafter
from ...heads.vocabulary import to_target
from ..proposer import Accepted, Prompts
from ..rounds.attention import attention_over
from ..rounds.cache import KeptCache, TreeCache, visible_slots
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, named
from ..targets.causal_model import PREFILL_CHUNK
from ..tree_settings import TreeSettings, positive
from .growth import Level
from .tree_plan import Planned, TreePlan

DEFAULT_LENGTH, DEFAULT_WIDTH, DEFAULT_NODES = 5, 8, 25
DEFAULT_TREE = TreeSettings()


class EagleProposer(Planned):
    """EAGLE drafter at work; it drafts a dynamic tree if not set otherwise."""

    traceable = True

    def __init__(
        self,
        drafter: EagleDrafter,
        settings: TreeSettings = DEFAULT_TREE,
        name: str = "eagle",
    ) -> None:
        """Put a drafter to work. Raises `UserError` for settings that do not go together."""
        self.name, self.taps = name, drafter.taps
        settings = settings.or_else(length=DEFAULT_LENGTH, width=DEFAULT_WIDTH)
        self.replan(TreePlan(settings))
        self._drafter = drafter
        self._device = drafter.fc.weight.device
        self._draft_vocab_ids = drafter.draft_vocab_ids
        self._cache, self._kept = TreeCache(0, 0), KeptCache()
        # Positions that the target has decided and the cache lacks: fused features [B, A, H],
        # tokens [B, A], and how many of them each row has [B], which `_counts` holds on the host.
        self._new: tuple[Tensor, Tensor, Tensor] | None = None
        self._counts: list[int] = []

    @property
    def drafter(self) -> EagleDrafter:
        """The drafter itself."""
        return self._drafter

    def prefill(self, prompts: Prompts) -> None:
        batch, length = prompts.ids.shape
        static = prompts.cache.static
        # How long replies become is not known. This is a guess: a full cache doubles itself. A
        # static one is as large as the target's, and has the rows of a tree behind it.
        capacity = 2 * length + 64 + self.max_drafted
        if static:
            capacity = prompts.cache.capacity + self.plan.expanded + self.plan.length
        self._cache = self._kept.take(batch, capacity, self._device, static=static)
        features = self._drafter.fuse(prompts.hidden.taps, prompts.hidden.last)
        # `tokens` has the first root at its end, which is not part of the prompt.
        self._counts = [len(tokens) - 1 for tokens in prompts.tokens]
        self._new = features, prompts.ids, prompts.lengths
        if static:
            self._new = self._run_prompts(features, prompts.ids, prompts.lengths)

    def _run_prompts(
        self, features: Tensor, ids: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run all positions of prompts but each one's last, which the next round catches up with.

        Returns that last one as positions of a round, which are as many as a tree has levels and a
        root: so all rounds have the same shapes.
        """
        if features.shape[1] > 1:
            self._counts = [count - 1 for count in self._counts]
            self._advance(ids[:, 1:], features[:, :-1], lengths - 1)
        self._counts = [1] * len(ids)
        last = (lengths - 1)[:, None, None].expand(-1, 1, features.shape[-1])
        columns = self.plan.length
        return (
            functional.pad(features.gather(1, last), (0, 0, 0, columns)),
            functional.pad(ids.gather(1, last[..., 0]), (0, columns)),
            torch.ones_like(lengths),
        )

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return drafts below `root` `[B]`, from the row of the root on."""
        last = self._catch_up(root)
        # A greedy choice needs no logits of tokens that are never drafted. Whatever else is done
        # with them knows tokens by their ids: penalties, noise, a plan that measures.
        ids = None
        if draws.sampling.plain_greedy and isinstance(self.plan, TreePlan):
            ids = self._draft_vocab_ids
        first, before = self._logits(last, ids is None), last[:, None]
        ran = 0

        def go_on(level: Level) -> Tensor:
            nonlocal before, ran
            # `before` has the outputs of the level before, or of the root's row.
            parents = level.above[..., None].expand(-1, -1, before.shape[-1])
            ran += level.tokens.shape[1]
            # A parent is in the level before, the only one of which outputs are kept.
            state = self._drafter.recycled(before.gather(1, parents))
            # The root's row is committed, so nodes of depth 1 are the first rows behind it.
            tokens = level.tokens if ids is None else ids[level.tokens.clamp(min=0)]
            before = self._run(tokens, state, level.visible, level.depth - 1, ran)
            # The next level stands behind these rows and sees those that are its ancestors.
            self._cache.stage(level.tokens.shape[1])
            return self._logits(before, ids is None)

        tree = named(self.plan.draft(first, root, draws, go_on)[0], root, ids)
        self._cache.staged = 0  # accepted drafts come again, with the target's features
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the positions that the last round decided, and commit them.

        Returns the output `[B, H]` of the root's row, which is the last of each batch row.
        """
        assert self._new is not None, "prefill first"
        features, ids, counts = self._new
        self._new = None
        last_index = (counts - 1)[:, None]
        # The features are those of positions p, p + 1, .. n - 1, and `ids` are the tokens of the
        # same positions. Each feature is paired with the token after its own: tokens move one to
        # the left, and the root, at n, goes with the last feature of each batch row. Example: after
        # a prompt x0 .. x3 the features f0 .. f3 are paired with x1, x2, x3 and the root.
        tokens = functional.pad(ids[:, 1:], (0, 1)).scatter(1, last_index, root[:, None])
        return self._advance(tokens, features, counts)

    def _advance(self, tokens: Tensor, features: Tensor, counts: Tensor) -> Tensor:
        """Run rows of the target's `features` `[B, A, H]` and `tokens` `[B, A]`, and commit them.

        Returns the output `[B, H]` of the last of each batch row's own `counts` `[B]`, which
        `_counts` are on the host.
        """
        width = features.shape[1]
        last_index = (counts - 1)[:, None]
        rows = torch.arange(len(tokens), device=tokens.device)
        # Output at each batch row's last position, as far as the chunks have come. The first chunk
        # replaces these values, whatever they are.
        last = features[:, 0]
        for start in range(0, width, PREFILL_CHUNK):
            chunk = slice(start, min(start + PREFILL_CHUNK, width))
            count = chunk.stop - chunk.start
            # Within the chunk alone: all earlier positions are committed, and those every row sees.
            causal = torch.ones(1, count, count, dtype=torch.bool, device=tokens.device).tril()
            places = torch.arange(count, device=tokens.device)
            outputs = self._run(tokens[:, chunk], features[:, chunk], causal, places, count)
            self._cache.commit_chunk(start, count, self._counts, counts)
            # Batch rows that ended in an earlier chunk keep the output from there. In a row that
            # goes on past this chunk the clamped index reads a value that a later chunk replaces.
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

        `state` `[B, N, H]` holds fused features or recycled states. The rows stand `offset` `[N]`,
        or one for all, behind the committed positions, and they are the last of U = `slots`
        undecided slots. `visible` `[1 | B, N, U]` bool is true for the undecided slots that a row
        sees; None: all.
        """
        cache, drafter = self._cache, self._drafter
        count = tokens.shape[1]
        cache.open(count, masked=True)
        see = None
        # A single row that sees every slot needs no mask, as long as no batch row is shorter than
        # the cache: there the slots behind its end must be hidden.
        # One undecided slot is the row's own, and with None the row sees all slots by definition.
        alone = count == 1 and (visible is None or slots == 1)
        if cache.static or not (alone and cache.uniform):
            if visible is None:  # a chain: each row sees all rows before it
                visible = torch.ones(1, count, slots, dtype=torch.bool, device=tokens.device)
            see = visible_slots(visible, cache, cache.seen(count))[:, None]
        # A row stands at the position of its feature, one before that of its token: the first row
        # behind the committed ones has their number as its position, and siblings share a position.
        positions = cache.starts()[:, None] + offset

        attend = attention_over(cache, see)
        # A missing node has token -1. It runs as token 0, and nothing of it is kept.
        token_part = drafter.token_part(tokens.clamp(0, drafter.shape.vocab_size - 1))
        return drafter.advance(token_part, state, drafter.rotary(positions), attend)

    def _logits(self, output: Tensor, of_target: bool = True) -> Tensor:
        """Return the logits `[..., Vd]` for outputs `[..., H]`, or `of_target` `[..., V]`."""
        logits = self._drafter.logits(output)
        if not of_target:
            return logits
        return to_target(logits, self._draft_vocab_ids, self._drafter.shape.vocab_size)

    def commit(self, accepted: Accepted) -> None:
        self._counts = [len(nodes) for nodes in accepted.nodes]
        self._new = (
            self._drafter.fuse(accepted.hidden.taps, accepted.hidden.last),
            accepted.ids,
            accepted.counts,
        )

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        if not self._cache.static:
            self._counts = [self._counts[row] for row in rows]
        if self._new is not None:
            index = send(rows, self._device)
            features, ids, counts = (tensor[index] for tensor in self._new)
            # The longest row may be among those that left. A static batch keeps its shapes.
            width = features.shape[1] if self._cache.static else max(self._counts)
            self._new = (features[:, :width], ids[:, :width], counts)

    def finish(self) -> None:
        self._kept.put(self._cache)
        self._cache, self._new = TreeCache(0, 0), None


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, name: str | None = None
) -> EagleProposer:
    """Return a drafter from disk at work, with a dynamic tree; `width` 1 makes a chain.

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
    return EagleProposer(
        artifact.drafter, settings, name or f"eagle{artifact.drafter.shape.version}"
    )
