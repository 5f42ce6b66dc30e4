"""Two drafters of one's own, to copy and change; docs/your-own-drafter.md explains them.

    draftsmith evaluate --target scripts/quickstart/target --drafter scripts.my_drafter:LastSeen \
        --drafter scripts.my_drafter:OneMore --prompts PROMPTS.jsonl
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith import Proposer
from draftsmith.inference.proposers.contract import Accepted, Prompts
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import NO_NODE, DraftTree, TreeShape
from draftsmith.inference.targets.target import Target


class LastSeen(Proposer):
    """Drafts a chain: what followed the root where it stood before in the text, if it did."""

    def __init__(self, length: int = 4) -> None:
        self.max_drafted = length
        self._texts: list[list[int]] = []

    def prefill(self, prompts: Prompts) -> None:
        """Start on a batch; each row is a prompt and the first token of its reply, the root."""
        self._texts = [list(tokens) for tokens in prompts.tokens]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return a chain for each row; a row that drafts fewer tokens has missing nodes."""
        guesses = [guess(text, self.max_drafted) for text in self._texts]
        longest = max(map(len, guesses))
        padded = [tokens + [NO_NODE] * (longest - len(tokens)) for tokens in guesses]
        drafts = torch.tensor(padded, dtype=root.dtype, device=root.device)
        tokens = torch.cat([root[:, None], drafts.view(len(root), longest)], dim=1)
        return DraftTree(tokens, TreeShape.chain(longest))

    def commit(self, accepted: Accepted) -> None:
        """Take over the accepted drafts of each row, and the target's own token after them."""
        for text, tokens in zip(self._texts, accepted.tokens, strict=True):
            text += tokens

    def keep(self, rows: list[int]) -> None:
        """Keep these rows; the others have finished."""
        self._texts = [self._texts[row] for row in rows]


def guess(text: list[int], length: int) -> list[int]:
    """Return at most `length` tokens that followed the last token earlier in the text."""
    for place in range(len(text) - 2, -1, -1):
        if text[place] == text[-1]:
            return text[place + 1 : place + 1 + length]
    return []


class OneMore(Proposer):
    """Drafts one token from the target's newest hidden state, by a matrix of its own.

    `file` is a safetensors file with `weight` `[H, H]`, which you have trained; without it the
    matrix is the identity, which drafts the root once more.
    """

    max_drafted = 1

    def __init__(self, target: Target, file: str = "") -> None:
        size = target.hidden_size
        weight = load_file(file)["weight"] if file else torch.eye(size)
        self._weight = weight.to(target.device, target.dtype)
        self._target = target
        self._state: Tensor

    def prefill(self, prompts: Prompts) -> None:
        rows = torch.arange(len(prompts.lengths), device=prompts.lengths.device)
        # [B, H]: the target has not run the root, so its newest state is one position before it.
        self._state = prompts.hidden.last[rows, prompts.lengths - 1]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        logits = self._target.head(self._state @ self._weight.T)
        # Chosen with the target's noise, as draftsmith's own drafters do at a temperature.
        draft = draws.guess(logits[:, None], 0, None)[:, 0]
        return DraftTree(torch.stack([root, draft], dim=1), TreeShape.chain(1))

    def commit(self, accepted: Accepted) -> None:
        rows = torch.arange(len(accepted.counts), device=accepted.counts.device)
        self._state = accepted.hidden.last[rows, accepted.counts - 1]

    def keep(self, rows: list[int]) -> None:
        self._state = self._state[torch.tensor(rows, device=self._state.device)]
