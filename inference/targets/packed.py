"""Matrices of a model in the order of blocks that oneDNN's kernels read fastest on a CPU.

Verifying a tree multiplies few rows with every matrix. torch's kernels for matrices as they are
stored take twice as long for four rows as for one; over packed matrices four to eight rows cost
little more than one (EXPERIMENTS.md, "Packed matrices"). On some machines oneDNN's products of one
to three rows are slower than those of four, and inputs are extended to four rows there. Near-ties
may be decided otherwise, since products round differently in another order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...heads.errors import UserError
from ...heads.files import whole_file
from ...heads.layout import dtype_name

log = logging.getLogger(__name__)

ROWS = 8  # rows that the order is chosen for; others may be given
TRIED_ROWS = (1, 2, 4, 8)
EXTENDED_ROWS = 4  # fewest rows that oneDNN's faster products take
TRIED_BYTES = 64 << 20  # weights of a trial: more than a cache of the processor holds
# Gains of matrices that were measured lie at 0.85 and below or at 1.0 and above, and vary by 5%:
# the border is between, so that a near-tie has one outcome. With 1.0 four rows gain what one loses.
LEAST_GAIN = 0.92
CLEAR = 1.1  # distance from it at which a trial that is not steady decides too
EXTENDED_GAIN = 1.2  # of a product of four rows over one of fewer; where there is one it is 1.3
REPEATS = 7
LONGEST_S = 1.5  # of the repeats for one number of rows
SMALLEST = 1 << 14  # entries of a matrix that a drafter's packing is worth
STEADY = 1.05  # third least time over the least, up to which a measurement is steady


class Packing(NamedTuple):
    """Outcome of a trial of packed matrices on this machine."""

    gain: float
    """Time over the matrices as stored as a multiple of that over packed ones."""
    least_rows: int = 1
    """Inputs of fewer rows are extended by zeros to so many."""


UNSTEADY = Packing(LEAST_GAIN)
"""Packing where a trial was neither steady nor clear: the outcome on most measured machines."""


class PackedLinear(nn.Module):
    """Linear layer with a packed matrix. It has no parameters: its weight cannot be trained."""

    def __init__(self, linear: nn.Linear, least_rows: int = 1) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.least_rows = least_rows
        self._packed = _packed(linear.weight)
        self.packed_bytes = linear.weight.nbytes
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
        if 0 < rows < self.least_rows:
            flat = functional.pad(x.reshape(rows, -1), (0, 0, 0, self.least_rows - rows))
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


@torch.no_grad()
def best_packing(linears: Sequence[nn.Linear]) -> Packing | None:
    """Return how to pack matrices if that is faster here by a measurement of some two seconds.

    None if it is not. The mean gain for one to eight rows counts, over the first of `linears`. It
    is kept on disk for the next process, which then decodes over the same matrices, with the same
    rounding, and finds what was compiled for them. The processor's time of one thread is measured,
    whatever the number of threads, so that the choice does not depend on how busy the machine is.
    Where even that varies and is near the border, matrices are packed (`UNSTEADY`).
    """
    weights: list[Tensor] = []
    for linear in linears:
        if sum(weight.nbytes for weight in weights) < TRIED_BYTES:
            weights.append(linear.weight.detach())
    if not weights or weights[0].device.type != "cpu":
        return None
    trial = _name_of(weights)
    packing = _kept_packings().get(trial)
    if packing is None:
        try:
            packed = [_packed(weight) for weight in weights]
            with one_thread():
                times = [_times(weights, packed, rows) for rows in TRIED_ROWS]
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            log.debug("matrices cannot be packed here: %s", error)
            return None
        packing = _packing_by(times)
        if all(steady for *_, steady in times):
            _keep_packing(trial, packing)
        elif 1 / CLEAR < packing.gain / LEAST_GAIN < CLEAR:
            # The next process measures again.
            packing = UNSTEADY
            log.info(
                "the trial of how matrices are laid out was not steady, since the machine is busy: "
                "they are packed, as on most machines"
            )
    log.debug("packed matrices are %.2f times as fast, least rows %d", *packing)
    return packing if packing.gain >= LEAST_GAIN else None


def _packing_by(times: Sequence[tuple[float, float, bool]]) -> Packing:
    """Return what the `_times` for `TRIED_ROWS` say."""
    stored, packed = [time[0] for time in times], [time[1] for time in times]
    few = TRIED_ROWS.index(EXTENDED_ROWS)
    extended = min(packed[:few]) > EXTENDED_GAIN * packed[few]
    if extended:
        packed[:few] = [packed[few]] * few
    gains = [own / other for own, other in zip(stored, packed, strict=True)]
    return Packing(statistics.geometric_mean(gains), EXTENDED_ROWS if extended else 1)


def _packings_file() -> Path:
    folder = os.environ.get("DRAFTSMITH_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder or Path(caches, "draftsmith")) / "packing.json"


def _name_of(weights: list[Tensor]) -> str:
    """Return the name of a trial: whatever its outcome depends on."""
    shapes = json.dumps([list(weight.shape) for weight in weights])
    return (
        f"{processor()}, torch {torch.__version__}, {dtype_name(weights[0].dtype)}, "
        f"processor time, {len(weights)} matrices "
        f"{hashlib.sha256(shapes.encode()).hexdigest()[:12]}"
    )


def processor() -> str:
    """Return the name of this machine's processor, as far as the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def _kept_packings() -> dict[str, Packing]:
    """Return what was measured before; entries that are damaged are measured again."""
    kept = {}
    try:
        entries = msgspec.json.decode(_packings_file().read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RuntimeError):  # the last where a user has no home folder
        return {}
    for trial, entry in entries.items():
        with suppress(ValueError):
            kept[trial] = msgspec.convert(entry, Packing)
    return kept


def _keep_packing(trial: str, packing: Packing) -> None:
    """Write a packing down. Where that cannot be done, the next process measures again."""
    kept = {**_kept_packings(), trial: packing._replace(gain=round(packing.gain, 3))}
    try:
        with whole_file(_packings_file()) as aside:
            aside.write_text(json.dumps(kept, indent=1))
    except (OSError, RuntimeError, UserError) as error:
        log.debug("the measured gain is not kept: %s", error)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread within: the processor's time is that of the work alone.

    Of several threads those that have finished wait for the others, in a loop that takes time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _times(weights: list[Tensor], packed: list[Tensor], rows: int) -> tuple[float, float, bool]:
    """Return the seconds of a pass over `weights`, over `packed`, and True if both were steady.

    They are seconds of this thread, which other work on the machine takes less of, and are measured
    until the three least are nearly equal, for `LONGEST_S` at most.
    """
    inputs = {weight.shape[1]: weight.new_ones(rows, weight.shape[1]) for weight in weights}
    times: tuple[list[float], list[float]] = ([], [])
    until, steady = time.monotonic() + LONGEST_S, False
    while len(times[0]) < REPEATS or (not steady and time.monotonic() < until):
        start = time.thread_time()
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)
        middle = time.thread_time()
        for weight, matrix in zip(weights, packed, strict=True):
            _product(inputs[weight.shape[1]], matrix, None)
        times[0].append(middle - start)
        times[1].append(time.thread_time() - middle)
        # Other work only ever adds time, such as by what it leaves in the caches.
        steady = all(sorted(some)[:3][-1] <= STEADY * min(some) for some in times)
    return min(times[0]), min(times[1]), steady


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


def pack_linears(model: nn.Module, layers: Sequence[nn.Module] = (), least_rows: int = 1) -> None:
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
                packed = PackedLinear(linear, least_rows)
                first = linear.weight.data_ptr()
                joints.append((first, first + linear.weight.nbytes, packed))
                setattr(layer, name, packed)
    shared: dict[tuple[int, int], nn.Module] = {}
    for owner, name, part in list(linears_of(model)):
        key = id(part.weight), id(part.bias)
        if key not in shared:
            shared[key] = _part_of(joints, part) or PackedLinear(part, least_rows)
        setattr(owner, name, shared[key])


def pack_drafter(drafter: Any) -> None:
    """Replace the linear layers of a drafter by packed ones where a measurement finds that faster.

    Those that it reads in parts and small ones stay.
    """
    found = [
        (owner, name, linear)
        for owner, name, linear in linears_of(drafter)
        if name not in drafter.read_in_parts and linear.weight.numel() >= SMALLEST
    ]
    if packing := best_packing([linear for *_, linear in found]):
        for owner, name, linear in found:
            setattr(owner, name, PackedLinear(linear, packing.least_rows))


def packed_bytes(module: nn.Module) -> int:
    """Return the bytes of the packed matrices of a module."""
    return sum(part.packed_bytes for part in module.modules() if isinstance(part, PackedLinear))


def _part_of(joints: list[tuple[int, int, PackedLinear]], part: nn.Linear) -> nn.Module | None:
    """Return what computes a linear layer whose matrix is a view of one in `joints`, or None."""
    address = part.weight.data_ptr()
    for first, last, packed in joints:
        if first <= address < last:
            start = (address - first) // (part.in_features * part.weight.element_size())
            end = start + part.out_features
            return packed if end - start == packed.out_features else PackedPart(packed, start, end)
    return None
