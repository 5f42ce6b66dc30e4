"""Work that the first rank does alone, while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ...heads.errors import UserError

T = TypeVar("T")
PREPARING = timedelta(hours=6)
"""Longest wait for what the first rank does alone, such as preparing the data (`on_first`)."""
_patient: list[Any] = []  # the default group, and one of the same ranks that waits for longer


def on_first(work: Callable[[], T]) -> T:
    """Run `work` on the first rank and return its result on every rank; all ranks call this.

    Its `UserError` is raised on every rank too. Otherwise the others would wait for the first,
    which has ended.
    """
    if not torch.distributed.is_initialized():
        return work()
    outcome: list[Any] = [None, None]  # result, error message
    if torch.distributed.get_rank() == 0:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = str(error)
    # A collective operation, which every rank has to reach: hence the `try` above.
    torch.distributed.broadcast_object_list(outcome, 0, _patient_group())
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


def _patient_group() -> Any:
    """Return the group of all ranks that waits as long as `PREPARING`; all ranks call this.

    It is of gloo, which notices at once if a process has ended, and lets no GPU wait.
    """
    world = torch.distributed.group.WORLD
    if not _patient or _patient[0] is not world:
        _patient[:] = world, torch.distributed.new_group(backend="gloo", timeout=PREPARING)
    return _patient[1]
