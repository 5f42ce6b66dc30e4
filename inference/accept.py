"""Which drafts are kept: acceptance by match, and what every rule hands to the loop.

Shapes: B batch, N tree nodes with the root, D levels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Draws
from .tree import DraftTree, deepest
from .verifiers import verifier_for

# Typical acceptance's thresholds, the defaults of FasterDecoding/Medusa.
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


@dataclass
class Verdict:
    """What a rule decided for each row: the deepest accepted node, and the target's own token after
    it."""

    node: Tensor
    """[B]; 0 if no draft was accepted."""
    last: Tensor
    """[B]."""
    rule: str
    """What decided: greedy, gumbel, match, block, traversal, rrs (recursive rejection), or typical,
    the only lossy one."""
    choices: Tensor | None = None
    """[B, N]: the target's token after every node, for the rules that know it."""
    expected: Tensor | None = None
    """[B] float: tokens of this round in expectation over the target's randomness; deterministic
    drafts at T > 0 only."""
    overlap: Tensor | None = None
    """[B, N] float: sum of min(p, q) at each node, the best any rule could accept there; rules that
    compare distributions only."""


def judge(tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
    """Apply the sampling's rule to a drafted tree and the target's logits `[B, N, V]` at its
    nodes."""
    sampling, tables = draws.sampling, tree.tables
    scores = draws.scores(
        logits, tree.path_tokens if sampling.history_processor is not None else None
    )
    if sampling.compares_distributions and tree.probs is not None:
        return _by_rejection(tree, scores, draws)
    if not sampling.greedy and not sampling.lossless:
        return _typical(tree, scores, draws)
    choices = draws.choices(scores, tables.depths, tree.levels)
    node = match(tree, choices)
    known = sampling.greedy or (sampling.coupled if tree.informed is None else tree.informed)
    expected = None if known else expected_tokens(tree, scores)
    rule = "greedy" if sampling.greedy else "gumbel" if sampling.coupled else "match"
    return Verdict(node, choices.gather(1, node[:, None])[:, 0], rule, choices, expected)


def match(tree: DraftTree, choices: Tensor) -> Tensor:
    """The deepest node `[B]` whose whole path is what the target chose; 0 if no draft is.

    `choices` `[B, N]` is the target's token after each node: its argmax, or a draw with noise that
    the draft does not depend on, or with noise that it shares. Every token so accepted, and the
    choice after the last, is the target's own choice given exactly the tokens before it, whatever
    the tree (verification-and-trees 4.1, 4.2, 4.3).
    """
    tables = tree.tables
    right = tree.tokens == choices.gather(1, tables.parents.expand_as(choices))
    right[:, 0] = True
    return deepest(right, tables)


def token_chances(tree: DraftTree, scores: Tensor) -> Tensor:
    """The target's probability `[B, N]` of each node's token after its parent; 1 at the root, 0
    where there is no node."""
    parents = tree.tables.parents.expand_as(tree.tokens)
    log_probs = scores.log_softmax(-1)
    above = log_probs.gather(1, parents[..., None].expand(-1, -1, log_probs.shape[-1]))
    chances = above.gather(2, tree.tokens.clamp(min=0)[..., None])[..., 0].exp()
    chances = torch.where(tree.tokens < 0, 0.0, chances)
    chances[:, 0] = 1
    return chances


def expected_tokens(tree: DraftTree, scores: Tensor) -> Tensor:
    """`1 + sum of P(s)` over drafted nodes, `[B]`: this round's tokens in expectation
    (verification-and-trees, section 5).

    Exact for deterministic trees, and of less variance than counting; wrong for drafts that know
    the target's noise.
    """
    chances = token_chances(tree, scores)
    return torch.where(tree.tables.ancestors, chances[:, None], 1.0).prod(-1).sum(-1)


def _by_rejection(tree: DraftTree, scores: Tensor, draws: Draws) -> Verdict:
    probs = scores.softmax(-1)
    assert tree.probs is not None and tree.shape is not None, (
        "rules that compare distributions need trees of a shape fixed beforehand"
    )
    rule, verifier = verifier_for(draws.sampling.rule, tree.shape)
    plan = verifier(tree.shape, tree.tokens, probs, tree.probs)
    node = plan.select(draws.coins(tree.nodes) < plan.chances)
    last = draws.last(
        plan.probs.gather(1, node[:, None, None].expand(-1, 1, probs.shape[-1]))[:, 0]
    )
    return Verdict(node, last, rule, overlap=torch.minimum(probs, tree.probs).sum(-1))


def _typical(tree: DraftTree, scores: Tensor, draws: Draws) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1). LOSSY: the text does not have
    the target's distribution."""
    log_probs = scores.log_softmax(-1)
    entropy = -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0).sum(
        -1
    )  # [B, N]
    bar = (TYPICAL_DELTA * (-entropy).exp()).clamp(max=TYPICAL_EPSILON)
    right = token_chances(tree, scores) > bar.gather(1, tree.tables.parents.expand_as(tree.tokens))
    right[:, 0] = True
    node = deepest(right, tree.tables)
    choices = draws.choices(scores, tree.tables.depths, tree.levels)
    return Verdict(node, choices.gather(1, node[:, None])[:, 0], "typical", choices)
