"""A trained drafter, and a lookup that replaces its drafts.

Where the last tokens of the text were in it before, the tokens that followed them there may be
drafted; elsewhere the drafter drafts. A text that repeats itself mostly does so for more tokens
than a trained drafter predicts. Which of the two drafts is chosen for each row and round by what
both have given in this text (`better_source.py`).

Shapes: B rows of a batch, A positions, N tree nodes with the root.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from ..proposer import Accepted, Prompts, Proposer
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree
from ..tree_settings import positive
from .better_source import BetterSource
from .ngram import LookupProposer

DEFAULT_LENGTH = 8


class WithLookup(Proposer):
    """Proposer of a drafter's trees, and of looked-up chains in their place.

    The last `lookup` tokens of a row are looked up, and `lookup_length` tokens drafted at most. The
    state of the drafter has to depend on what was accepted alone, and not on its own last tree. It
    does not run in a round in which every row has a chain; what such rounds accepted is committed
    before it drafts again.

    Trees with probabilities are never replaced. The rules that use them would decide a chain by
    other noise than a tree, so that a text would depend on the other rows of its batch. All other
    rules choose the same text whatever is drafted, or for each row by itself.
    """

    def __init__(self, trained: Proposer, lookup: int, lookup_length: int = DEFAULT_LENGTH) -> None:
        """Put a lookup with `trained`. Raises `UserError` for settings out of range."""
        new_index = partial(BetterSource, positive("lookup", lookup))
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

    def __copy__(self) -> WithLookup:
        """Return a proposer for another batch: both parts have a state for each row."""
        twin = object.__new__(WithLookup)
        vars(twin).update(vars(self))
        twin.trained, twin._lookup = copy.copy(self.trained), copy.copy(self._lookup)
        return twin

    def prefill(self, prompts: Prompts) -> None:
        self.trained.prefill(prompts)
        self._lookup.prefill(prompts)
        self._can_skip, self._in_all, self._pending = False, prompts.cache.fixed, []
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
        chains = self._lookup.chains(root, found)
        # Of some rounds only, an expectation would be no figure of the reply.
        chains.informed = None
        return chains

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
