"""A trained drafter whose drafts give way to looked-up ones where the text repeats itself.

Where the last tokens occurred before, the tokens that followed them are mostly right for longer
than any trained drafter is; elsewhere a lookup finds nothing, and the drafter drafts.

Shapes: B rows of a batch, A positions, N tree nodes with the root.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..device import send
from ..proposer import Accepted, Prompts, Proposer
from ..sampling import Draws
from ..targets.causal_model import Hidden
from ..tree import NO_NODE, DraftTree
from ..tree_settings import positive
from .ngram import NgramLookup

LOOKUP_SETTINGS = ("lookup", "lookup_length")
DEFAULT_LENGTH = 8


class WithLookup:
    """Proposer of a drafter's trees, in place of which rows get chains that were looked up.

    The last `lookup` tokens of a row are looked up, and at most `lookup_length` tokens drafted.
    The drafter has to be one whose state depends on what was accepted alone and not on its own last
    tree: it does not draft in rounds in which every row has a chain, and is told of what they
    accepted before it drafts again.

    What is looked up depends on the text alone, so every acceptance rule stays lossless.
    """

    static = False

    def __init__(self, drafter: Proposer, lookup: int, lookup_length: int = DEFAULT_LENGTH) -> None:
        """Put a lookup beside a drafter. Raises `UserError` for settings out of range."""
        positive("lookup", lookup)
        self.drafter = drafter
        self._lookup = NgramLookup(positive("lookup_length", lookup_length), lookup, lookup)
        self.name, self.taps = drafter.name, drafter.taps
        self.max_drafted = max(drafter.max_drafted, lookup_length)
        # A drafter takes the prompt's features when it first drafts, and with a static cache as
        # many new positions in every round. So it may miss a round only after and without these.
        self._may_wait = self._static = False
        self._untold: Accepted | None = None

    def __copy__(self) -> WithLookup:
        """Return a proposer for another batch: both parts have a state for each row."""
        twin = object.__new__(WithLookup)
        vars(twin).update(vars(self))
        twin.drafter, twin._lookup = copy.copy(self.drafter), copy.copy(self._lookup)
        return twin

    def prefill(self, prompts: Prompts) -> None:
        self.drafter.prefill(prompts)
        self._lookup.prefill(prompts)
        self._may_wait, self._static, self._untold = False, prompts.cache.static, None

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the drafter's trees, with a chain in place of the tree of every row that has one.

        Beside rows with a tree, chains are cut to its number of nodes, so that the pass of the
        batch costs no more. Where the rule compares distributions, which chains have none of, the
        rows of a batch get all chains or all trees.
        """
        found = self._lookup.guesses()
        if self._may_wait and all(found):
            return self._lookup.chains(root, found)
        if self._untold is not None:
            self.drafter.commit(self._untold)
            self._untold = None
        tree = self.drafter.propose(root, draws)
        self._may_wait = not self._static
        if all(found):
            return self._lookup.chains(root, found)
        if not any(found) or tree.probs is not None:
            return tree
        return replaced(tree, found)

    def commit(self, accepted: Accepted) -> None:
        self._lookup.commit(accepted)
        if self._untold is not None:
            accepted = joined(self._untold, accepted)
        self._untold = accepted

    def keep(self, rows: list[int]) -> None:
        self.drafter.keep(rows)
        self._lookup.keep(rows)
        if self._untold is not None:
            self._untold = of_rows(self._untold, rows)

    def finish(self) -> None:
        self.drafter.finish()
        self._lookup.finish()
        self._untold = None


def joined(first: Accepted, second: Accepted) -> Accepted:
    """Return two rounds as one, in which the positions of both were accepted.

    Example, one row: two positions `a b` and then one `c`, each padded to a width of three, are
    `a b c`. Nodes and paths are those of a chain, since two trees have none in common.
    """
    lengths = [(len(a), len(b)) for a, b in zip(first.nodes, second.nodes, strict=True)]
    width, behind = max(a + b for a, b in lengths), first.ids.shape[1]
    # For each row the columns of both rounds side by side, filled up with the first.
    columns = [[*range(a), *range(behind, behind + b), *[0] * (width - a - b)] for a, b in lengths]
    device = first.ids.device
    index = send(columns, device)

    def taken(a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat([a, b], dim=1)
        return both.gather(
            1,
            index.view(*index.shape, *[1] * (both.dim() - 2)).expand(*index.shape, *both.shape[2:]),
        )

    return Accepted(
        tokens=[a + b for a, b in zip(first.tokens, second.tokens, strict=True)],
        nodes=[list(range(a + b)) for a, b in lengths],
        path=torch.arange(width, device=device).expand(len(lengths), -1),
        ids=taken(first.ids, second.ids),
        counts=first.counts + second.counts,
        hidden=Hidden(
            taken(first.hidden.last, second.hidden.last),
            tuple(map(taken, first.hidden.taps, second.hidden.taps)),
        ),
    )


def of_rows(accepted: Accepted, rows: list[int]) -> Accepted:
    """Return what was accepted in the batch rows `rows` alone, as wide as the longest of them."""
    nodes = [accepted.nodes[row] for row in rows]
    width, index = max(map(len, nodes)), send(rows, accepted.ids.device)
    return Accepted(
        tokens=[accepted.tokens[row] for row in rows],
        nodes=nodes,
        path=accepted.path[index, :width],
        ids=accepted.ids[index, :width],
        counts=accepted.counts[index],
        hidden=Hidden(
            accepted.hidden.last[index, :width],
            tuple(tap[index, :width] for tap in accepted.hidden.taps),
        ),
    )


def replaced(tree: DraftTree, chains: list[list[int]]) -> DraftTree:
    """Return `tree` with chains in place of the trees of rows that have one, as many nodes wide.

    Example, one row: the parents 0 0 0 1 of a tree and the chain 7 8 give the parents 0 0 1 0 and
    the tokens root 7 8 NO_NODE: a missing node hangs on the root.
    """
    tokens, nodes = tree.tokens.clone(), tree.nodes
    parents = tree.tables.parents.expand(tokens.shape).clone()
    longest = 0
    for row, whole in enumerate(chains):
        if chain := whole[: nodes - 1]:
            longest = max(longest, len(chain))
            missing = [0] * (nodes - 1 - len(chain))
            tokens[row, 1:] = tokens.new_tensor(chain + [NO_NODE] * len(missing))
            parents[row] = parents.new_tensor([0, *range(len(chain)), *missing])
    if tree.shape is not None and tree.shape.is_chain:
        return DraftTree(tokens, tree.shape, informed=tree.informed)
    levels = max(tree.levels, longest)
    return DraftTree(tokens, parents=parents, levels=levels, informed=tree.informed)


def with_lookup(proposer: Proposer, settings: dict[str, int], drafter: str) -> WithLookup:
    """Return a proposer with a lookup of a user's settings beside it. Raises `UserError`.

    `settings` are those of `LOOKUP_SETTINGS` that were given, `drafter` is the name in messages.
    """
    if "lookup" not in settings:
        raise UserError(
            f"drafter {drafter}: lookup_length is the length of a looked-up chain; give lookup "
            "too, the number of last tokens that must have occurred before: lookup=4"
        )
    return WithLookup(proposer, **settings)
