"""What a drafter would get right at every root of known texts: acceptance for all trees at once,
without verifying any.

The texts are the target's own, so the next tokens are known; the features of a whole text come from
one forward. What a drafter drafts at a root depends on the text before it only, never on where
rounds began, so one pass over all roots shows what any number of tree sizes would accept, and
`replay` picks the roots that decoding with each of them visits.

Shapes: B texts replayed together, N tree nodes with the root, D levels, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache import TreeCache
from ...decode import Generation
from ...noise import row_keys
from ...proposer import Accepted, Prompts, Proposer
from ...proposers.growth import Continue, Level
from ...replay import UNKNOWN
from ...sampling import Draws
from ...settings import Sampling
from ...target import Hidden, Target
from ...tree import DraftTree, TreeShape

NEVER = 1 << 20
"""Nodes that a tree would need for a draft that is not among the candidates at all."""
BEST = 10
"""Ranks that are counted apart."""


@dataclass
class KnownText:
    """A reply of the target, and the noise that it was sampled with."""

    ids: list[int]
    start: int
    """Where the reply begins: its first root."""
    request: tuple[int, int]
    """Id and sample of the request."""

    @classmethod
    def of(cls, found: Generation, request: tuple[int, int]) -> KnownText:
        return cls(found.prompt_ids + found.token_ids, len(found.prompt_ids), request)

    def begin(self, roots: int) -> KnownText:
        """Its first `roots` roots."""
        return KnownText(self.ids[: self.start + roots + 1], self.start, self.request)

    @property
    def roots(self) -> range:
        """Positions that have a next token to guess."""
        return range(self.start, len(self.ids) - 1)


@torch.inference_mode()
def replay_roots(
    target: Target, proposer: Proposer, texts: Sequence[KnownText], sampling: Sampling
) -> Iterator[tuple[list[int], DraftTree, Tensor]]:
    """Yield, root by root: the texts still running, the tree drafted at each root, and the tokens
    `[B, D]` that really come.

    The proposer is fed as the decode loop feeds it when nothing is accepted. It may read features
    and its own cache; those that work in the target's cache (early exit) or read its choices
    (lookahead) cannot be replayed.
    """
    device = target.device
    lengths = torch.tensor([len(text.ids) for text in texts], device=device)
    longest = int(lengths.max())
    ids = torch.tensor(
        [text.ids + [0] * (longest - len(text.ids)) for text in texts], device=device
    )
    hidden = target.forward(ids, taps=proposer.taps)
    rows = [row for row, text in enumerate(texts) if text.roots]
    at = torch.tensor([texts[row].start for row in rows], device=device)

    def cut(states):
        return states[rows, : int(at.max())]

    before = Hidden(cut(hidden.last), tuple(map(cut, hidden.taps)))
    proposer.prefill(
        Prompts(
            [texts[row].ids[: texts[row].start + 1] for row in rows],
            cut(ids),
            at,
            before,
            TreeCache(0, 0),
        )
    )
    keys = row_keys(sampling.seed, [texts[row].request for row in rows], device)
    draws = Draws(sampling, keys, _known_text(ids[rows], at, longest), at)
    try:
        while rows:
            index = torch.tensor(rows, device=device)
            root = ids[index, at]
            plan = getattr(proposer, "plan", None)
            if isinstance(plan, KnownPath):
                plan.coming = _coming(ids[index], lengths[index], at, plan.length)
            tree = proposer.propose(root, draws)
            yield rows, tree, _coming(ids[index], lengths[index], at, tree.levels)
            at = at + 1
            going = [place for place, row in enumerate(rows) if int(at[place]) in texts[row].roots]
            _commit_root(proposer, texts, rows, root, at, hidden, index)
            draws.reserve(longest)
            draws.extend(root[:, None], torch.ones_like(at))
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                if going:
                    kept = torch.tensor(going, device=device)
                    draws.keep(kept)
                    proposer.keep(going)
                    at = at[kept]
    finally:
        proposer.finish()


def _known_text(ids: Tensor, at: Tensor, longest: int) -> Tensor:
    """What `Draws` wants of the texts before their roots `at`: at and after those, a token that the
    row holds anyway."""
    places = torch.arange(longest, device=ids.device)
    return torch.where(places < at[:, None], ids, ids[:, :1])


def _coming(ids: Tensor, lengths: Tensor, at: Tensor, levels: int) -> Tensor:
    """The `levels` tokens after each root; past a text's end, what no draft equals."""
    places = at[:, None] + torch.arange(1, levels + 1, device=ids.device)
    return torch.where(
        places < lengths[:, None], ids.gather(1, places.clamp(max=ids.shape[1] - 1)), UNKNOWN
    )


def _commit_root(
    proposer: Proposer,
    texts: Sequence[KnownText],
    rows: list[int],
    root: Tensor,
    at: Tensor,
    hidden: Hidden,
    index: Tensor,
) -> None:
    """Tell the proposer that nothing was accepted, and that the target's own token is the text's;
    `at`: the next roots."""
    there = at - 1

    def here(states):
        return states[index, there][:, None]

    following = [[texts[row].ids[place]] for row, place in zip(rows, at.tolist(), strict=True)]
    nothing = torch.zeros(len(rows), 1, dtype=torch.long, device=root.device)
    own = Hidden(here(hidden.last), tuple(map(here, hidden.taps)))
    proposer.commit(
        Accepted(following, [[0]] * len(rows), nothing, root[:, None], torch.ones_like(at), own)
    )


def nodes_needed(tree: DraftTree, coming: Tensor) -> list[Tensor]:
    """For each number of levels l = 1 .. D, how many nodes `[B, l]` a tree of l levels needs to
    hold the path that comes, to each depth; `NEVER` where no candidate is right.

    `tree` holds the whole pool of candidates with its `scores`: the tree of l levels and n nodes is
    the best n of those at most l deep, of equals the earlier (`growth.grow_dynamic`). Along a path
    scores fall, so the needed number rises.
    """
    assert tree.scores is not None, "only trees chosen by scores can be cut"
    tables = tree.tables
    depths = tables.depths.expand_as(tree.tokens)
    parents = tables.parents.expand_as(tree.tokens)
    there = tree.tokens >= 0
    right = there & (tree.tokens == coming.gather(1, (depths - 1).clamp(min=0)))
    right[:, 0] = True
    levels = coming.shape[1]
    for _ in range(levels):  # right with all its ancestors
        right = right & right.gather(1, parents)
    order = torch.arange(tree.nodes, device=tree.tokens.device)
    # 0: none
    path = [torch.where(right & (depths == d), order, 0).amax(1) for d in range(1, levels + 1)]
    found = []
    for limit in range(1, levels + 1):
        among = there & (depths <= limit) & (depths > 0)
        needed = []
        for node in path[:limit]:
            own = tree.scores.gather(1, node[:, None])
            before = (tree.scores > own) | ((tree.scores == own) & (order < node[:, None]))
            needed.append(torch.where(node > 0, (among & before).sum(1) + 1, NEVER))
        found.append(torch.stack(needed, dim=1))
    return found


class KnownPath:
    """In place of a proposer's `TreePlan`: goes along the text that comes, and notes each true
    token's rank among the drafts.

    One node a level, whatever the tree: what fixed shapes and chains of any length accept follows
    from the ranks.
    """

    def __init__(self, length: int) -> None:
        self.length, self.width, self.nodes, self.expanded, self.threshold = (
            length,
            1,
            length,
            length,
            0.0,
        )
        self.ranks: Tensor
        """[B, length]: place of the true token among the `BEST` likeliest; `BEST` where it is not
        among them."""
        self.coming: Tensor
        """[B, length], to be set before each `draft`."""

    def draft(
        self, first: Tensor, root: Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, Tensor]:
        """As `TreePlan.draft`."""
        logits, found = first[:, None], []
        path = root[:, None]
        above = torch.zeros_like(path)
        for depth in range(self.length):
            token = self.coming[:, depth : depth + 1]
            best, _ = draws.rank(logits, depth, BEST, path[:, None])
            hit = best[:, 0] == token
            found.append(torch.where(hit.any(-1), hit.int().argmax(-1), BEST))
            token = token.clamp(min=0)
            path = torch.cat([path, token], dim=1)
            if depth + 1 < self.length:
                logits = go_on(Level(token, above, None, depth + 1))
        self.ranks = torch.stack(found, dim=1)
        return DraftTree(path, TreeShape.chain(self.length)), first.new_zeros(0)
