"""Proposer of draft models: causal language models with the target's tokenizer (arXiv 2211.17192).

A draft model reads tokens only, and drafts a chain or a tree. Its cache holds the text up to the
root. Of a round's drafts it keeps the accepted ones that it has run. The last draft of a chain is
never run, and the deepest accepted node of a tree counts as not run. Where such a draft was
accepted, the cache lacks the token before the new root, and the next round runs both.

Shapes: B rows of a batch, N tree nodes with the root, H hidden size, S positions of a text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ..base.tree_settings import TREE_SETTINGS, TreeSettings
from ..rounds.cache import Counts
from ..rounds.device import row_of, send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, Pass
from ..targets.causal_model import CausalModel
from ..targets.target import Target, TargetSource
from .cached import CachedProposer
from .contract import Accepted, Prompts
from .growth import Level
from .kind import Kind
from .tree_plan import DEFAULT_TREE

DEFAULT_LENGTH = 4


class DraftModelProposer(CachedProposer[PreTrainedModel]):
    """Proposer of a draft model; it drafts a chain if not set otherwise."""

    name, kind = "draft-model", "draft_model"

    def __init__(
        self,
        model: CausalModel,
        vocab_size: int,
        settings: TreeSettings = DEFAULT_TREE,
        known: int | None = None,
        stand_in: int = 0,
    ) -> None:
        """Put `model` to work. Raises `UserError` for settings that do not go together.

        `vocab_size` is the target's; the draft model's may differ. Of tokens that were added to the
        target, from the id `known` on, none is drafted, and each is read as `stand_in`.
        """
        self.model, self.drafter, self._vocab_size = model, model.model, vocab_size
        # In a recording what recurrent layers keep of the last drafts would have to stay in place.
        self.traceable = not model.mixers
        self._known, self._stand_in = known, stand_in
        settings = settings.or_else(length=DEFAULT_LENGTH, width=1)
        super().__init__(settings, model.device, model.layers_with_keys)
        # [B]: the token before the root
        self._before: Tensor
        # Tokens that each row runs next: the root, and before it the one that its cache may lack
        self._next: Counts
        # [B, N]: index of each tree node among those that were run, see `TreePlan.draft`
        self._slots: Tensor
        self.left_for_commit = () if self.plan.width == 1 else ("_slots",)

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + self.model.packed_bytes

    def prefill(self, prompts: Prompts) -> None:
        """Run the prompts, which end before the first root."""
        beyond = self.plan.expanded + self.max_drafted
        self._open_cache(prompts, beyond, self.model.max_positions)
        # The draft model's vocabulary may be smaller than the target's. A token that it lacks
        # becomes its last one: the drafts after it are worse, and the text is still the target's.
        clamped = self._read(prompts.ids).clamp(max=self.model.vocab_size - 1)
        # `tokens` has one token more than the prompt: the first root.
        lengths = [len(tokens) - 1 for tokens in prompts.tokens]
        self.model.prefill(clamped, lengths, self._cache)
        self._before = prompts.ids.gather(1, prompts.lengths[:, None] - 1)[:, 0]
        self._slots = prompts.lengths.new_zeros(0)
        self._next = Counts([1] * len(lengths), torch.ones_like(prompts.lengths))

    def prepare_weights(self, reference: bool) -> None:
        # Other rounding does not matter: drafts decide the speed, not the text.
        if not reference:
            self.model.fuse(move=True)
            self.model.pack()

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        first = self._fitted(self.model.head(self._catch_up(self._read(root))))
        # Depths of all undecided slots in the order in which they were run: a mask with a sliding
        # window needs the positions of earlier levels too.
        depths: tuple[int, ...] = ()

        def go_on(level: Level) -> Tensor:
            nonlocal depths
            count = level.tokens.shape[1]
            # The root is committed, so nodes of depth 1 come first after the committed positions.
            level_depths = (level.depth - 1,) * count
            depths += level_depths
            nodes = Pass(
                depths=row_of(level_depths, root.device),
                visible=level.visible,
                slot_depths=row_of(depths, root.device),
            )
            hidden = self.model.forward(level.tokens, nodes, self._cache)
            # The nodes stay undecided, so that the next level comes after them and can see them.
            self._cache.stage(count)
            return self._fitted(self.model.head(hidden.last))

        tree, self._slots = self.plan.draft(first, root, draws, go_on)
        return tree

    def _read(self, ids: Tensor) -> Tensor:
        """Return token ids with the stand-in for those that were added to the target."""
        return ids if self._known is None else ids.masked_fill(ids >= self._known, self._stand_in)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Return the draft model's logits over the target's vocabulary, see `fit_vocabulary`."""
        return fit_vocabulary(logits[..., : self._known], self._vocab_size)

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the root, and the token before it where a row lacks that; return the root's state.

        The state is the last hidden state `[B, H]`, which predicts the drafts of depth 1.
        """
        # If one row lacks the token before the root, all rows run two tokens, so that one forward
        # pass has one shape. A row that lacks nothing begins with the root, and what follows is
        # seen by nothing and not committed.
        count = self._cache.width(self._next, 2)
        tokens, causal = root[:, None], None
        alike = bool(self._next.here) and min(self._next.here) == count
        if count > 1:
            first = self._read(self._before)
            if not alike:
                first = torch.where(self._next.there > 1, self._before, root)
            tokens = torch.stack([first, root], dim=1)
            causal = torch.ones(1, 2, 2, dtype=torch.bool, device=root.device).tril()
        depths = row_of(tuple(range(count)), root.device)
        hidden = self.model.forward(tokens, Pass(depths=depths, visible=causal), self._cache)
        self._cache.commit(self._next)
        if alike:
            return hidden.last[:, -1]
        return hidden.last[torch.arange(len(root), device=root.device), self._next.there - 1]

    def commit(self, accepted: Accepted) -> None:
        """Keep the accepted drafts that were run, and note which token the cache lacks."""
        drafts = Counts([count - 1 for count in accepted.gained.here], accepted.counts - 1)
        if self.plan.width == 1:
            # `staged` is what the chain has run: all of it lies in order, so nothing is moved.
            # Example: a chain of 4 drafts has run 3, so of 4 accepted drafts 3 are committed, and
            # of 2 both.
            ran, places = self._cache.staged, None
            run = Counts([min(count, ran) for count in drafts.here], drafts.there.clamp(max=ran))
        else:
            # Of a tree only the device knows whether the deepest accepted node was run. Without
            # that and the root, which was committed before: of the path 0, 2, 5 the slot of node 2
            # is committed. Shorter paths are cut by their own counts. They are padded with the
            # root, whose slot is -1, and nothing of that is kept.
            places = self._slots.gather(1, accepted.path[:, 1:-1])
            run = Counts(
                [max(count - 1, 0) for count in drafts.here], (drafts.there - 1).clamp(min=0)
            )
        self._cache.commit(run, places)
        # The new root, and what the cache then lacks.
        next_here = [1 + count - kept for count, kept in zip(drafts.here, run.here, strict=True)]
        self._next = Counts(next_here, drafts.there - run.there + 1)
        # `ids` begins with the old root, so that its last entry is the token before the new root
        # even where no draft was accepted.
        self._before = accepted.ids.gather(1, accepted.counts[:, None] - 1)[:, 0]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        index = send(rows, self._device)
        self._before, self._next = self._before[index], self._next.keep(rows, index)
        # The next drafts may have been made already.
        self._slots = self._slots[index] if self._slots.dim() > 1 else self._slots


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Return logits `[..., size]` over the target's vocabulary, which has `size` tokens.

    Padding rows of the drafter's head are cut. Tokens that it lacks get minus infinity, so that
    they are never drafted.
    """
    if logits.shape[-1] < size:
        missing = logits.new_full((*logits.shape[:-1], size - logits.shape[-1]), -torch.inf)
        logits = torch.cat([logits, missing], dim=-1)
    return logits[..., :size]


def make_proposer(artifact: Artifact, settings: TreeSettings = DEFAULT_TREE) -> DraftModelProposer:
    """Return the proposer of a trained draft model. Raises `UserError`."""
    return on_model(artifact.drafter, settings)


def load_draft_model(
    folder: str, target: TargetSource, settings: TreeSettings = DEFAULT_TREE
) -> DraftModelProposer:
    """Return the proposer of the model in `folder` for `target`.

    Raises `UserError` if it does not share the target's tokenizer, or cannot run trees.
    """
    drafter = DraftModel.load(Path(folder), target.dtype, target.embedding_and_head)
    drafter.model.to(target.device)
    proposer = on_model(drafter, settings)
    proposer.prepare_weights(isinstance(target, Target) and target.reference)
    return proposer


def on_model(drafter: DraftModel, settings: TreeSettings) -> DraftModelProposer:
    """Return the proposer of a loaded draft model. Raises `UserError` if it cannot run trees."""
    runner = CausalModel(drafter.model, drafter.tokenizer, "the draft model", frozen=False)
    runner.check_tree()
    known = min(drafter.added) if drafter.added else None
    stand_in = drafter.placeholder if drafter.added else 0
    return DraftModelProposer(runner, drafter.vocab_size, settings, known, stand_in)


KIND = Kind(make_proposer, tree=TREE_SETTINGS, chains=True)
MODEL_FOLDER = replace(KIND, make=load_draft_model, trained=False)
"""Draft model in a Hugging Face folder: any causal language model with the target's tokenizer."""
