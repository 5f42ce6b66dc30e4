"""Training of Medusa heads (arXiv 2401.10774).

Shapes: S positions, R rows, D heads, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from ....heads.artifact import Artifact
from ....heads.files import JsonObject
from ....heads.medusa import MedusaHeads, MedusaShape
from ....inference.rounds.outcome import Hidden
from ....inference.targets.target import TargetSource
from ...data.batches import Batches
from ...losses.calibration import RankedMethod, ranks_by_root
from ...losses.initialization import apply_init_from, draft_vocabulary
from ...losses.vocabulary import VocabularyMap
from ...outline import FROZEN, TRAINED, MetaTarget, Outline, matrix_numbers
from .config import MedusaRun
from .loss import MedusaObjective

SURENESS = 0.45
"""Factor on the target's output matrix, with which each head begins.

With the matrix as it is, heads are as sure as the target, and wrong: with SmolLM2 the divergences
of three heads begin at 9.0, 11.1 and 11.4, with the matrix times 0.45 at 5.7, 6.7 and 6.8. The
factor with the least divergence lies between 0.4 and 0.5, with the quickstart target too
(docs/log/2026-11-experiments.md)."""


@torch.no_grad()
def copy_head(drafter: MedusaHeads, head_weight: Tensor) -> None:
    """Copy the target's rows `[Vd, H]` of the drafted tokens into every head that owns some."""
    for output in drafter.outputs:
        assert isinstance(output, nn.Linear)
        output.weight.copy_(head_weight)


class MedusaMethod(RankedMethod[MedusaRun, MedusaHeads]):
    """Training of Medusa heads."""

    run_class = MedusaRun
    drafter_class = MedusaHeads

    def resolve(self, run: MedusaRun, target: MetaTarget) -> None:
        apply_init_from(run)

    def outline(self, run: MedusaRun, target: MetaTarget) -> Outline:
        hidden_size = target.config.hidden_size
        sizes = hidden_size, target.vocab_size, target.embedding_and_head
        heads = MedusaHeads(MedusaShape(**asdict(run.heads)), *sizes)
        outputs = run.heads.num_heads * hidden_size * heads.drafted
        head = FROZEN if run.heads.shared_head else TRAINED
        # Two tables of each head wait for the backward pass of a chunk, and four of the target.
        drafted = run.heads.num_heads * heads.drafted / target.vocab_size
        return Outline(
            heads,
            logit_rows=round(run.objective.rows_per_chunk * (drafted + 2) / 2),
            operations=0.0,
            head_operations=TRAINED * matrix_numbers(heads.blocks) + head * outputs,
        )

    def make_drafter(
        self, run: MedusaRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> MedusaHeads:
        sizes = target.hidden_size, target.vocab_size, target.embedding_and_head
        if before is not None:
            return MedusaHeads(before.drafter.config, *sizes)
        drafter, rows = MedusaHeads(MedusaShape(**asdict(run.heads)), *sizes), target.head_weight
        if (ids := draft_vocabulary(drafter.drafted, target, batches)) is not None:
            drafter.set_maps(ids)
            rows = rows[ids]
        copy_head(drafter, rows.float() * SURENESS)
        return drafter

    def make_objective(
        self, run: MedusaRun, target: TargetSource, drafter: MedusaHeads
    ) -> MedusaObjective:
        # A run that begins with a drafter takes its shape, not that of `heads`.
        return MedusaObjective(run.objective, drafter.config.num_heads, target.head)

    @torch.no_grad()
    def teacher_forced(self, drafter: MedusaHeads, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return `ranks_by_root`; of `hidden` only the last state is read."""
        count, last = drafter.config.num_heads, hidden.last
        columns = VocabularyMap(drafter).columns(ids)
        return ranks_by_root(ids, count, columns, lambda i, rows: drafter.logits(last[:rows], i))

    def tree_of_evaluation(self, depths: int, tree_nodes: int) -> JsonObject:
        return {}  # the tree is grown from the rank accuracies


METHOD = MedusaMethod()
