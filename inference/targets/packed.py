"""Matrices of a model in the order of blocks that oneDNN's kernels read fastest on a CPU.

Verifying a tree multiplies few rows with every matrix. torch's kernels for matrices as they are
stored take twice as long for four rows as for one; over packed matrices four to eight rows cost
little more than one. Near-ties may be decided otherwise, since products round differently in
another order.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 8  # rows that the order is chosen for; others may be given
FEWEST_BYTES = 64 << 20
"""Least size of the matrices of a model that are packed. Smaller ones stay in the processor's
cache. Without packing the quickstart target (14 MB) decodes at 0.99 to 1.00 of the speed that it
had with a measured choice, on a Xeon; on an EPYC packing had gained 1.2 to 1.45 there, which the
rule gives up."""


class PackedLinear(nn.Module):
    """Linear layer with a packed matrix. It has no parameters: its weight cannot be trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _packed(linear.weight)
        self._least = min_padded_rows(self.dtype)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._number = next(_NUMBERS)
        _LAYERS[self._number] = self
        # an input and its product, while the parts of a joint matrix read it
        self._last: tuple[Tensor, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        """The matrix `[out, in]` as it was stored, made again each time."""
        return self._packed.to_dense()

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.draftsmith.packed_linear(x, self._number, self.out_features)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if 0 < rows < self._least:
            flat = functional.pad(x.reshape(rows, -1), (0, 0, 0, self._least - rows))
            product = _product(flat, self._packed, self._bias)[:rows]
            return product.view(*x.shape[:-1], self.out_features)
        return _product(x, self._packed, self._bias)

    def part(self, x: Tensor, outputs: slice) -> Tensor:
        """Return some of the outputs for `x`; parts in order, up to the last, share one product."""
        last = self._last  # read once: another thread may run the same layer
        if last is None or last[0] is not x:
            last = self._last = x, self(x)
        product = last[1]
        if outputs.stop == self.out_features:
            self._last = None
        return product[..., outputs]


class PackedPart(nn.Module):
    """Outputs `start` to `end` of a packed layer, in place of a layer whose matrix was joined."""

    def __init__(self, whole: PackedLinear, start: int, end: int) -> None:
        super().__init__()
        self._whole, self._outputs = [whole], slice(start, end)  # a list: not a part of this one

    @property
    def weight(self) -> Tensor:
        return self._whole[0].weight[self._outputs]

    def forward(self, x: Tensor) -> Tensor:
        return self._whole[0].part(x, self._outputs)


# A compiler cannot handle a packed matrix, and is shown an operator that takes a layer's number.
# Numbers follow the order of loading, so that a compiled function on disk fits the next process.
_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_OPERATORS = torch.library.Library("draftsmith", "DEF")
_OPERATORS.define("packed_linear(Tensor x, int number, int outputs) -> Tensor")


def _packed_linear(x: Tensor, number: int, _outputs: int) -> Tensor:
    return _LAYERS[number].product(x)


def _empty_product(x: Tensor, _number: int, outputs: int) -> Tensor:
    """Return a tensor of the shape and dtype of `_packed_linear`, for a compiler."""
    return x.new_empty(*x.shape[:-1], outputs)


_OPERATORS.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("draftsmith::packed_linear", _empty_product, lib=_OPERATORS)


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


@cache
def packable(dtype: torch.dtype) -> bool:
    """Return whether this machine packs matrices of `dtype`; bfloat16 needs its instructions."""
    try:
        _packed(torch.ones(ROWS, ROWS, dtype=dtype))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pays_to_pack(linears: Sequence[nn.Linear]) -> bool:
    """Return True if matrices that are multiplied one after another are better packed.

    A rule, and no measurement: two processes decode over the same matrices, with the same rounding.
    """
    weights = [linear.weight for linear in linears]
    large = sum(weight.nbytes for weight in weights) >= FEWEST_BYTES
    return large and weights[0].device.type == "cpu" and packable(weights[0].dtype)


@cache
def min_padded_rows(dtype: torch.dtype) -> int:
    """Return to how many rows inputs of fewer are extended by zeros.

    On AMD's processors oneDNN's products of one to three rows over packed float32 matrices take 1.3
    times as long as those of four; on Intel's, and in bfloat16, they do not.
    """
    return 4 if dtype == torch.float32 and "AMD" in processor() else 1


def processor() -> str:
    """Return the name of this machine's processor, as far as the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def is_plain(module: Any) -> bool:
    """Return True for a linear layer over a matrix of numbers, which no subclass quantises."""
    # torchao keeps a quantised matrix in a subclass of tensors, with the type of its products.
    return type(module) is nn.Linear and not hasattr(module.weight, "__tensor_flatten__")


def linears_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return each plain linear layer of a model, with its owner and its name there."""
    found = []
    for owner in model.modules():
        part: Any
        for name, part in owner.named_children():
            if is_plain(part) and part.weight.is_floating_point():
                found.append((owner, name, part))
    return found


def pack_linears(model: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
    """Replace the linear layers of `model` by packed ones; their matrices are released.

    Layers with the same matrix, as Zamba2's shared blocks have, become one. `layers` are
    `DecoderLayer`s that share the model's matrices (`fused.FusedDecoder`). Their joint matrices are
    packed first, and the model's parts of them read these.
    """
    # first and last address of each joint matrix, and the packed layer
    joints: list[tuple[int, int, PackedLinear]] = []
    for layer in layers:
        for name in ("qkv", "output", "gate_up", "down"):
            linear = getattr(layer, name)
            if is_plain(linear):
                packed = PackedLinear(linear)
                first = linear.weight.data_ptr()
                joints.append((first, first + linear.weight.nbytes, packed))
                setattr(layer, name, packed)
    shared: dict[tuple[int, int], nn.Module] = {}
    for owner, name, part in list(linears_of(model)):
        key = id(part.weight), id(part.bias)
        if key not in shared:
            shared[key] = _part_of(joints, part) or PackedLinear(part)
        setattr(owner, name, shared[key])


def _part_of(joints: list[tuple[int, int, PackedLinear]], part: nn.Linear) -> nn.Module | None:
    """Return what computes a linear layer whose matrix is a view of one in `joints`, or None."""
    address = part.weight.data_ptr()
    for first, last, packed in joints:
        if first <= address < last:
            start = (address - first) // (part.in_features * part.weight.element_size())
            end = start + part.out_features
            return packed if end - start == packed.out_features else PackedPart(packed, start, end)
    return None
