"""Replay at every root of known texts: acceptance for all trees at once, without verifying any.

The texts are the target's own, so the next tokens are known; the features of a whole text come from
one forward pass. Drafts at a root depend on the text before it only, so that one pass over all
roots shows what any number of tree sizes would accept, and `replay` picks the roots that decoding
with each of them visits.

Shapes: B rows of a batch, which are texts replayed together; S positions of the longest of them; N
tree nodes with the root; D levels; H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ...decode import Generation
from ...proposer import Accepted, Prompts, Proposer
from ...proposers.growth import Continue, Level
from ...replay import UNKNOWN, rank_of
from ...rounds.cache import TreeCache
from ...rounds.noise import row_keys
from ...rounds.sampling import Draws
from ...rounds.tree import DraftTree, TreeShape
from ...settings import Sampling
from ...targets.causal_model import Hidden
from ...targets.masks import with_replies
from ...targets.target import Target

NEVER = 1 << 20
"""Number of nodes needed for a draft that is not among the candidates at all: more than any tree
has."""
BEST = 10
"""Ranks that are counted apart; all worse ones count as this rank."""


@dataclass
class KnownText:
    """Reply of the target, and the noise that it was sampled with."""

    ids: list[int]
    start: int
    """Position where the reply begins: its first root."""
    request: tuple[int, int]
    """Id and sample of the request."""

    @classmethod
    def of(cls, generation: Generation, request: tuple[int, int]) -> KnownText:
        """Return a decoded reply as a known text."""
        ids = generation.prompt_ids + generation.token_ids
        return cls(ids, len(generation.prompt_ids), request)

    def begin(self, roots: int) -> KnownText:
        """Return the text up to its first `roots` roots."""
        # The token after the last root is needed too: two roots from position 4 are 4 and 5, and 6
        # is the last token.
        return KnownText(self.ids[: self.start + roots + 1], self.start, self.request)

    @property
    def roots(self) -> range:
        """Positions that have a next token to draft."""
        return range(self.start, len(self.ids) - 1)


class KnownTexts:
    """Replies of `target`, and its states at their positions, which all replays share."""

    def __init__(self, target: Target, texts: Sequence[KnownText]) -> None:
        self.target, self.texts = target, list(texts)
        longest = max((len(text.ids) for text in texts), default=0)
        padded = [text.ids + [0] * (longest - len(text.ids)) for text in texts]
        self.ids = torch.tensor(padded, device=target.device)
        """The whole texts `[texts, S]`. Padding comes after each, so that no token sees it."""
        self._states: dict[tuple[int, ...], Hidden] = {}  # of the last taps; shared with `begin`

    def begin(self, roots: int) -> KnownTexts:
        """Return the texts up to their first `roots` roots; they share the states."""
        begun = copy(self)
        begun.texts = [text.begin(roots) for text in self.texts]
        return begun

    def states(self, taps: tuple[int, ...]) -> Hidden:
        """Return the states at all positions of `ids`, those of the layers `taps` too.

        Those of the last `taps` are kept until `forget`.
        """
        if taps not in self._states:
            self.forget()  # before the new ones need their memory
            with torch.inference_mode():
                layout = with_replies([text.start for text in self.texts], self.ids.shape[1])
                self._states[taps] = self.target.forward(self.ids, layout, taps=taps)
        return self._states[taps]

    def forget(self) -> None:
        """Free the states."""
        self._states.clear()


@torch.inference_mode()
def replay_roots(
    known: KnownTexts, proposer: Proposer, sampling: Sampling
) -> Iterator[tuple[list[int], DraftTree, Tensor]]:
    """Yield for one root of `known` after another the drafted trees, and what really follows.

    Each item has the indices of the texts that still run, the trees at their roots, and the tokens
    `[B, D]` after these. The proposer is fed as by a decode loop in which nothing is accepted. It
    may read features and its own cache.
    """
    texts, device = known.texts, known.target.device
    lengths = torch.tensor([len(text.ids) for text in texts], device=device)
    longest = int(lengths.max())
    ids = known.ids[:, :longest]
    hidden = known.states(proposer.taps)
    rows = [row for row, text in enumerate(texts) if text.roots]
    roots = torch.tensor([texts[row].start for row in rows], device=device)
    proposer.prefill(_prompts(texts, rows, ids, roots, hidden))
    keys = row_keys(sampling.seed, [texts[row].request for row in rows], device)
    draws = Draws(sampling, keys, _text_before(ids[rows], roots, longest), roots)
    try:
        while rows:
            index = torch.tensor(rows, device=device)
            root_ids = ids[index, roots]
            plan = getattr(proposer, "plan", None)
            if isinstance(plan, KnownPath):
                plan.following = _following(ids[index], lengths[index], roots, plan.length)
            tree = proposer.propose(root_ids, draws)
            yield rows, tree, _following(ids[index], lengths[index], roots, tree.levels)

            roots = roots + 1
            _commit_root(proposer, texts, rows, root_ids, roots, hidden, index)
            draws.reserve(longest)
            # The root is now a part of the text before the next root.
            draws.extend(root_ids[:, None], torch.ones_like(roots))
            going = [n for n, row in enumerate(rows) if int(roots[n]) in texts[row].roots]
            if len(going) < len(rows):
                rows = [rows[number] for number in going]
                if going:
                    still = torch.tensor(going, device=device)
                    draws.keep(still)
                    proposer.keep(going)
                    roots = roots[still]
    finally:
        proposer.finish()


def _prompts(
    texts: Sequence[KnownText], rows: list[int], ids: Tensor, roots: Tensor, hidden: Hidden
) -> Prompts:
    """Return the texts before their first roots, as the proposer gets prompts."""
    longest = int(roots.max())
    return Prompts(
        tokens=[texts[row].ids[: texts[row].start + 1] for row in rows],
        ids=ids[rows, :longest],
        lengths=roots,
        hidden=hidden.map(lambda states: states[rows, :longest]),
        # empty: drafters that work in the target's cache are not replayed
        cache=TreeCache(0, 0),
    )


def _text_before(ids: Tensor, roots: Tensor, longest: int) -> Tensor:
    """Return the texts `[B, S]` up to their roots `[B]`, as `Draws` takes them.

    They are padded with their own first tokens, which a penalty counts in any case.
    """
    positions = torch.arange(longest, device=ids.device)
    return torch.where(positions < roots[:, None], ids, ids[:, :1])


def _following(ids: Tensor, lengths: Tensor, roots: Tensor, levels: int) -> Tensor:
    """Return the tokens `[B, D]` after each root, D being `levels`.

    Past a text's end they are `UNKNOWN`, which no draft equals.
    """
    positions = roots[:, None] + torch.arange(1, levels + 1, device=ids.device)
    tokens = ids.gather(1, positions.clamp(max=ids.shape[1] - 1))
    return torch.where(positions < lengths[:, None], tokens, UNKNOWN)


def _commit_root(
    proposer: Proposer,
    texts: Sequence[KnownText],
    rows: list[int],
    root_ids: Tensor,
    next_roots: Tensor,
    hidden: Hidden,
    index: Tensor,
) -> None:
    """Commit a round in which nothing was accepted and the bonus token is the text's own."""
    bonus = [[texts[row].ids[at]] for row, at in zip(rows, next_roots.tolist(), strict=True)]
    proposer.commit(
        Accepted(
            tokens=bonus,
            nodes=[[0]] * len(rows),
            path=torch.zeros(len(rows), 1, dtype=torch.long, device=root_ids.device),
            ids=root_ids[:, None],
            counts=torch.ones_like(next_roots),
            hidden=hidden.map(lambda states: states[index, next_roots - 1][:, None]),
        )
    )


def nodes_needed(tree: DraftTree, following: Tensor) -> list[Tensor]:
    """Return how many nodes a tree needs to hold the path that follows, down to each depth.

    The list has an entry `[B, l]` for trees of l levels, l = 1 .. D; it is `NEVER` where no
    candidate is right. `tree` holds all candidates with their `scores`: the tree of l levels and n
    nodes is the best n of those at most l deep, of equals the earlier (`growth.grow_dynamic`).
    Along a path scores fall, so the needed number rises.
    """
    assert tree.scores is not None, "only trees chosen by scores can be cut"
    tables = tree.tables
    depths = tables.depths.expand_as(tree.tokens)
    parents = tables.parents.expand_as(tree.tokens)
    exists = tree.tokens >= 0
    # Column d - 1 of `following` is the token of depth d. The root, of depth 0, is set right below.
    right = exists & (tree.tokens == following.gather(1, (depths - 1).clamp(min=0)))
    right[:, 0] = True
    levels = following.shape[1]
    # After l passes a node is right only if its l nearest ancestors are right too.
    for _ in range(levels):
        right = right & right.gather(1, parents)
    order = torch.arange(tree.nodes, device=tree.tokens.device)
    # The right node of each depth; 0, the root, where there is none.
    path = [torch.where(right & (depths == d), order, 0).amax(1) for d in range(1, levels + 1)]
    needed_by_limit = []
    for limit in range(1, levels + 1):
        in_tree = exists & (depths <= limit) & (depths > 0)
        needed = []
        for node in path[:limit]:
            score = tree.scores.gather(1, node[:, None])
            # Nodes that are taken before this one.
            before = (tree.scores > score) | ((tree.scores == score) & (order < node[:, None]))
            needed.append(torch.where(node > 0, (in_tree & before).sum(1) + 1, NEVER))
        needed_by_limit.append(torch.stack(needed, dim=1))
    return needed_by_limit


class KnownPath:
    """`Planner` that drafts the text that follows, and notes each true token's rank.

    It runs one node on each level. The ranks tell what fixed shapes and chains of any length
    accept.
    """

    threshold = 0.0
    width = 1

    def __init__(self, length: int) -> None:
        self.length = self.nodes = self.expanded = length
        self.ranks: Tensor
        """[B, length]: rank of the true token among the `BEST` likeliest; `BEST` where it is not
        among them."""
        self.following: Tensor
        """[B, length], to be set before each `draft`."""

    def draft(
        self, first: Tensor, root: Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, Tensor]:
        """Return the chain of the true tokens, and set `ranks`; see `Planner.draft`."""
        logits, ranks = first[:, None], []
        path = root[:, None]
        above = torch.zeros_like(path)
        for depth in range(self.length):
            token = self.following[:, depth : depth + 1]
            best, _ = draws.rank(logits, depth, BEST, path[:, None])
            ranks.append(rank_of(token[:, 0], best[:, 0], BEST))
            token = token.clamp(min=0)  # past the text's end: any token, its rank does not count
            path = torch.cat([path, token], dim=1)
            if depth + 1 < self.length:
                logits = go_on(Level(token, above, None, depth + 1))
        self.ranks = torch.stack(ranks, dim=1)
        return DraftTree(path, TreeShape.chain(self.length)), first.new_zeros(0)
