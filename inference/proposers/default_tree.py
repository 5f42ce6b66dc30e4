"""The tree that a trained drafter drafts where nobody has chosen one: the one that pays here.

A GPU verifies dozens of nodes in the time of one, as long as it waits for memory. A CPU does not,
and there a tree of many nodes can make decoding slower than plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
from torch import nn

from ...heads.artifact import Artifact
from ..targets.causal_model import CausalModel, bytes_of
from ..tree_settings import Ranks
from .shapes import grow

VERIFY_ON_CPU = {1: 1.0, 2: 1.2, 4: 1.1, 8: 1.2, 16: 1.5, 32: 2.1, 64: 3.3}
"""Time of a forward pass over so many tree nodes, over that of one node: SmolLM2-135M and the
quickstart target, float32 and bfloat16 (EXPERIMENTS.md, "Default trees")."""
GROWTH = 1.25  # time of drafting a tree's level over that of running its rows (same place)
TREES = (4, 8, 16, 26)  # drafted nodes of the trees that are considered


def default_tree(artifact: Artifact, target: CausalModel) -> dict[str, Any]:
    """Return the settings of the tree with which a drafter is expected to gain most on a CPU.

    They are computed from the drafter's held-out accuracies, a table of what verification costs,
    and the share of the target's weights that a draft reads, so that they are the same on every
    CPU. They are empty on other devices, and for drafters without such accuracies: those draft as
    they were evaluated in training.
    """
    accuracies = artifact.calibration.get("rank_accuracy")
    if not accuracies or target.device.type != "cpu":
        return {}
    # Drafters that make all drafts at once take the same time for any tree, and less of it.
    by_level = artifact.drafter.drafts_by_level
    share = draft_share(artifact.drafter, target) if by_level else 0.0
    found: dict[tuple[str, int], float] = {}
    for length in range(1, min(artifact.calibration.get("length", 1), len(accuracies)) + 1):
        chain = [(0,) * depth for depth in range(1, length + 1)]
        found["chain", length] = gain(accuracies, chain, length * share)
    width = artifact.calibration.get("width", 1)
    levels = artifact.calibration.get("length", 0)
    for nodes in {*TREES, artifact.calibration.get("tree_nodes", TREES[-1])}:
        if nodes >= levels:
            drafting = levels * share * verify_cost(width) * GROWTH
            found["tree", nodes] = gain(accuracies, grow(accuracies, nodes), drafting)
    form, size = max(found, key=lambda candidate: found[candidate])
    return {"width": 1, "length": size} if form == "chain" else {"nodes": size}


def gain(accuracies: Sequence[Sequence[float]], nodes: Sequence[Ranks], drafting: float) -> float:
    """Return the expected tokens of a round with the tree `nodes` over those of plain decoding.

    Both in the same time. `accuracies` are as in `grow`; `drafting` is the time of making the
    drafts, over that of a plain pass of the target.
    """
    expected = 1.0
    for ranks in nodes:
        expected += math.prod(accuracies[depth][rank] for depth, rank in enumerate(ranks))
    return expected / (verify_cost(1 + len(nodes)) + drafting)


def verify_cost(nodes: int) -> float:
    """Return `VERIFY_ON_CPU` at any number of nodes, interpolated linearly."""
    return float(numpy.interp(nodes, list(VERIFY_ON_CPU), list(VERIFY_ON_CPU.values())))


def draft_share(drafter: Any, target: CausalModel) -> float:
    """Return the bytes of weights that a draft reads, as a share of those of a plain pass.

    On a CPU a pass over few rows takes as long as reading the weights does.
    """
    head = target.head_weight.nbytes
    own = sum(part.weight.nbytes for part in drafter.modules() if isinstance(part, nn.Linear))
    if drafter.borrows_head:
        ids = getattr(drafter, "draft_vocab_ids", None)
        # A part is copied in the drafter's own dtype, see `ModelHead.head_of`.
        own += head if ids is None else len(ids) * target.hidden_size * drafter.fc.weight.itemsize
    # Of the embedding a pass reads one row, unless the matrix is the head's too.
    embedding: Any = target.model.get_input_embeddings().weight
    tied = embedding is target.model.get_output_embeddings().weight
    of_target = bytes_of(target.model) + target.packed_bytes - (0 if tied else embedding.nbytes)
    return own / of_target
