"""Acceptance of drafts: by match with the target's choices, or by rules that compare distributions.

The latter turn a tree of sampled drafts, the target's distributions p and the drafter's
distributions q into an `AcceptancePlan`: the probability with which each node's coin accepts, the
distribution of the round's last token at each node, and how coins pick the node. All of it is
deterministic, so that a test can enumerate every outcome. docs/verification.md has the rules, and
the proofs that they are lossless.

Shapes: B rows of a batch, N tree nodes with the root, D drafts of a chain, V vocabulary. The
arguments of every `Verifier` are the shape of the tree, `tokens` `[B, N]`, and `p` and `q`
`[B, N, V]`, the distributions of the token after each node. Children are draws without replacement
from their parent's q, in the order of their ids; NO_NODE where q had run out of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .device import row_of
from .sampling import Draws
from .tree import DraftTree, TreeShape, deepest


@dataclass(kw_only=True)
class Verdict:
    """Decision of a rule for each row, on the device."""

    node: Tensor
    """[B]: deepest accepted node; 0 if no draft was accepted."""
    bonus: Tensor
    """[B]: bonus token, which follows that node."""
    rule: str
    """Rule that decided: greedy, gumbel, match, block, traversal, or rrs (recursive rejection)."""
    overlap: Tensor | None = None
    """[B, N] float: sum of min(p, q) at each node, the highest probability with which any rule
    could accept one draw there; for rules that compare distributions only."""


def judge(tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
    """Return the verdict on a draft tree with the target's `logits` `[B, N, V]` after its nodes."""
    sampling = draws.sampling
    scores = draws.scores(
        logits, tree.path_tokens if sampling.history_processor is not None else None
    )
    # Looked-up drafts have no distribution. They are judged by match under these rules too, which
    # is lossless for drafts that do not know the noise.
    if sampling.compares_distributions and tree.probs is not None:
        return _by_rejection(tree, scores, draws)
    choices = draws.choices(scores, tree.tables.depths, tree.levels)
    node = match(tree, choices)
    rule = "greedy" if sampling.greedy else "gumbel" if sampling.coupled else "match"
    return Verdict(node=node, bonus=choices.gather(1, node[:, None])[:, 0], rule=rule)


def match(tree: DraftTree, choices: Tensor) -> Tensor:
    """Return the deepest node `[B]` whose whole path is what the target chose; 0 if no draft is.

    `choices` `[B, N]` is the target's token after each node: its argmax, or a draw with noise that
    the draft does not depend on, or with noise that it shares. Every token so accepted, and the
    choice after the last, is the target's own choice given exactly the tokens before it, whatever
    the tree (docs/verification.md#acceptance-by-match).
    """
    if tree.shape is not None and tree.shape.is_chain:
        # Node d of a chain has depth d, and is right if it is the choice after the node before it.
        # The running product is 1 up to the first mistake and 0 from there on.
        right = tree.tokens[:, 1:] == choices[:, :-1]
        return right.long().cumprod(-1).sum(-1)
    tables = tree.tables
    right = tree.tokens == choices.gather(1, tables.parents.expand_as(choices))
    # The root is not a draft: its entry compares it with the choice after itself and says nothing.
    right[:, 0] = True
    return deepest(right, tables)


def _by_rejection(tree: DraftTree, scores: Tensor, draws: Draws) -> Verdict:
    """Return the verdict of a rule of docs/verification.md#rejection-rules."""
    probs = scores.softmax(-1)
    assert tree.probs is not None and tree.shape is not None, (
        "rules that compare distributions need trees of a shape fixed beforehand"
    )
    rule, verifier = "rrs", recursive
    if draws.sampling.rule == "rejection":
        rule, verifier = "block" if tree.shape.is_chain else "traversal", traversal
    plan = verifier(tree.shape, tree.tokens, probs, tree.probs)
    # Coins lie strictly between 0 and 1: a chance of 1 always accepts, a chance of 0 never.
    node = plan.select(draws.coins(tree.nodes) < plan.chances)
    # The bonus token comes from the residual distribution at the node where the path ended.
    at_node = node[:, None, None].expand(-1, 1, probs.shape[-1])
    bonus = draws.last(plan.probs.gather(1, at_node)[:, 0])
    overlap = torch.minimum(probs, tree.probs).sum(-1)
    return Verdict(node=node, bonus=bonus, rule=rule, overlap=overlap)


# A residual of at most this mass is reached with at most this probability, since a rule ends a
# path there with its mass. p takes its place, so that nothing is divided by zero. It bounds nothing
# else: what a drafter leaves may be less, and is drawn from with certainty.
TINY = 1e-12


@dataclass
class AcceptancePlan:
    """Random part of an acceptance: a coin for each node, and one last draw."""

    chances: Tensor
    """[B, N]: probability with which the coin of a node accepts when its turn comes."""
    probs: Tensor
    """[B, N, V]: distribution of the round's last token if the path ends at this node."""
    select: Callable[[Tensor], Tensor]
    """Function from coins `[B, N]` bool to the node `[B]` where the path ends."""


Verifier = Callable[[TreeShape, Tensor, Tensor, Tensor], AcceptancePlan]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return `(p - q)+` over the last axis, normalised; p itself where nothing is left."""
    return residual_weighted(torch.ones_like(p[..., 0]), p, q)[0]


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return `p / q`, and 0 where q is 0: such a token was never drawn."""
    # `where` computes both cases: the clamp keeps the other quotient from dividing by 0.
    return torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0.0)


def gather_probs(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries of `probs` `[..., V]` at `tokens` `[...]`; 0 for NO_NODE."""
    return torch.where(tokens < 0, 0.0, probs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0])


def zero_and_renormalize(q: Tensor, tokens: Tensor) -> Tensor:
    """Return `q` `[B, V]` with the entries at `tokens` `[B]` zeroed, normalised again.

    Rows whose token is NO_NODE keep every entry.
    """
    # The probability is set to 0 and not subtracted, so that no rounding is left in its place.
    rest = q.scatter(-1, tokens.clamp(min=0)[:, None], 0.0)
    rest = torch.where((tokens < 0)[:, None], q, rest)
    # A sure drafter leaves 1e-30 and less, from which its next child is drawn all the same: the sum
    # must not be clamped. It is 0 where q had one token alone. The result is then 0 everywhere, and
    # further children are missing.
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, 0.0)


def select_first(order: tuple[int, ...], coins: Tensor) -> Tensor:
    """Return the first node `[B]` in `order` whose coin accepts; the root, its last, if none."""
    # `argmax` gives the first of equal values.
    index = row_of(order, coins.device)[0]
    ordered = coins[:, index].clone()
    # the root is last; but for rounding its coin accepts with probability 1
    ordered[:, -1] = True
    return index[ordered.int().argmax(-1)]


def select_down(shape: TreeShape, coins: Tensor) -> Tensor:
    """Go to the first child whose coin `[B, N]` accepts until none does; return the last node."""
    # A node is chosen if it is the first of its siblings whose coin accepts, whatever its parent.
    # `deepest` then finds the one path on which every node is chosen.
    chosen = torch.zeros_like(coins)
    chosen[:, 0] = True
    for below in shape.children:
        # Siblings are mutually exclusive: after one has accepted, the others' coins do not count.
        none_accepted = torch.ones_like(coins[:, 0])
        for child in below:
            chosen[:, child] = coins[:, child] & none_accepted
            none_accepted = none_accepted & ~coins[:, child]
    return deepest(chosen, shape.tables(coins.device))


def residual_weighted(weight: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(weight * p - q)+` normalised, and its mass `[...]`.

    `weight` is `[...]`, `p` and `q` are `[..., V]`. Where nothing is left, p is the result.
    """
    rest = (weight[..., None] * p - q).clamp(min=0)
    mass = rest.sum(-1)
    return torch.where(mass[..., None] > TINY, rest / mass.clamp(min=TINY)[..., None], p), mass


def share_of(mass: Tensor, weight: Tensor) -> Tensor:
    """Return `mass / (mass + 1 - weight)`, within [0, 1]; 0 for no mass.

    `1 - weight` is computed first: in `mass + 1`, float32 would lose a mass below 6e-8, and with a
    weight of nearly 1 the quotient would reach 1e4.
    """
    return (mass / (mass + (1 - weight)).clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1)


def recursive(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Return the plan of recursive rejection without replacement (Sequoia, arXiv 2402.12374).

    The children of a node are tested in order, each against what the ones before have left of p.
    """
    probs, chances = p.clone(), torch.ones_like(p[..., 0])
    for node, below in enumerate(shape.children):
        left, drawn = p[:, node], q[:, node]
        for child in below:
            x = tokens[:, child]
            # the coin of a missing child never accepts: `at` is 0 for it
            chances[:, child] = ratio(gather_probs(left, x), gather_probs(drawn, x)).clamp(max=1)
            # A missing child was not tested, so nothing was rejected and p stays as it is.
            left = torch.where((x < 0)[:, None], left, residual(left, drawn))
            drawn = zero_and_renormalize(drawn, x)
        probs[:, node] = left
    return AcceptancePlan(chances, probs, partial(select_down, shape))


def traversal(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Return the plan of traversal verification of a sampled tree (Weng et al., arXiv 2505.12398).

    Leaves are tested first, and the first node whose coin accepts ends the path. On a chain it is
    block verification (Sun et al., arXiv 2403.10444): the deepest node whose coin accepts ends the
    path, whatever the coins before it.
    """
    # of each node: what is left of p, the distribution of the next draw, and the acceptance weight
    # (docs/verification.md#traversal-verification)
    left, drawn = list(p.unbind(1)), list(q.unbind(1))
    # One tensor for all nodes is safe: entries are replaced and never changed in place.
    weight = [torch.ones_like(p[:, 0, 0])] * shape.nodes
    order: list[int] = []

    def visit(node: int) -> None:
        below = shape.children[node]
        for child in below:
            x = tokens[:, child]
            weight[child] = (
                weight[node] * ratio(gather_probs(left[node], x), gather_probs(drawn[node], x))
            ).clamp(max=1)
            visit(child)
            # Coins are asked in the order of the visits, so from here on the child and everything
            # below it have been rejected.
            rest, mass = residual_weighted(weight[node], left[node], drawn[node])
            missing = x < 0
            left[node] = torch.where(missing[:, None], left[node], rest)
            weight[node] = torch.where(missing, weight[node], share_of(mass, weight[node]))
            if child != below[-1]:
                drawn[node] = zero_and_renormalize(drawn[node], x)
        # After all children: a node's own coin is asked when everything below it was rejected.
        order.append(node)

    visit(0)
    return AcceptancePlan(
        torch.stack(weight, dim=1), torch.stack(left, dim=1), partial(select_first, tuple(order))
    )
