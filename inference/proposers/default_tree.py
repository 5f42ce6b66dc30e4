"""The tree that a trained drafter drafts where nobody has chosen one: the one that pays here.

A GPU verifies dozens of nodes in the time of one, as long as it waits for memory. A CPU does not,
and there a tree of many nodes can make decoding slower than plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from ...heads.artifact import Artifact
from ..targets.causal_model import CausalModel, bytes_of
from ..tree_settings import Ranks
from .shapes import grow

VERIFY_ON_CPU = {1: 1.0, 2: 1.2, 4: 1.1, 8: 1.2, 16: 1.5, 32: 2.1, 64: 3.3}
"""Time of a forward pass over so many tree nodes, over that of one node: SmolLM2-135M and the
quickstart target, float32 and bfloat16 (EXPERIMENTS.md, "Default trees")."""
GROWTH = 1.25  # time of drafting a tree's level over that of running its rows (same place)
TREES = (4, 8, 16, 26)  # drafted nodes of the trees that are considered


class DefaultTree(NamedTuple):
    """Tree that a drafter drafts where a user names none."""

    settings: dict[str, Any]
    gain: float | None
    """Expected tokens per second over those of plain decoding; None for a tree of the artifact."""


def default_tree(artifact: Artifact, target: CausalModel) -> DefaultTree | None:
    """Return the tree that the artifact names for the target's device, or else the best on a CPU.

    The latter is the one with which the drafter is expected to gain most. It is computed from the
    drafter's held-out accuracies, a table of what verification costs, and the share of the target's
    weights that drafting reads, so that it is the same on every CPU. It is None on other devices,
    and for drafters without such accuracies: those draft as they were evaluated in training.
    """
    accuracies, known = artifact.calibration.get("rank_accuracy"), artifact.calibration
    if (named := known.get("trees", {}).get(target.device.type)) is not None:
        return DefaultTree(dict(named), None)
    if not accuracies or target.device.type != "cpu":
        return None
    drafter = artifact.drafter
    one_pass = verify_cost(drafter.rows_of_pass)
    levels = known.get("length", 1)
    found: list[DefaultTree] = []
    for length in range(1, min(levels, len(accuracies)) + 1):
        chain = [(0,) * depth for depth in range(1, length + 1)]
        drafting = draft_share(drafter, target, length) * one_pass
        settings = {"width": 1, "length": length}
        found.append(DefaultTree(settings, gain(accuracies, chain, drafting)))
    for nodes in sorted({*TREES, known.get("tree_nodes", TREES[-1])}):
        if nodes < levels:
            continue
        tree = grow(accuracies, nodes)
        if drafter.drafts_by_level:
            deepest, pass_cost = levels, verify_cost(known.get("width", 1)) * GROWTH
        else:
            # Such a tree is made level by level too, though the drafter runs once.
            growth = GROWTH if drafter.drafts_in_turn else 1.0
            deepest, pass_cost = max(map(len, tree), default=1), one_pass * growth
        drafting = draft_share(drafter, target, deepest) * pass_cost
        found.append(DefaultTree({"nodes": nodes}, gain(accuracies, tree, drafting)))
    return max(found, key=lambda candidate: candidate.gain or 0.0)


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


def draft_share(drafter: Any, target: CausalModel, levels: int) -> float:
    """Return the bytes of weights that drafts of `levels` levels read, over those of a plain pass.

    On a CPU a pass over few rows takes as long as reading the weights does.
    """
    ids = getattr(drafter, "draft_vocab_ids", None)
    head = target.head_weight.nbytes
    if ids is not None and drafter.borrows_head:
        # A part is copied in the drafter's own dtype, see `ModelHead.head_of`.
        head = len(ids) * target.hidden_size * next(drafter.parameters()).itemsize
    own, heads = drafter.bytes_read(levels)
    # Of the embedding a pass reads one row, unless the matrix is the head's too.
    embedding: Any = target.model.get_input_embeddings().weight
    tied = embedding is target.model.get_output_embeddings().weight
    of_target = bytes_of(target.model) + target.packed_bytes - (0 if tied else embedding.nbytes)
    return (own + heads * head) / of_target
