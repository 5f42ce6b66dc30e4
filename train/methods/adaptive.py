"""Calibration of adaptive chains: tau and cost of each threshold, replayed over held-out texts.

Shapes: S positions of a text.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, takewhile

from torch import Tensor

from ...heads.files import JsonObject
from ...inference.proposers.draft_model import DEFAULT_LENGTH
from ...inference.replay import replay

LONGEST = 12  # drafts per round, at most, of the chains that are compared
THRESHOLDS = (0.0, *(round(0.05 * i, 2) for i in range(1, 16)))


def accepted_runs(right: Tensor, length: int) -> list[int]:
    """Return for each row how many rows from it on are `right` without a break, up to `length`.

    `right` `[S]` is a bool for each root: its next token is the drafter's best one.
    """
    runs, run = [], 0
    for value in reversed(right.tolist()):
        run = run + 1 if value else 0
        runs.append(run)
    return [min(run, length) for run in reversed(runs)]


def adaptive_calibration(outcomes: Sequence[tuple[Tensor, int]]) -> JsonObject:
    """Return the calibration of a draft model: tau and cost of adaptive chains on held-out texts.

    Its key `adaptive` has rows of [threshold, longest, tau, drafts per round], of which each has
    more of the last two than the row before; `best_adaptive` picks one.

    `outcomes` has a pair for each text: the table `[S, 2]` of `DistillMethod.teacher_forced` and
    the start of the reply. Rounds are replayed as in decoding. Drafts past the first wrong one are
    taken to be as likely as those of the text.
    """
    replies = [outcome[start:] for outcome, start in outcomes]
    right = [accepted_runs(reply[:, 0] > 0, LONGEST) for reply in replies]
    measured = []
    for threshold in THRESHOLDS:
        drafts = [chain_lengths(reply[:, 1], threshold, LONGEST) for reply in replies]
        for longest in range(1, LONGEST + 1):
            measured.append([threshold, longest, *tau_and_drafts(right, drafts, longest)])
    # Only settings that no other one beats in both figures: by ascending drafts per round, those
    # with a higher tau than all before.
    front: list[list[float]] = []
    for row in sorted(measured, key=lambda row: (row[3], -row[2])):
        if not front or row[2] > front[-1][2]:
            front.append(row)
    return {"length": DEFAULT_LENGTH, "adaptive": front}


def tau_and_drafts(
    right: list[list[int]], drafts: list[list[int]], longest: int
) -> tuple[float, float]:
    """Return tau and drafts per round of chains of at most `longest` drafts, over all texts.

    At each root of each text, `right` is how many drafts would be accepted and `drafts` how many
    the chain has without the limit.
    """
    emitted = drafted = rounds = 0
    for right_by_root, drafts_by_root in zip(right, drafts, strict=True):
        lengths = [min(count, longest) for count in drafts_by_root]
        # A round accepts what is right, as far as its chain goes.
        accepted = [min(*pair) for pair in zip(right_by_root, lengths, strict=True)]
        root = 0
        for count in replay(accepted, 0, len(accepted)):
            drafted += lengths[root]
            root += count
            emitted += count
            rounds += 1
    return emitted / max(rounds, 1), drafted / max(rounds, 1)


def chain_lengths(sure: Tensor, threshold: float, longest: int) -> list[int]:
    """Return how many drafts an adaptive chain has at each root, at most `longest`.

    `sure` `[S]` is the probability of the draft at each root. A chain ends with the draft that
    brings the product of its drafts' probabilities below `threshold`, as `grow_chain` does.
    """
    lengths = []
    # Drafts past the end of the text are as likely as its last one.
    chances = sure.tolist() + sure[-1:].tolist() * longest
    for root in range(len(sure)):
        products = accumulate(chances[root : root + longest], operator.mul)
        above = sum(1 for _ in takewhile(lambda product: product >= threshold, products))
        lengths.append(min(above + 1, longest))
    return lengths
