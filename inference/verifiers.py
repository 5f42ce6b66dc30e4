"""The rules that compare distributions: which sampled drafts are kept, so that the text has exactly
the target's distribution.

A verifier turns a drafted tree, the target's distributions p and the draft's distributions q into a
`AcceptancePlan`: one acceptance chance for each node, the distribution of the round's last token at
each node, and how coins pick the node. All of it is deterministic, which is what lets a test
enumerate every outcome. Rules and proofs: verification-and-trees 4.4 to 4.7.

Shapes: B batch, N tree nodes with the root, V vocabulary. `tokens` `[B, N]`, `p` and `q` `[B, N,
V]`: distributions of the token after each node. Children are draws without replacement from their
parent's q, in order; NO_NODE where q had run out of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from .tree import TreeShape, deepest

# a residual with less mass than this is never reached; p stands in so that nothing divides by zero
TINY = 1e-12


@dataclass
class AcceptancePlan:
    """What is left to chance: a coin for each node, and one last draw."""

    chances: Tensor
    """[B, N]: how likely the coin of a node, when its turn comes, accepts."""
    probs: Tensor
    """[B, N, V]: distribution of the round's last token if the path ends at this node."""
    select: Callable[[Tensor], Tensor]
    """Coins `[B, N]` bool -> the node `[B]` where the path ends."""


Verifier = Callable[[TreeShape, Tensor, Tensor, Tensor], AcceptancePlan]


def verifier_for(rule: str, shape: TreeShape) -> tuple[str, Verifier]:
    """The verifier of a sampling rule for trees of this shape, and its name in records."""
    if rule == "recursive":
        return "rrs", recursive
    return ("block", block) if shape.is_chain else ("traversal", traversal)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`(p - q)+` over the last axis, normalised; p itself where nothing is left."""
    return residual_weighted(torch.ones_like(p[..., 0]), p, q)[0]


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """`p / q`, and 0 where q = 0: such a token was never drawn."""
    return torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0.0)


def at(probs: Tensor, tokens: Tensor) -> Tensor:
    """Entry of `probs` `[..., V]` at `tokens` `[...]`; 0 for NO_NODE."""
    return torch.where(tokens < 0, 0.0, probs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0])


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """`q` `[B, V]` with the entries at `tokens` `[B]` zeroed, normalised again."""
    rest = q.scatter(-1, tokens.clamp(min=0)[:, None], 0.0)
    rest = torch.where((tokens < 0)[:, None], q, rest)
    return rest / rest.sum(-1, keepdim=True).clamp(min=TINY)


@lru_cache(maxsize=256)
def node_index(nodes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(nodes, device=device)


def select_first(order: tuple[int, ...], coins: Tensor) -> Tensor:
    """The first node in `order` whose coin accepts, the root if none does."""
    index = node_index(order, coins.device)
    ordered = coins[:, index].clone()
    ordered[:, -1] = True  # the root stands last
    return index[ordered.int().argmax(-1)]


def select_down(shape: TreeShape, coins: Tensor) -> Tensor:
    """From the root, step to the first child whose coin accepts, until there is none."""
    chosen = torch.zeros_like(coins)
    chosen[:, 0] = True
    for below in shape.children:
        open_ = torch.ones_like(coins[:, 0])
        for child in below:
            chosen[:, child] = coins[:, child] & open_
            open_ = open_ & ~coins[:, child]
    return deepest(chosen, shape.tables(coins.device))


def token_level(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Leviathan et al. (2211.17192), Chen et al. (2302.01318): the reference for chains, which the
    loop does not use."""
    assert shape.is_chain
    probs, chances = p.clone(), torch.ones_like(p[..., 0])
    for i in range(1, shape.nodes):
        chances[:, i] = ratio(at(p[:, i - 1], tokens[:, i]), at(q[:, i - 1], tokens[:, i])).clamp(
            max=1
        )
        probs[:, i - 1] = residual(p[:, i - 1], q[:, i - 1])
    return AcceptancePlan(chances, probs, partial(select_down, shape))


def block(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Block verification of a sampled chain (Sun et al., arXiv 2403.10444): the longest accepted
    prefix wins."""
    assert shape.is_chain
    last = shape.nodes - 1
    weights = [torch.ones_like(p[:, 0, 0])]
    for i in range(1, shape.nodes):
        x = tokens[:, i]
        weights.append((weights[-1] * ratio(at(p[:, i - 1], x), at(q[:, i - 1], x))).clamp(max=1))
    # [B, N]: P_i, and Pr[the path ends at i or deeper | drafts 1 .. i]
    weight = torch.stack(weights, dim=1)
    chances, probs = weight.clone(), p.clone()
    if last:
        rest, mass = residual_weighted(weight[:, :last], p[:, :last], q[:, :last])
        chances[:, :last] = share_of(mass, weight[:, :last])
        probs[:, :last] = rest
    return AcceptancePlan(chances, probs, partial(select_first, tuple(range(last, -1, -1))))


def residual_weighted(weight: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """`(weight * p - q)+` normalised, and its mass; p itself where nothing is left."""
    rest = (weight[..., None] * p - q).clamp(min=0)
    mass = rest.sum(-1)
    return torch.where(mass[..., None] > TINY, rest / mass.clamp(min=TINY)[..., None], p), mass


def share_of(mass: Tensor, weight: Tensor) -> Tensor:
    """`mass / (mass + 1 - weight)`, within [0, 1]; 0 for no mass.

    `1 - weight` comes first: beside 1, float32 loses a mass below 6e-8, and the quotient would
    reach 1e4.
    """
    return (mass / (mass + (1 - weight)).clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1)


def recursive(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Recursive rejection without replacement (Sequoia, arXiv 2402.12374): children in order, each
    against what is left."""
    probs, chances = p.clone(), torch.ones_like(p[..., 0])
    for node, below in enumerate(shape.children):
        left, drawn = p[:, node], q[:, node]
        for child in below:
            x = tokens[:, child]
            chances[:, child] = ratio(at(left, x), at(drawn, x)).clamp(max=1)
            left = torch.where((x < 0)[:, None], left, residual(left, drawn))
            drawn = without(drawn, x)
        probs[:, node] = left
    return AcceptancePlan(chances, probs, partial(select_down, shape))


def traversal(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Traversal verification (Weng et al., arXiv 2505.12398): leaves first, the first accepted node
    wins; block on a chain."""
    left, drawn = list(p.unbind(1)), list(q.unbind(1))
    weight = [torch.ones_like(p[:, 0, 0])] * shape.nodes
    order: list[int] = []

    def visit(node: int) -> None:
        for child in shape.children[node]:
            x = tokens[:, child]
            weight[child] = (weight[node] * ratio(at(left[node], x), at(drawn[node], x))).clamp(
                max=1
            )
            visit(child)
            rest, mass = residual_weighted(weight[node], left[node], drawn[node])
            missing = x < 0
            left[node] = torch.where(missing[:, None], left[node], rest)
            weight[node] = torch.where(missing, weight[node], share_of(mass, weight[node]))
            drawn[node] = without(drawn[node], x)
        order.append(node)

    visit(0)
    return AcceptancePlan(
        torch.stack(weight, dim=1), torch.stack(left, dim=1), partial(select_first, tuple(order))
    )
