"""Growth of draft chains, and their ends where a drafter is unsure.

Shapes: B batch, D drafts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from .growth import Continue, Level


def grow_chain(
    first: Tensor,
    root: Tensor,
    draws: Draws,
    go_on: Continue,
    chain: TreeShape,
    threshold: float = 0.0,
) -> DraftTree:
    """Draft the tokens of `chain`, each chosen after the ones before it.

    Under a rule that compares distributions each is a draw, and the tree has the distributions.
    Other arguments as in `grow_dynamic`.

    With a `threshold` above 0 the chain ends after the draft with which the product of the drafts'
    probabilities falls below it in every row, which costs a synchronisation for each draft. A row's
    end depends on its own past drafts alone, as the rules that compare distributions demand
    (docs/verification.md#non-anticipation): under them each row ends by itself, since their text
    depends on how long a chain is. Under the others rows keep the drafts that are there anyway.
    """
    logits, tokens, probs = first[:, None], [root[:, None]], []
    path_probs = torch.ones_like(root, dtype=torch.float32)
    above = torch.zeros_like(root)[:, None]
    going = [torch.ones_like(root, dtype=torch.bool)]  # rows whose chain has the draft of a depth
    for depth in range(chain.drafted):
        paths = None
        # Only a penalty reads paths. Without one the concatenation for each draft is saved.
        if draws.sampling.history_processor is not None:
            paths = torch.cat(tokens, dim=1)[:, None]
        if draws.sampling.compares_distributions:
            # Node d of a chain has depth d, so the depth serves as the node id that names the
            # noise.
            drawn, drawn_from = draws.sample(logits, depth, 1, paths)
            chosen = drawn[:, :, 0]
            probs.append(drawn_from)
        else:
            chosen = draws.guess(logits, depth, paths)
        tokens.append(chosen)
        # Running the last draft would give only what follows the whole chain.
        if depth + 1 == chain.drafted:
            break
        if threshold:
            # The drafter's own probability, whatever the temperature: thresholds are calibrated so.
            # In float32, since bfloat16 would round a product of many factors.
            chosen_probs = logits[:, 0].float().softmax(-1).gather(-1, chosen)[:, 0]
            path_probs = path_probs * chosen_probs
            going.append(path_probs >= threshold)
            sure = going[-1] if draws.running is None else going[-1] & (draws.running > 0)
            if not bool(sure.any()):
                break
        logits = go_on(Level(chosen, above, None, depth + 1))
    # the last node has no children, hence no distribution
    probs_of_nodes = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1) if probs else None
    drafts = len(tokens) - 1
    if drafts < chain.drafted:
        chain = TreeShape.chain(drafts)
    tree = DraftTree(torch.cat(tokens, dim=1), chain, probs=probs_of_nodes)
    if threshold and draws.sampling.compares_distributions:
        return cut(tree, torch.stack(going[:drafts], dim=1), draws.running)
    return tree


def cut(tree: DraftTree, kept: Tensor, running: Tensor | None = None) -> DraftTree:
    """Return a chain without the drafts that `kept` `[B, D]` is false for.

    In each row the first drafts are kept, so what follows a false entry is false too. The chain is
    as long as the longest row, which costs one synchronisation. Rows for which `running` (see
    `Draws`) is 0 keep nothing.
    """
    if running is not None:
        kept = kept & (running > 0)[:, None]
    longest = int(kept.sum(-1).max())
    # What no row keeps is cut off, so that the target does not have to run it.
    kept = kept[:, :longest]
    tokens = torch.cat(
        [tree.tokens[:, :1], torch.where(kept, tree.tokens[:, 1 : longest + 1], NO_NODE)], dim=1
    )
    # The last node that a row keeps has no children, so its distribution must not be compared: it
    # becomes 0. `kept` of draft d + 1 belongs to node d, whose child that draft is. Example: a row
    # keeps 1 draft of 2, so `kept` is [1 0], padded [1 0 0], and only the root's distribution
    # stays.
    probs = None
    if tree.probs is not None:
        probs = tree.probs[:, : longest + 1] * pad(kept, (0, 1))[..., None]
    return DraftTree(tokens, TreeShape.chain(longest), probs=probs)
