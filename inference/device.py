"""Transfer of small host values to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Sequence[object], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, without waiting for the device.

    A CUDA copy from pageable memory waits for all queued work; one from pinned memory does not.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)
