"""Which of the drafted tokens are right: the acceptance rules.

Shapes: B batch, N tree nodes with the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import DraftTree


def accept_greedy(tree: DraftTree, choices: Tensor) -> Tensor:
    """The deepest node `[B]` whose whole path is what the target would have written; 0 if no draft is.

    `choices` `[B, N]` is the target's argmax after each node. Every token so accepted, and the choice after the last, equals
    plain greedy decoding, because each is the argmax given exactly the tokens before it (verification-and-trees 4.1).
    """
    tables = tree.shape.tables(tree.tokens.device)
    right = tree.tokens == choices[:, tables.parents]
    right[:, 0] = True
    reached = (right[:, None, :] | ~tables.ancestors).all(-1)
    return torch.where(reached, tables.depths, -1).argmax(-1)
