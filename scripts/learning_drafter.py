"""A drafter of your own that learns, to copy and change; docs/your-own-drafter.md explains it.

A recurrent cell (GRU) reads the root and one draft after another; the target's own head gets its
state with the target's newest one (in the manner of ReDrafter, arXiv 2403.09919). Shapes: R rows,
each before a root; D drafts; C the cell's state; H the target's hidden size; V vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.distill.divergences import log_probs, loss_of_logits, sum_in_chunks
from draftsmith.heads.layout import DrafterModule
from draftsmith.inference.proposers.tree_plan import NewestStateProposer, TreePlan, tree_of
from draftsmith.train.config import RunConfig
from draftsmith.train.losses.calibration import RankedMethod, ranks_by_root
from draftsmith.train.objectives import Objective, depth_metrics
from draftsmith.train.outline import FROZEN, TRAINED, Outline, matrix_numbers


@dataclass
class GruRun(RunConfig):
    """Train a recurrent cell that drafts for a frozen target."""

    size: int = 384
    """Size of the cell's state."""
    length: int = 4
    """Drafts of a chain in training; levels of a draft tree by default."""


class GruDrafter(DrafterModule, nn.Module):
    method, kind, drafts_by_level, borrows_head = f"{__name__}:Gru", "gru", True, True

    def __init__(self, embedding_and_head: Any, size: int, length: int, hidden: int) -> None:
        super().__init__()
        self.embedding_and_head, self.length = embedding_and_head, length  # the target's, frozen
        self.begin, self.cell = nn.Linear(hidden, size), nn.GRU(hidden, size, batch_first=True)
        self.out = nn.Linear(hidden + size, hidden)

    def facts(self) -> dict[str, Any]:
        return dict(size=self.cell.hidden_size, length=self.length, hidden=self.cell.input_size)

    def read(self, ids: Tensor, state: Tensor) -> Tensor:
        """Return the states `[R, D, C]` after each of the tokens `ids` `[R, D]`, from `[R, C]`."""
        return self.cell(self.embedding_and_head.embed(ids).to(state.dtype), state[None])[0]

    def logits(self, last: Tensor, cell: Tensor) -> Tensor:
        """Return `[R, D, V]` of states `cell`; `last` `[R, H]` is the target's, before the root."""
        last = last[:, None].expand(-1, cell.shape[1], -1)
        return self.embedding_and_head.head(last + self.out(torch.cat([last, cell], dim=-1)))


class GruObjective(Objective):  # KL from the target's distributions
    taps, all_last = (), False  # of the target: its last state, where it wrote the next token

    def __init__(self, length: int, target_head: Any) -> None:
        self.length, self.target_head = length, target_head

    def weights(self, batch: Any) -> dict[str, float]:
        return {"drafts": float(batch.learned(self.length).sum())}

    def forward(self, drafter: Any, features: Any, denominators: Any, measured: bool = True) -> Any:
        states = features.last.flatten(0, 1)
        rows, teachers, text, valid = features.batch.roots(self.length).on(states.device)
        last, head = states[rows].to(drafter.out.weight.dtype), list(drafter.out.parameters())
        cell = drafter.read(text[:, :-1], drafter.begin(last))

        def table(cell: Tensor, last: Tensor, teachers: Any, labels: Any, factors: Any) -> Any:
            log_p = log_probs(self.target_head(states[teachers]))
            found = loss_of_logits("kl", drafter.logits(last, cell), log_p, labels, log_p.exp())
            right = found.best == log_p.argmax(-1)
            return (found.losses * factors).sum(), found.losses, right, found.overlaps

        given = last, teachers, text[:, 1:], valid / max(denominators["drafts"], 1)
        loss, losses, right, alpha = sum_in_chunks(table, cell, given, head, 256)
        return loss, depth_metrics(losses, right, alpha, valid) if measured else {}


class GruProposer(NewestStateProposer):
    def __init__(self, artifact: Any, settings: Any) -> None:
        self.drafter, self.name = artifact.drafter, artifact.drafter.kind
        settings = settings.or_else(width=4)
        self.replan(TreePlan(tree_of(settings, artifact.calibration, self.drafter.length)))

    def propose(self, root: Tensor, draws: Any) -> Any:
        last = self.newest.to(self.drafter.out.weight.dtype)
        cell = self.drafter.read(root[:, None], self.drafter.begin(last))

        def go_on(level: Any) -> Tensor:  # a level of the draft tree, B rows of N nodes
            nonlocal cell
            before = cell.gather(1, level.above[..., None].expand(-1, -1, cell.shape[-1]))
            tokens = level.tokens.clamp(min=0).view(-1, 1)  # missing nodes are -1
            cell = self.drafter.read(tokens, before.flatten(0, 1)).view_as(before)
            return self.drafter.logits(last, cell)

        return self.plan.draft(self.drafter.logits(last, cell)[:, 0], root, draws, go_on)[0]


class Gru(RankedMethod[GruRun, GruDrafter]):
    run_class, drafter_class, proposer_class = GruRun, GruDrafter, GruProposer

    def make_drafter(self, run: GruRun, target: Any, *_: Any) -> GruDrafter:
        return GruDrafter(target.embedding_and_head, run.size, run.length, target.hidden_size)

    def make_objective(self, run: GruRun, target: Any, drafter: GruDrafter) -> GruObjective:
        return GruObjective(drafter.length, target.head)

    def outline(self, run: GruRun, target: Any) -> Outline:
        drafter = self.make_drafter(run, target)
        each = TRAINED * matrix_numbers(drafter) + FROZEN * target.vocab_size * target.hidden_size
        return Outline(drafter, head_operations=run.length * each, logit_rows=256 * run.length)

    def teacher_forced(self, drafter: GruDrafter, hidden: Any, ids: Tensor) -> Tensor:
        last, length = hidden.last, drafter.length
        text = nn.functional.pad(ids, (0, length))[1:].unfold(0, length, 1)
        cell = drafter.read(text, drafter.begin(last))
        return ranks_by_root(
            ids, length, ids, lambda d, n: drafter.logits(last[:n], cell[:n, d, None])[:, 0]
        )
