"""A trained drafter, and a lookup that replaces its drafts.

Where the last tokens of the text were in it before, the tokens that followed them there may be
drafted; elsewhere the drafter drafts. A text that repeats itself mostly does so for more tokens
than a trained drafter predicts. Which of the two drafts is chosen for each row and round by what
both have given in this text. Whichever drafts, the text shows later how many tokens a lookup
would have had right, so that every lookup is counted, used or not. A tree is counted where it was
used.

Shapes: B rows of a batch, A positions, N tree nodes with the root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from ..base.tree_settings import positive
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree
from .contract import Accepted, Prompts, Proposer, StaticProposer
from .ngram import LookupProposer, Ngrams, copy_from

DEFAULT_LENGTH = 8
LONGEST_MATCH = 16
"""Tokens of a match that are counted: longer matches are as good."""
MARGIN = 1.15
"""Least ratio of a lookup's tokens to those of a round with a tree: trained drafters copy too, so
that they draft better than on average where the text repeats, which is where there is a lookup."""
PRIOR_ROUNDS = 3
"""Rounds that the held-out tokens of a drafter count for."""
WINDOW_ROUNDS = 8
"""Rounds of the running means: a new one has at least a share of 1 / WINDOW_ROUNDS."""


@dataclass
class RunningMean:
    """Running mean of the tokens of a round, the latest rounds first."""

    value: float
    """Infinite before the first round, where nothing is known."""
    rounds: int = 0
    """Rounds that the value counts for."""

    def add(self, tokens: int) -> None:
        self.rounds += 1
        if self.rounds == 1:
            self.value = float(tokens)
        else:
            self.value += (tokens - self.value) / min(self.rounds, WINDOW_ROUNDS)


def prior_of_lookups() -> list[RunningMean]:
    """Return the means of lookups after a match of 1, 2 to 3, 4 to 7, 8 to 15, 16 tokens and more.

    Nothing is known of a text yet, so a copy is expected to continue for half as long as it has
    lasted, like anything whose end is not known. That counts for one round.
    """
    return [RunningMean(1 + 2**kind / 2, 1) for kind in range(LONGEST_MATCH.bit_length())]


@dataclass
class PendingLookup:
    """Looked-up chain of which the text has not shown yet how much is right."""

    kind: int
    chain: list[int]
    right: int = 0

    def compare(self, tokens: list[int]) -> int | None:
        """Compare the chain with the tokens that follow; return its right tokens once known."""
        for token in tokens:
            if self.chain[self.right] != token:
                return self.right
            self.right += 1
            if self.right == len(self.chain):
                return self.right
        return None


@dataclass
class DraftSourceSelector(Ngrams):
    """Text of one row, and which drafts are better at its end.

    There is a lookup where the last `shortest` tokens occurred before; its match is what the
    text's end has in common with the latest such place.
    """

    shortest: int
    prior: float | None = None
    """Tokens of a round with a tree on held-out texts; None where they are not known: a row's first
    round then has a tree, which is counted."""
    lookups: list[RunningMean] = field(default_factory=prior_of_lookups)
    _pending: list[PendingLookup] = field(default_factory=list)
    _drafted: bool | None = None
    """True after a round with a tree, False after one with a lookup, None before the first."""

    def __post_init__(self) -> None:
        prior, rounds = (math.inf, 0) if self.prior is None else (self.prior, PRIOR_ROUNDS)
        self.trees = RunningMean(prior, rounds)
        super().__init__(self.shortest, self.shortest)

    def extend(self, tokens: list[int]) -> None:
        """Append the tokens of a round, or at first the prompt, to the text."""
        if self._drafted:
            self.trees.add(len(tokens))
        remaining = []
        for chain in self._pending:
            right = chain.compare(tokens)
            if right is None:
                remaining.append(chain)
            else:
                self.lookups[chain.kind].add(right + 1)
        self._pending = remaining
        super().extend(tokens)

    def guess(self, length: int) -> list[int]:
        """Return the `length` tokens of a lookup if it is the better source, else none."""
        self._drafted = True
        place = self.place()
        if place is None:
            return []
        kind = self.match(place).bit_length() - 1
        chain = copy_from(self.text, place, length)
        self._pending.append(PendingLookup(kind, chain))
        if self.lookups[kind].value <= MARGIN * self.trees.value:
            return []
        self._drafted = False
        return chain

    def match(self, place: int) -> int:
        """Return the tokens before `place` that are those at the text's end."""
        text, most = self.text, min(place, LONGEST_MATCH)
        for same in range(self.shortest, most):
            if text[place - 1 - same] != text[-1 - same]:
                return same
        return most


class WithLookup(StaticProposer):
    """Proposer of a drafter's trees, and of looked-up chains in their place.

    The last `lookup` tokens of a row are looked up, and `lookup_length` tokens drafted at most. The
    state of the drafter has to depend on what was accepted alone, and not on its own last tree. It
    does not run in a round in which every row has a chain; what such rounds accepted is committed
    before it drafts again.

    Trees with probabilities are never replaced. The rules that use them would decide a chain by
    other noise than a tree, so that a text would depend on the other rows of its batch. All other
    rules choose the same text for any drafts, or for each row by itself.
    """

    def __init__(
        self,
        trained: Proposer,
        lookup: int,
        lookup_length: int = DEFAULT_LENGTH,
        prior: float | None = None,
    ) -> None:
        """Put a lookup with `trained`. Raises `UserError` for settings out of range.

        `prior`: tokens of a round of `trained` on held-out texts, if known.
        """
        new_index = partial(DraftSourceSelector, positive("lookup", lookup), prior)
        self.trained = trained
        self._lookup = LookupProposer(positive("lookup_length", lookup_length), new_index)
        self.name, self.taps = trained.name, trained.taps
        self.max_drafted = max(trained.max_drafted, lookup_length)
        # A drafter takes the prompt's features when it first drafts, and with a cache of fixed
        # shapes as many new positions in every round: so it has to draft in the first round, or in
        # all.
        self._can_skip = self._in_all = False
        self._pending: list[Accepted] = []
        self._idle: set[int] = set()

    @property
    def weight_bytes(self) -> int:
        return self.trained.weight_bytes

    def clone(self) -> Self:
        clone = super().clone()
        # Both parts have a state for each row.
        clone.trained, clone._lookup = self.trained.clone(), self._lookup.clone()
        return clone

    def prefill(self, prompts: Prompts) -> None:
        self.trained.prefill(prompts)
        self._lookup.prefill(prompts)
        self._can_skip, self._in_all, self._pending = False, prompts.cache.static, []
        self._idle = set()

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the drafter's trees, with a chain in place of the tree of every row that has one.

        Next to rows with a tree, chains are cut to its number of nodes, so that the pass of the
        batch costs no more.
        """
        found = self._lookup.guesses()
        everywhere = all(guess or row in self._idle for row, guess in enumerate(found))
        if not (self._can_skip and everywhere):
            if self._pending:
                self.trained.commit(Accepted.joined(self._pending))
                self._pending = []
            tree = self.trained.propose(root, draws)
            self._can_skip = tree.probs is None and not self._in_all
            if tree.probs is not None or not any(found):
                return tree
            if not everywhere:
                return replaced(tree, found)
        return self._lookup.chains(root, found)

    def commit(self, accepted: Accepted) -> None:
        self._lookup.commit(accepted)
        self._pending.append(accepted)

    def keep(self, rows: list[int]) -> None:
        self.trained.keep(rows)
        self._lookup.keep(rows)
        self._pending = [accepted.keep(rows) for accepted in self._pending]

    def stop(self, rows: list[int]) -> None:
        self._lookup.stop(rows)
        self._idle |= {*rows}

    def finish(self) -> None:
        self.trained.finish()
        self._lookup.finish()
        self._pending = []


def replaced(tree: DraftTree, chains: list[list[int]]) -> DraftTree:
    """Return `tree` with chains in place of the trees of rows that have one, as many nodes wide.

    Example, one row: the parents 0 0 0 1 of a tree and the chain 7 8 give the parents 0 0 1 0 and
    the tokens root 7 8 NO_NODE: a missing node hangs on the root.
    """
    drafts = tree.nodes - 1
    tokens: list[list[int]] = []
    parents: list[list[int]] = []  # -1 where those of the tree stay
    for whole in chains:
        chain = whole[:drafts]
        missing = drafts - len(chain)
        tokens.append([NO_NODE, *chain, *[NO_NODE] * missing])
        parents.append([-1, *(range(len(chain)) if chain else []), *[0 if chain else -1] * missing])
    new_tokens, new_parents = (send(rows, tree.tokens.device) for rows in (tokens, parents))
    new = new_parents >= 0
    named = torch.where(new, new_tokens, tree.tokens)
    if tree.shape is not None and tree.shape.is_chain:
        return DraftTree(named, tree.shape)
    levels = max(tree.levels, *(min(len(chain), drafts) for chain in chains))
    return DraftTree(
        named, parents=torch.where(new, new_parents, tree.tables.parents), levels=levels
    )
