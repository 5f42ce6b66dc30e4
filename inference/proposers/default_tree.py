"""Trees of a trained drafter by what they are expected to gain, from its own held-out accuracies.

Training evaluates every drafter with a tree of the size that suits a GPU, which verifies some tens
of nodes in the time of one, as long as it waits for memory. A CPU does not, and there a tree of
many nodes can make decoding slower than plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...heads.artifact import Artifact
from ...heads.files import JsonObject
from ...heads.layout import DrafterModule
from ...heads.vocabulary import VocabularyMaps
from ..base.costs import Gpu, pass_cost, speedup, tree_tokens
from ..base.tree_settings import Ranks
from ..targets.causal_model import CausalModel, bytes_of
from .kind import Settings
from .tree_plan import TreePlan, grow

GROWTH = 1.25
"""Time of drafting a tree's level over that of running its rows: ranking candidates and building
the tree take the host about a quarter of what a small layer takes."""
TREES = (4, 8, 16, 26)  # drafted nodes of the trees that are considered


class DefaultTree(NamedTuple):
    """Tree that a drafter drafts where a user names none."""

    settings: Settings
    gain: float | None
    """Expected tokens per second over those of plain decoding; None for a tree of the artifact."""


def default_tree(artifact: Artifact, target: CausalModel) -> DefaultTree | None:
    """Return the tree that the artifact names for the target's device, or else the best on a CPU.

    The latter is the one with which the drafter is expected to gain most, by the model of
    `base.costs`; nothing is timed, so that it is the same on every CPU and in every run. It is
    None on other devices, and for drafters without held-out accuracies: those draft as they were
    evaluated in training.
    """
    known = artifact.calibration
    if (named := known.get("trees", {}).get(target.device.type)) is not None:
        return DefaultTree(dict(named), None)
    accuracies, levels = known.get("rank_accuracy"), known.get("length", 1)
    if not accuracies or target.device.type != "cpu":
        return None
    found: list[DefaultTree] = []

    def offer(settings: Settings, tree: Sequence[Ranks], width: int) -> None:
        gain = expected_gain(artifact.drafter, target, accuracies, tree, levels, width)
        found.append(DefaultTree(settings, gain))

    for length in range(1, min(levels, len(accuracies)) + 1):
        offer({"width": 1, "length": length}, chain_of(length), 1)
    for nodes in sorted({*TREES, known.get("tree_nodes", TREES[-1])}):
        if nodes >= levels:
            offer({"nodes": nodes}, grow(accuracies, nodes), max(known.get("width", 1), 2))
    return max(found, key=lambda candidate: candidate.gain or 0.0)


def expected_gain(
    drafter: DrafterModule,
    target: CausalModel,
    accuracies: Sequence[Sequence[float]],
    tree: Sequence[Ranks],
    levels: int,
    width: int,
    batch: int = 1,
    gpu: Gpu | None = None,
) -> float:
    """Return the expected tokens per second with a tree over those of plain decoding.

    The same batch of requests decodes in both; `gpu` is None on a CPU. A tree of width 1 is a
    chain. Wider ones cost `levels` passes over `width` rows if the drafter drafts by levels; others
    are made level by level too, though the drafter runs once.
    """
    rows, growth = drafter.rows_of_pass, 1.0
    if width > 1 and drafter.drafts_by_level:
        rows, growth = width, GROWTH
    else:
        levels = max(map(len, tree), default=1)
        if width > 1 and drafter.drafts_in_turn:
            growth = GROWTH
    plain = pass_cost(batch, gpu)
    drafting = growth * draft_share(drafter, target, levels) * pass_cost(batch * rows, gpu)
    verifying = pass_cost(batch * (1 + len(tree)), gpu)
    return speedup(tree_tokens(accuracies, tree), drafting / plain, verifying / plain)


def chain_of(length: int) -> list[Ranks]:
    """Return the nodes of a chain, as `grow` returns those of a tree."""
    return [(0,) * depth for depth in range(1, length + 1)]


def expected_tokens(calibration: JsonObject, plan: TreePlan) -> float | None:
    """Return the tokens of a round with `plan` by a drafter's held-out accuracies.

    A tree that follows the drafter's confidence counts as the fixed one of its size. None where the
    artifact has no accuracies, as that of an imported drafter.
    """
    accuracies = calibration.get("rank_accuracy", [])[: plan.length]
    if not accuracies:
        return None
    chain = plan.width == 1
    tree = chain_of(len(accuracies)) if chain else grow(accuracies, plan.nodes)
    return tree_tokens(accuracies, tree)


def draft_share(drafter: DrafterModule, target: CausalModel, levels: int) -> float:
    """Return the bytes of weights that drafts of `levels` levels read, over those of a plain pass.

    On a CPU a pass over few rows takes as long as reading the weights does.
    """
    head = target.head_weight.nbytes
    if isinstance(drafter, VocabularyMaps) and drafter.borrows_head and drafter.d2t is not None:
        # A part is copied in the drafter's own dtype, see `ModelHead.head_of`.
        head = len(drafter.d2t) * target.hidden_size * next(drafter.parameters()).itemsize
    own, heads = drafter.bytes_read(levels)
    # Of the embedding a pass reads one row, unless the matrix is the head's too.
    embedding: Any = target.model.get_input_embeddings().weight
    tied = embedding is target.model.get_output_embeddings().weight
    of_target = bytes_of(target.model) + target.packed_bytes - (0 if tied else embedding.nbytes)
    return (own + heads * head) / of_target
