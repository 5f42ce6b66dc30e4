"""Draft models at work: causal language models with the target's tokenizer (arXiv 2211.17192).

A draft model reads tokens only, and drafts a chain or a tree. Its cache holds the text up to the
root. Of a round's drafts it keeps the accepted ones that it has run. The last draft of a chain is
never run, and the deepest accepted node of a tree counts as not run (`commit_accepted`). Where such
a draft was accepted, the cache lacks the token before the new root, and the next round runs both.

Shapes: B rows of a batch, N tree nodes with the root, H hidden size, S positions of a text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..drafters import Kind
from ..proposer import Accepted, Prompts
from ..rounds.cache import KeptCache, TreeCache
from ..rounds.device import row_of, send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree
from ..targets.causal_model import CausalModel, bytes_of
from ..targets.target import Target
from ..tree_settings import TREE_SETTINGS, TreeSettings
from .autoregressive import TreeRunner, commit_accepted, fit_vocabulary
from .tree_plan import Planned, TreePlan

DEFAULT_LENGTH = 4
DEFAULT_TREE = TreeSettings()
KIND = Kind("draft_model", tree=TREE_SETTINGS, own=("cost",), chains=True)
DRAFT_COST = 0.25  # time of a draft as a share of a target pass, if nobody measured it


class DraftModelProposer(Planned):
    """Draft model at work; it drafts a chain if not set otherwise."""

    taps: tuple[int, ...] = ()
    traceable = True

    def __init__(
        self, model: CausalModel, vocab_size: int, settings: TreeSettings = DEFAULT_TREE
    ) -> None:
        """Put `model` to work. Raises `UserError` for settings that do not go together.

        `vocab_size` is the target's; the draft model's may differ.
        """
        self.name = "draft-model"
        self.model, self._vocab_size = model, vocab_size
        self.replan(TreePlan(settings.or_else(length=DEFAULT_LENGTH, width=1)))
        self._cache, self._kept = TreeCache(0, 0), KeptCache()
        # [B]: the token before the root
        self._before: Tensor
        # [B, N]: index of each tree node among those that were run, see `Planner.draft`
        self._slots: Tensor

    @property
    def weight_bytes(self) -> int:
        """See `Proposer.weight_bytes`."""
        return bytes_of(self.model.model) + self.model.packed_bytes

    def prefill(self, prompts: Prompts) -> None:
        """Run the prompts, which end before the first root."""
        batch, length = prompts.ids.shape
        static = prompts.cache.static
        capacity = min(2 * length + 64, self.model.max_positions)
        if static:  # as large as the target's, and with space for the nodes that this model runs
            capacity = prompts.cache.capacity + self.plan.expanded
        self._cache = self._kept.take(
            batch, capacity + self.max_drafted, self.model.device, static=static
        )
        # The draft model's vocabulary may be smaller than the target's. A token that it lacks
        # becomes its last one: the drafts behind it are worse, and the text is still the target's.
        clamped = prompts.ids.clamp(max=self.model.vocab_size - 1)
        # `tokens` has one token more than the prompt: the first root.
        lengths = [len(tokens) - 1 for tokens in prompts.tokens]
        self.model.prefill(clamped, lengths, self._cache)
        self._before = prompts.ids.gather(1, prompts.lengths[:, None] - 1)[:, 0]
        self._slots = prompts.lengths.new_zeros(0)
        # Number of tokens before the root, of each row: the root's position.
        self._text_lengths = lengths
        # True if some row's cache lacks the token before the root. So that rounds have one shape,
        # all rows of a static one do.
        self._behind = static
        if static:
            self._cache.lengths = [length - 1 for length in lengths]

    def lay_out(self) -> None:
        """Lay the model's matrices out for decoding: it cannot be trained or stored any more."""
        # Its rounding is its own affair: drafts decide about speed, not about the text.
        self.model.fuse(move=True)
        self.model.pack()

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        first = fit_vocabulary(self.model.head(self._catch_up(root)), self._vocab_size)
        go_on = TreeRunner(self.model, self._cache, self._vocab_size)
        tree, self._slots = self.plan.draft(first, root, draws, go_on)
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the root, and the token before it where a row lacks that; return the root's state.

        The state is the last hidden state `[B, H]`, which predicts the drafts of depth 1.
        """
        # If one row lacks the token before the root, all rows run it, so that one forward pass has
        # one shape. Rows that have it write the same values into the same slot once more.
        tokens = torch.stack([self._before, root], dim=1) if self._behind else root[:, None]
        count = tokens.shape[1]
        # The first of the tokens stands at the text's length + 1 - count: the root at its length,
        # the token before it one slot earlier. Example: before a root at position 10 the cache has
        # 9 or 10 tokens; with two tokens to run all rows begin at slot 9, with one at slot 10.
        static = self._cache.static
        if not static:
            self._cache.lengths = [length + 1 - count for length in self._text_lengths]
        depths = row_of(tuple(range(count)), root.device)
        causal = (
            None
            if count == 1
            else torch.ones(1, count, count, dtype=torch.bool, device=root.device).tril()
        )
        hidden = self.model.forward_tree(tokens, causal, depths, depths, self._cache)
        self._cache.commit(torch.full_like(root, count) if static else [count] * len(root))
        return hidden.last[:, -1]

    def commit(self, accepted: Accepted) -> None:
        """Keep the accepted drafts that were run, and note which token the cache lacks."""
        commit_accepted(self._cache, self.plan, self._slots, accepted)
        # `ids` begins with the old root, so that its last entry is the token before the new root
        # even where no draft was accepted.
        self._before = accepted.ids.gather(1, accepted.counts[:, None] - 1)[:, 0]
        if self._cache.static:
            return
        # The nodes count the old root, which stands before the new one like the accepted drafts.
        text_lengths = []
        for length, nodes in zip(self._text_lengths, accepted.nodes, strict=True):
            text_lengths.append(length + len(nodes))
        self._text_lengths = text_lengths
        # The cache lacks at most the last accepted draft, which is the token before the new root.
        self._behind = self._cache.lengths != self._text_lengths

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        self._text_lengths = [self._text_lengths[row] for row in rows]
        index = send(rows, self._before.device)
        self._before = self._before[index]
        # The next drafts may have been made already.
        self._slots = self._slots[index] if self._slots.dim() > 1 else self._slots

    def finish(self) -> None:
        self._kept.put(self._cache)
        self._cache = TreeCache(0, 0)


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, cost: float = DRAFT_COST
) -> DraftModelProposer:
    """Return a trained draft model at work.

    The `threshold` "auto" is the best of those measured on held-out texts, if a draft takes `cost`
    of the time of a target pass. Raises `UserError`.
    """
    if settings.threshold == "auto":
        if not artifact.calibration.get("adaptive"):
            raise UserError(
                "this draft model has no calibrated threshold; give a number, such as threshold=0.3"
            )
        threshold, longest = best_adaptive(artifact.calibration, cost)
        settings = replace(settings, threshold=threshold).or_else(length=longest)
    proposer = on_model(artifact.drafter, settings)
    proposer.name = "distilled-lm"
    return proposer


def load_draft_model(
    folder: str, target: Target, settings: TreeSettings = DEFAULT_TREE
) -> DraftModelProposer:
    """Return the model in `folder` at work for `target`.

    Raises `UserError` if it does not share the target's tokenizer, or cannot run trees.
    """
    if settings.threshold == "auto":
        raise UserError(
            f"{folder} was not trained here and has no calibrated threshold; give a number, such "
            "as threshold=0.3"
        )
    drafter = DraftModel.load(Path(folder), target.dtype, target.embedding_and_head)
    drafter.model.to(target.device)
    return on_model(drafter, settings)


def on_model(drafter: DraftModel, settings: TreeSettings) -> DraftModelProposer:
    """Return the proposer of a loaded draft model. Raises `UserError` if it cannot run trees."""
    runner = CausalModel(drafter.model, drafter.tokenizer, "the draft model", frozen=False)
    runner.check_tree()
    return DraftModelProposer(runner, drafter.vocab_size, settings)


def best_adaptive(calibration: JsonObject, cost: float) -> tuple[float, int]:
    """Return threshold and longest chain of the row of `adaptive` with the most tokens per second.

    A draft takes `cost` of the time of a target pass.
    """
    # A row is [threshold, longest, tau, drafts per round]: a round emits tau tokens in the time of
    # one target pass and so many drafts.
    threshold, longest, *_ = max(
        calibration["adaptive"], key=lambda row: row[2] / (1 + cost * row[3])
    )
    return threshold, int(longest)
