"""The device: settings of the process, and transfer of small host values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def prepare(device: torch.device) -> None:
    """Set what holds for the whole process where models run on a kind of device."""
    if device.type == "cuda":
        # cuDNN's attention makes a plan for each length of the keys, 20 to 40 ms on an H100 by
        # others' traces, and eager rounds have new lengths all the time.
        torch.backends.cuda.enable_cudnn_sdp(False)


def read_later(tensor: Tensor) -> Callable[[], Any]:
    """Begin to bring a tensor to the host.

    Returns a function that waits until it is there and returns its values as lists. It does not
    wait for what is launched in between.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> Any:
        arrived.synchronize()
        return values.tolist()

    return read


def send(values: Tensor | Sequence[object], device: torch.device) -> Tensor:
    """Return `values`, numbers or a tensor on the host, on `device`, without waiting for it.

    A CUDA copy from pageable memory waits for all queued work; one from pinned memory does not.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def row_of(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `numbers` as a tensor `[1, N]`, cached, as every round needs the same few."""
    if torch.compiler.is_compiling():
        # A compiler does not look into a cache, and a captured graph takes no numbers of the host.
        return torch.stack([torch.full((), number, device=device) for number in numbers])[None]
    return _kept_row(numbers, device)


@lru_cache(maxsize=256)
def _kept_row(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([numbers], device=device)
