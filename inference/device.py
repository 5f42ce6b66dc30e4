"""Small host values on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(values: Sequence[Any], device: torch.device) -> Tensor:
    """`values` as a tensor on `device`. From pageable memory a CUDA copy would wait for all queued
    work; pinned memory does not."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)
