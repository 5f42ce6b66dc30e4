"""Memory that a target's weights will take, read from the headers of its files before loading."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch

from ..heads.errors import UserError
from ..heads.layout import dtype_name
from ..heads.stored_tensors import header

FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element of the types that loading converts, by the names of safetensors."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of the weights in a folder's safetensors files."""

    floats: int
    """Number of elements that loading converts to the type asked for."""
    stored_bytes: int
    """Bytes of all tensors as they are stored."""
    other_bytes: int
    """Bytes of the tensors that loading leaves as they are, such as quantised ones."""

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights in memory, in `dtype`."""
        return self.floats * dtype.itemsize + self.other_bytes


def footprint(folder: str | Path) -> Footprint | None:
    """Return the footprint of the model in a folder.

    None if the folder holds no safetensors files, or does not exist, such as a name on the hub.
    Raises `UserError` for a file whose header cannot be read.
    """
    floats = stored_bytes = other_bytes = 0
    files = sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        for tensor in header(file).values():
            start, end = tensor.data_offsets
            stored_bytes += end - start
            if tensor.dtype in FLOATS:
                floats += prod(tensor.shape)
            else:
                other_bytes += end - start
    return Footprint(floats, stored_bytes, other_bytes) if files else None


def check_fits(path: str, dtype: torch.dtype | str, device: torch.device) -> None:
    """Raise `UserError` for a target on a CPU whose weights exceed all memory of this machine.

    Loading it would end in a process that the system kills without a message. Nothing is checked
    for a GPU (its allocator raises an error of its own), for a name on the hub, and for a `dtype`
    that is not known before loading.
    """
    weights = footprint(path)
    if weights is None or device.type != "cpu" or not isinstance(dtype, torch.dtype):
        return
    needed, installed = weights.loaded_bytes(dtype), psutil.virtual_memory().total
    if needed > installed:
        raise UserError(f"target {path} needs {too_large(weights, dtype, needed, installed)}")


def too_large(found: Footprint, dtype: torch.dtype, needed: int, there: int) -> str:
    """Return a phrase that says how much memory is missing, and what to do about it.

    `needed` and `there` are bytes: those of the weights in `dtype`, and those of the machine.
    """
    remedy = "use a machine with more memory, or share it between ranks with target.spread=fsdp"
    if dtype.itemsize > 2 and found.loaded_bytes(torch.bfloat16) < there:
        remedy = (
            "give --target.dtype bfloat16, which needs "
            f"{gigabytes(found.loaded_bytes(torch.bfloat16))}"
        )
    name = dtype_name(dtype)
    return f"{gigabytes(needed)} in {name}, of {gigabytes(there)} that there are; {remedy}"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
