"""Acceptance of drafts: the rule by match, the choice among the rules, and their `Verdict`.

docs/verification.md has the proofs that the rules are lossless.

Shapes: B rows of a batch, N tree nodes with the root, D drafts of a chain, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Draws
from .tree import DraftTree, deepest
from .verifiers import verifier_for

# Thresholds of typical acceptance: the defaults of FasterDecoding/Medusa.
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


@dataclass(kw_only=True)
class Verdict:
    """Decision of a rule for each row, on the device."""

    node: Tensor
    """[B]: deepest accepted node; 0 if no draft was accepted."""
    bonus: Tensor
    """[B]: bonus token, which follows that node."""
    rule: str
    """Rule that decided: greedy, gumbel, match, block, traversal, rrs (recursive rejection), or
    typical, the only lossy one."""
    choices: Tensor | None = None
    """[B, N]: the target's token after every node, for the rules that know it."""
    expected: Tensor | None = None
    """[B] float: tokens of this round in expectation over the target's randomness; for
    deterministic drafts at T > 0 only."""
    overlap: Tensor | None = None
    """[B, N] float: sum of min(p, q) at each node, the highest probability with which any rule
    could accept one draw there; for rules that compare distributions only."""


def accepted_in_chain(drafts: Tensor, choices: Tensor) -> Tensor:
    """Return how many drafts of a chain are accepted `[B]`: the simplest case of `match`.

    `drafts` `[B, D]`; `choices` `[B, D + 1]`: the target's own token after the root and after each
    draft.
    """
    # Draft d is right if it is the token that the target chose after the d drafts before it. The
    # running product is 1 up to the first mistake and 0 from there on. The token after the accepted
    # run is choices[:, count].
    right = drafts == choices[:, :-1]
    return right.long().cumprod(-1).sum(-1)


def judge(tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
    """Return the verdict on a draft tree with the target's `logits` `[B, N, V]` after its nodes."""
    sampling, tables = draws.sampling, tree.tables
    scores = draws.scores(
        logits, tree.path_tokens if sampling.history_processor is not None else None
    )
    # Looked-up drafts have no distribution. They are judged by match under these rules too, which
    # is lossless for drafts that do not know the noise.
    if sampling.compares_distributions and tree.probs is not None:
        return _by_rejection(tree, scores, draws)
    if not sampling.greedy and not sampling.lossless:
        return _typical(tree, scores, draws)
    choices = draws.choices(scores, tables.depths, tree.levels)
    node = match(tree, choices)
    # The expectation is defined for T > 0 and drafts that do not know the target's noise.
    undefined = sampling.greedy or (sampling.coupled if tree.informed is None else tree.informed)
    expected = None if undefined else expected_tokens(tree, scores)
    rule = "greedy" if sampling.greedy else "gumbel" if sampling.coupled else "match"
    bonus = choices.gather(1, node[:, None])[:, 0]
    return Verdict(node=node, bonus=bonus, rule=rule, choices=choices, expected=expected)


def match(tree: DraftTree, choices: Tensor) -> Tensor:
    """Return the deepest node `[B]` whose whole path is what the target chose; 0 if no draft is.

    `choices` `[B, N]` is the target's token after each node: its argmax, or a draw with noise that
    the draft does not depend on, or with noise that it shares. Every token so accepted, and the
    choice after the last, is the target's own choice given exactly the tokens before it, whatever
    the tree (docs/verification.md#acceptance-by-match).
    """
    if tree.shape is not None and tree.shape.is_chain:
        return accepted_in_chain(tree.tokens[:, 1:], choices)  # node d of a chain has depth d
    tables = tree.tables
    right = tree.tokens == choices.gather(1, tables.parents.expand_as(choices))
    # The root is no draft. Its entry compares it with the choice after itself, which says nothing.
    right[:, 0] = True
    return deepest(right, tables)


def token_chances(tree: DraftTree, scores: Tensor) -> Tensor:
    """Return the target's probability `[B, N]` of each node: 1 at the root, 0 if it is missing."""
    parents = tree.tables.parents.expand_as(tree.tokens)
    log_probs = scores.log_softmax(-1)
    above = log_probs.gather(1, parents[..., None].expand(-1, -1, log_probs.shape[-1]))
    # A missing node's token, -1, cannot be an index; its probability is set to 0 next.
    chances = above.gather(2, tree.tokens.clamp(min=0)[..., None])[..., 0].exp()
    chances = torch.where(tree.tokens < 0, 0.0, chances)
    # The root is certain, whatever its own token's probability after itself would be.
    chances[:, 0] = 1
    return chances


def expected_tokens(tree: DraftTree, scores: Tensor) -> Tensor:
    """Return the tokens of this round in expectation `[B]`: 1 + sum of P(s) over drafted nodes s.

    P(s) is the target's probability of the whole path to s (docs/verification.md#expected-tokens).
    The result is exact for deterministic trees, and has less variance than a count; it is wrong for
    drafts that know the target's noise. End tokens and length limits are not considered.
    """
    chances = token_chances(tree, scores)
    # The product along each node's path: row i has the factors of i and its ancestors, and 1 for
    # all other nodes. The root's path has probability 1: the bonus token. Missing nodes add 0.
    return torch.where(tree.tables.ancestors, chances[:, None], 1.0).prod(-1).sum(-1)


def _by_rejection(tree: DraftTree, scores: Tensor, draws: Draws) -> Verdict:
    """Return the verdict of a rule of docs/verification.md#rejection-rules."""
    probs = scores.softmax(-1)
    assert tree.probs is not None and tree.shape is not None, (
        "rules that compare distributions need trees of a shape fixed beforehand"
    )
    rule, verifier = verifier_for(draws.sampling.rule, tree.shape)
    plan = verifier(tree.shape, tree.tokens, probs, tree.probs)
    # Coins lie strictly between 0 and 1: a chance of 1 always accepts, a chance of 0 never.
    node = plan.select(draws.coins(tree.nodes) < plan.chances)
    # The bonus token comes from the residual distribution at the node where the path ended.
    at_node = node[:, None, None].expand(-1, 1, probs.shape[-1])
    bonus = draws.last(plan.probs.gather(1, at_node)[:, 0])
    overlap = torch.minimum(probs, tree.probs).sum(-1)
    return Verdict(node=node, bonus=bonus, rule=rule, overlap=overlap)


def _typical(tree: DraftTree, scores: Tensor, draws: Draws) -> Verdict:
    """Return the verdict of Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1).

    LOSSY: the text does not have the target's distribution.
    """
    log_probs = scores.log_softmax(-1)
    # 0 log 0 is 0, not NaN: tokens that top-k or top-p removed have no probability.
    summands = torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0)
    entropy = -summands.sum(-1)  # [B, N]
    threshold = (TYPICAL_DELTA * (-entropy).exp()).clamp(max=TYPICAL_EPSILON)
    # A node is judged by the distribution at its parent, which is where its token was chosen.
    parents = tree.tables.parents.expand_as(tree.tokens)
    right = token_chances(tree, scores) > threshold.gather(1, parents)
    right[:, 0] = True
    node = deepest(right, tree.tables)
    choices = draws.choices(scores, tree.tables.depths, tree.levels)
    bonus = choices.gather(1, node[:, None])[:, 0]
    return Verdict(node=node, bonus=bonus, rule="typical", choices=choices)
