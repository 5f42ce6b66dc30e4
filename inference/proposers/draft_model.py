"""A small causal language model of the same tokenizer as drafter (arXiv 2211.17192): it writes a
chain or a tree by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ...heads.errors import UserError
from ..cache import TreeCache
from ..device import send
from ..proposer import Accepted, Prompts
from ..replay import replay
from ..sampling import Draws
from ..target import Target
from ..tree import DraftTree
from ..tree_settings import TreeSettings
from .autoregressive import TreeRunner, commit_accepted, depth_row, fit_vocabulary
from .tree_plan import Planned, TreePlan

DEFAULT_LENGTH = 4
DEFAULT_TREE = TreeSettings()
LONGEST = 12  # drafts a round that `calibrate` looks at
DRAFT_COST = 0.25  # of a draft, in target passes, if nobody measured it
THRESHOLDS = (0.0, *(round(0.05 * i, 2) for i in range(1, 16)))


class DraftModelProposer(Planned):
    """Its cache holds the decided text; the one token that a fully accepted draft leaves unseen is
    fed with the next root."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Target, vocab_size: int, settings: TreeSettings = DEFAULT_TREE
    ) -> None:
        """`vocab_size`: the target's, which the draft model's may differ from. A chain, if `width`
        is not set."""
        self.name = "draft-model"
        self.model, self._vocab_size = model, vocab_size
        self.replan(TreePlan(settings.or_else(length=DEFAULT_LENGTH, width=1)))
        self._cache = TreeCache(0, 0)
        self._before: Tensor  # [B], the token before the root
        self._slots: Tensor

    def prefill(self, prompts: Prompts) -> None:
        batch, length = prompts.ids.shape
        longest = self.model.max_positions
        self._cache = TreeCache(
            batch, min(2 * length + 64, longest) + self.max_drafted, self.model.device
        )
        # The draft model's vocabulary may be smaller than the target's.
        known = prompts.ids.clamp(max=self.model.vocab_size - 1)
        # `tokens` has one token more than the prompt: the first root.
        lengths = [len(tokens) - 1 for tokens in prompts.tokens]
        self.model.prefill(known, lengths, self._cache)
        self._before = prompts.ids.gather(1, prompts.lengths[:, None] - 1)[:, 0]
        self._behind = False  # whether some row's cache ends before the token before the root
        self._text_lengths = list(self._cache.lengths)

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        first = fit_vocabulary(self.model.head(self._catch_up(root)), self._vocab_size)
        go_on = TreeRunner(self.model, self._cache, self._vocab_size)
        tree, self._slots = self.plan.draft(first, root, draws, go_on)
        return tree

    def _catch_up(self, root: Tensor) -> Tensor:
        """Run the root, behind the token before it where a row has not seen that one, and give the
        root's feature `[B, H]`.

        A row that has seen it writes the same values once more, so all rows take one forward of one
        shape.
        """
        tokens = torch.stack([self._before, root], dim=1) if self._behind else root[:, None]
        count = tokens.shape[1]
        self._cache.lengths = [length + 1 - count for length in self._text_lengths]
        depths = depth_row(tuple(range(count)), root.device)
        causal = (
            None
            if count == 1
            else torch.ones(1, count, count, dtype=torch.bool, device=root.device).tril()
        )
        hidden = self.model.forward_tree(tokens, causal, depths, depths, self._cache)
        self._cache.commit([count] * len(self._text_lengths))
        return hidden.last[:, -1]

    def commit(self, accepted: Accepted) -> None:
        commit_accepted(self._cache, self.plan, self._slots, accepted)
        self._text_lengths = [
            length + len(nodes)
            for length, nodes in zip(self._text_lengths, accepted.nodes, strict=True)
        ]
        self._behind = self._cache.lengths != self._text_lengths
        self._before = accepted.ids.gather(1, accepted.counts[:, None] - 1)[:, 0]

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        self._text_lengths = [self._text_lengths[row] for row in rows]
        self._before = self._before[send(rows, self._before.device)]

    def finish(self) -> None:
        self._cache = TreeCache(0, 0)


def make_proposer(
    artifact: Artifact, settings: TreeSettings = DEFAULT_TREE, cost: float = DRAFT_COST
) -> DraftModelProposer:
    """Return the trained draft model at work.

    `threshold` "auto": the best of those measured on held-out texts, if a draft takes `cost` of the
    time of a target pass. Raises `UserError`.
    """
    if settings.threshold == "auto":
        if not artifact.calibration.get("adaptive"):
            raise UserError(
                "this draft model has no calibrated threshold; give a number, such as threshold=0.3"
            )
        threshold, longest = best_adaptive(artifact.calibration, cost)
        settings = replace(settings, threshold=threshold).or_else(length=longest)
    proposer = on_model(artifact.drafter, settings)
    proposer.name = "distilled-lm"
    return proposer


def load_draft_model(
    folder: str, target: Target, settings: TreeSettings = DEFAULT_TREE
) -> DraftModelProposer:
    """Return the model in `folder` as drafter for `target`. Raises `UserError` if it does not share
    the target's tokenizer."""
    if settings.threshold == "auto":
        raise UserError(
            f"{folder} was not trained here and has no calibrated threshold; give a number, such "
            "as threshold=0.3"
        )
    drafter = DraftModel.load(Path(folder), target.dtype, target.embedding_and_head)
    drafter.model.to(target.device)
    return on_model(drafter, settings)


def on_model(drafter: DraftModel, settings: TreeSettings) -> DraftModelProposer:
    """Return the proposer of a loaded draft model. Raises `UserError` where it cannot run trees."""
    runner = Target(drafter.model, drafter.tokenizer, "the draft model", frozen=False)
    runner.check_tree()
    return DraftModelProposer(runner, drafter.vocab_size, settings)


def accepted_by_root(outcome: Tensor, calibration: dict[str, Any]) -> list[int]:
    """How many drafts of a greedy chain are right at each root; `outcome` `[S, 2]` as in
    `calibrate`."""
    return accepted_runs(outcome[:, 0] > 0, calibration["length"])


def accepted_runs(right: Tensor, length: int) -> list[int]:
    """For each root of a text, how many of the next `length` rows are `right` `[S]` without a
    break."""
    runs, run = [], 0
    for value in reversed(right.tolist()):
        run = run + 1 if value else 0
        runs.append(run)
    return [min(run, length) for run in reversed(runs)]


def calibrate(outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> dict[str, Any]:
    """What adaptive chains give on held-out texts: `adaptive`, rows of [threshold, longest, tau,
    drafts a round], each with more of the last two than the one before; `best_adaptive` picks one.

    `outcomes`: for each text `[S, 2]`, whether the drafter's best token after each row is the
    text's own next one, and how likely the drafter held it; and where the reply begins. Rounds are
    replayed as decoding replays them; drafts past the first wrong one are taken to be as sure as
    those of the text.
    """
    replies = [outcome[start:] for outcome, start in outcomes]
    right = [accepted_runs(reply[:, 0] > 0, LONGEST) for reply in replies]
    found = []
    for threshold in THRESHOLDS:
        sure = [chain_lengths(reply[:, 1], threshold, LONGEST) for reply in replies]
        for longest in range(1, LONGEST + 1):
            kept = drafted = rounds = 0
            for runs, lengths in zip(right, sure, strict=True):
                lengths = [min(length, longest) for length in lengths]
                root = 0
                for count in replay(
                    [min(pair) for pair in zip(runs, lengths, strict=True)], 0, len(runs)
                ):
                    drafted += lengths[root]
                    root += count
                    kept, rounds = kept + count, rounds + 1
            found.append([threshold, longest, kept / max(rounds, 1), drafted / max(rounds, 1)])
    front: list[list[float]] = []
    for row in sorted(found, key=lambda row: (row[3], -row[2])):
        if not front or row[2] > front[-1][2]:
            front.append(row)
    return {"length": DEFAULT_LENGTH, "adaptive": front}


def best_adaptive(calibration: dict[str, Any], cost: float) -> tuple[float, int]:
    """Threshold and longest chain of most tokens a time, if a draft takes `cost` of the time of a
    target pass."""
    threshold, longest, *_ = max(
        calibration["adaptive"], key=lambda row: row[2] / (1 + cost * row[3])
    )
    return threshold, int(longest)


def chain_lengths(sure: Tensor, threshold: float, longest: int) -> list[int]:
    """From each root `[S]`, how many drafts an adaptive chain takes: it ends with the one that
    takes the product below."""
    lengths = []
    chances = sure.tolist()
    for root in range(len(chances)):
        product, count = 1.0, 0
        while count < longest:
            product *= chances[min(root + count, len(chances) - 1)]
            count += 1
            if product < threshold:
                break
        lengths.append(count)
    return lengths
