"""Division of a step's packed rows among ranks and forward passes.

A configuration states the rows of a step, which mean the same on any number of ranks; how many
forward passes a rank makes of its share follows from the rows that one pass may have.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..heads.errors import UserError
from ..inference.console import several
from .config import RunConfig

LEAST_STEPS = 50  # between two evaluations that are asked for as a share of a run


@dataclass(frozen=True)
class Division:
    """Share of one rank in a step."""

    rows: int
    """Packed rows of a forward pass."""
    passes: int
    """Forward passes of a step; the gradients are added up."""


def divided(run: RunConfig, ranks: int) -> Division:
    """Return the share of each of `ranks` in a step of the run, with as few passes as fit.

    Raises `UserError` where the rows of a step cannot be shared evenly, with the nearest that can.

    Example: 24 rows a step on 2 ranks with at most 5 rows a pass are 3 passes of 4 rows.
    """
    rows, most = run.rows_per_step, run.batch_rows
    share, left_over = divmod(rows, ranks)
    if left_over or not share:
        nearest = [number * ranks for number in (share, share + 1) if number]
        raise UserError(
            f"a step of {several(rows, 'row')} cannot be shared evenly by "
            f"{several(ranks, 'rank')}; use --rows-per-step {' or '.join(map(str, nearest))}, or "
            f"{several(most_ranks(rows, ranks), 'rank')}"
        )
    passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= most)
    return Division(share // passes, passes)


def most_ranks(rows: int, ranks: int) -> int:
    """Return the most of at most `ranks` ranks that can share `rows` evenly."""
    return max(number for number in range(1, min(rows, ranks) + 1) if rows % number == 0)


def interval(every: int | float, total_steps: int) -> int:
    """Return the steps between two events of which one comes `every` steps.

    A float of at most 1 is a share of the run: 0.1 of 1,000 steps are 100, and 1.0 all of them,
    where the integer 1 is a single step. A share is at least `LEAST_STEPS`, or half of the run if
    that is less: ten evaluations of a run of 30 steps would take most of its time.
    """
    if isinstance(every, float) and every <= 1:
        return max(1, round(every * total_steps), min(LEAST_STEPS, total_steps // 2))
    return max(1, round(every))
