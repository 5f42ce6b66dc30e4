"""A small causal language model of the same tokenizer as drafter (arXiv 2211.17192): it writes a chain or a tree by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads.errors import UserError
from ..heads.fingerprint import tokenizer_hash
from .autoregressive import TreePlan, TreeRunner, commit_walk, depth_row, fit_vocabulary
from .cache import TreeCache
from .device import send
from .proposer import Accepted, Prompts
from .sampling import Draws
from .target import Target, TargetConfig, load_target
from .tree import DraftTree

DEFAULT_LENGTH = 4


class DraftLM:
    """Its cache holds the decided text; the one token that a fully accepted draft leaves unseen is fed with the next root."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Target, vocab_size: int, length: int = DEFAULT_LENGTH, width: int = 1, nodes: int | None = None
    ) -> None:
        self.name = "draft-lm"
        self.model, self._vocab_size = model, vocab_size
        self.plan = TreePlan(length, width, nodes)
        self.max_drafted = self.plan.nodes
        self._cache = TreeCache(0, 0)
        self._before: Tensor  # [B], the token before the root
        self._slots: Tensor

    def prefill(self, prompts: Prompts) -> None:
        batch, length = prompts.ids.shape
        longest = self.model.max_positions
        self._cache = TreeCache(batch, min(2 * length + 64, longest) + self.max_drafted, self.model.device)
        self.model.prefill(prompts.ids.clamp(max=self.model.vocab_size - 1), self._cache)  # its vocabulary may be smaller
        self._cache.lengths = [len(tokens) - 1 for tokens in prompts.tokens]
        self._before = prompts.ids.gather(1, prompts.lengths[:, None] - 1)[:, 0]
        self._behind = False  # whether some row's cache ends before the token before the root
        self._text_lengths = list(self._cache.lengths)

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        first = fit_vocabulary(self.model.head(self._catch_up(root)), self._vocab_size)
        go_on = TreeRunner(self.model, self._cache, self._vocab_size)
        tree, self._slots = self.plan.draft(first, root, draws, go_on)
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the root, behind the token before it where a row has not seen that one, and give the root's feature `[B, H]`.

        A row that has seen it writes the same values once more, so all rows take one forward of one shape.
        """
        tokens = torch.stack([self._before, root], dim=1) if self._behind else root[:, None]
        count = tokens.shape[1]
        self._cache.lengths = [length + 1 - count for length in self._text_lengths]
        depths = depth_row(tuple(range(count)), root.device)
        causal = None if count == 1 else torch.ones(1, count, count, dtype=torch.bool, device=root.device).tril()
        hidden = self.model.forward_tree(tokens, causal, depths, depths, self._cache)
        self._cache.commit([count] * len(self._text_lengths))
        return hidden.last[:, -1]

    def commit(self, accepted: Accepted) -> None:
        commit_walk(self._cache, self.plan, self._slots, accepted)
        self._text_lengths = [length + len(nodes) for length, nodes in zip(self._text_lengths, accepted.nodes, strict=True)]
        self._behind = self._cache.lengths != self._text_lengths
        self._before = accepted.ids.gather(1, accepted.counts[:, None] - 1)[:, 0]

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        self._text_lengths = [self._text_lengths[row] for row in rows]
        self._before = self._before[send(rows, self._before.device)]

    def finish(self) -> None:
        self._cache = TreeCache(0, 0)


def load_draft_lm(folder: str, target: Target, length: int = DEFAULT_LENGTH, width: int = 1, nodes: int | None = None) -> DraftLM:
    """The model in `folder` as drafter for `target`. Raises `UserError` if it does not share the target's tokenizer."""
    model = load_target(TargetConfig(folder, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device)))
    ours, theirs = tokenizer_hash(target.tokenizer), tokenizer_hash(model.tokenizer)
    if ours != theirs:
        raise UserError(
            f"draft model {folder} has another tokenizer ({len(model.tokenizer)} tokens, hash {theirs[:12]}) than target "
            f"{target.name} ({len(target.tokenizer)}, {ours[:12]}): its token ids mean other text; use a model of the same family"
        )
    return DraftLM(model, target.vocab_size, length, width, nodes)
