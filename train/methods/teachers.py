"""Teachers of unrolled drafts: whose distribution teaches which draft.

Shapes: B packed rows, S positions, D unrolled steps, J teacher positions, R roots, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...inference.rounds.device import send


class TeacherPlaces:
    """Tables of the drafts with weight, by teacher and by root.

    Step k of row t is taught by position t + 1 + k, so up to D drafts share one distribution of the
    target. Losses are computed by teacher, `[J, D]`, where that distribution is made once; dynamic
    weights and metrics couple the steps of a root, so they need the numbers by root, `[R, D]`.

    Example: prompt 0 .. 3, reply 4 .. 8, three steps. Roots' rows are t = 3 .. 6, teachers are
    4 .. 7. Teacher 6 teaches row 5 at step 0, row 4 at step 1 and row 3 at step 2.

        by teacher: row of each step        by root: teacher of each step
        teacher 4     3   -   -             row 3     4   5   6
        teacher 5     4   3   -             row 4     5   6   7
        teacher 6     5   4   3             row 5     6   7   -
        teacher 7     6   5   4             row 6     7   -   -

    Entry (teacher 7, step 1) of the one table is entry (row 5, step 1) of the other: rows of a
    table change, columns do not.
    """

    def __init__(self, weights: Tensor, device: torch.device) -> None:
        """`weights` `[B, S, D]` are those of each row at each step, 0 where it has none.

        They are on the CPU, so that nothing here waits for a device.
        """
        batch, length, steps = weights.shape
        valid = weights > 0
        k = torch.arange(steps)
        # The row that position j teaches at step k; before the text there is none.
        back = torch.arange(length)[:, None] - 1 - k
        by_teacher = (weights[:, back.clamp(min=0), k] * (back >= 0)).flatten(0, 1)
        has_draft = by_teacher > 0
        # From here on positions count through all packed rows: position t of row r is r * S + t. A
        # draft with weight never crosses into the next packed row, so t + 1 + k stays what it is.
        teachers = has_draft.any(-1).nonzero()[:, 0]
        valid = valid.flatten(0, 1)
        roots = valid.any(-1).nonzero()[:, 0]
        # Index of each position among the teachers, and among the roots' rows. A position that is
        # not among them gets the length of the list, where `by_root` and `to_teacher` add a row of
        # zeros. In the example among_teachers is 4 4 4 4 0 1 2 3 4 .., and among_roots is
        # 4 4 4 0 1 2 3 4 4.
        among_teachers = torch.full((batch * length + steps + 1,), len(teachers))
        among_teachers[teachers] = torch.arange(len(teachers))
        among_roots = torch.full((batch * length,), len(roots))
        among_roots[roots] = torch.arange(len(roots))
        # Both tables above as indices. In the example root_of has the rows 0 4 4 / 1 0 4 / 2 1 0 /
        # 3 2 1, and teacher_of 0 1 2 / 1 2 3 / 2 3 4 / 3 4 4.
        row_of = (teachers[:, None] - 1 - k).clamp(min=0)
        # A row may have weight at some steps only (row 6 of the example at step 0): the table of
        # the steps decides, not whether the row is in the list.
        root_of = torch.where(has_draft[teachers], among_roots[row_of], len(roots))
        # Without weight, t + 1 + k may lie past the last position: hence the longer table.
        teacher_of = torch.where(
            valid[roots], among_teachers[roots[:, None] + 1 + k], len(teachers)
        )
        self.teachers = send(teachers, device)
        self.weights = send(by_teacher[teachers].float(), device)
        self._row_of, self._root_of = send(row_of, device), send(root_of, device)
        self._teacher_of, self._k = send(teacher_of, device), send(k, device)

    def by_teacher(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of the steps, D tensors `[B, S, H]`, as `[J, D, H]`.

        Where a step has no weight, some other row is taken; its factor is 0.
        """
        columns = [x.flatten(0, 1)[self._row_of[:, k]] for k, x in enumerate(outputs)]
        return torch.stack(columns, dim=1)

    def by_root(self, table: Tensor) -> Tensor:
        """Return `[J, D]` by teacher as `[R, D]` by root, 0 where there is no weight."""
        return functional.pad(table, (0, 0, 0, 1))[self._teacher_of, self._k]

    def to_teacher(self, table: Tensor) -> Tensor:
        """Return `[R, D]` by root as `[J, D]` by teacher, 0 where there is no weight."""
        return functional.pad(table, (0, 0, 0, 1))[self._root_of, self._k]
