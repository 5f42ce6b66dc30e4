"""Memory of a training step on a GPU, from a run of the step itself on tensors without memory.

The run's own target, drafter and objective run under torch's `FakeTensorMode`, and the storage of
every tensor is followed from its making to its end. (Torch's own `MemTracker` fails on modules that
are frozen, as a target is.) The device is the CPU, since fake CUDA tensors have no backward pass
where torch has no CUDA; shapes and autocast are those of a GPU. Attention is replaced by what its
kernels for GPUs hold: queries, keys, values, output and log-sums, and never scores. The allocator's
own losses, CUDA's context (about 0.5 GB) and NCCL's buffers are not counted.

Shapes: B packed rows, S positions, G attention heads, Gkv key-value heads, E head size.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ...heads.draft_model import DraftModel
from ...heads.errors import UserError, first_line
from ...heads.pretrained import make_causal_lm
from ...inference.targets.masks import Pass
from ...inference.targets.target import Target
from ..config import RunConfig
from ..data.batches import Batch, collate
from ..data.features import Features
from ..division import divided
from ..method import AnyMethod
from ..methods.backends import standing_in
from ..methods.draft_model import runner_of
from ..objectives import TrainingModule
from ..outline import ConfigOnly, config_at
from ..schedule import hidden_matrices

# The CPU by another name, so that its tensors differ from those of the host.
DEVICE = torch.device("cpu", 0)
LONGEST = 4096  # tokens of a document
NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
MOMENT_BYTES = 8  # of a trained parameter: AdamW's two moments in float32
MUON_BYTES = 4  # of a parameter that Muon trains: one moment


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a GPU that holds a whole target and a whole drafter."""

    target: int
    """Weights of the target's language model in bf16; of a run from a feature store, those of its
    embedding and head."""
    drafter: int
    """Weights of the drafter in float32."""
    moments: int
    """AdamW's two moments."""
    gradients: int
    """Gradients of the drafter in float32; part of `step`."""
    features: int
    """Hidden states of one batch, in the target's dtype."""
    extraction: int
    """The most that the target's forward pass takes besides these; 0 from a feature store."""
    activations: int
    """Bytes that the drafter's forward pass leaves for its backward pass."""
    step: int
    """The most that both passes take besides weights, moments and features, gradients included."""

    @property
    def resident(self) -> int:
        """Bytes between two steps."""
        return self.target + self.drafter + self.moments

    @property
    def peak(self) -> int:
        return self.resident + max(self.extraction, self.features + self.step)


class WithoutMemory(TorchDispatchMode):
    """Gives no memory to tensors on `DEVICE`, and to what is computed with them.

    Tensors of the host are real: objectives find rows and chunks there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        some_fake = any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs)))
        if not some_fake and kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)

        def without_memory(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
                return x
            # Of the host's tensors only scalars may be mixed with those of a device.
            fake = self.fake.from_tensor(x)
            return fake if x.ndim == 0 or kwargs.get("device") == DEVICE else fake.to(DEVICE)

        args, kwargs = tree_map(without_memory, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)


class Tracker(TorchDispatchMode):
    """Counts the bytes of tensors that are made on a device within, and of those still there."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self._device = device
        self.now, self.peak = 0, 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):  # made before, if it is not known
                self._known.setdefault(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device == self._device:
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = storage.nbytes()
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class KernelShapes(torch.autograd.Function):
    """Output `[B, G, S, E]` and log-sums `[B, G, S]` of a fused kernel, without numbers."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        output = queries.new_empty(*queries.shape[:-1], values.shape[-1])
        log_sums = queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, output, log_sums)
        return output, log_sums

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        queries, keys, values, _, log_sums = ctx.saved_tensors
        # Kernels make the products of output and gradient first, one number for each row.
        _products = torch.empty_like(log_sums)
        return tuple(torch.empty_like(x) for x in (queries, keys, values))


class ExpertShapes(torch.autograd.Function):
    """Products `[R, N]` of rows `[R, K]` with the matrices `[X, K, N]` of X experts, no numbers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, experts)
        return rows.new_empty(len(rows), experts.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


GROUPED = {
    function
    for module, name in ((functional, "grouped_mm"), (torch, "_grouped_mm"))
    if (function := getattr(module, name, None)) is not None
}
"""Products by experts, by the names that versions of torch give them."""


class FusedKernels(TorchFunctionMode):
    """Stands in for torch's attention, of the target and of draft models, and for experts.

    Shapes of experts' products are known to torch in bfloat16 only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            queries, keys, values = (*args, *(kwargs or {}).values())[:3]
            return KernelShapes.apply(queries, keys, values)[0]
        if func in GROUPED:
            return ExpertShapes.apply(*args[:2])
        return func(*args, **(kwargs or {}))


def flex_shapes(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
    """Stand in for FlexAttention."""
    output, log_sums = KernelShapes.apply(queries, keys, values)
    return (output, SimpleNamespace(lse=log_sums)) if "return_aux" in options else output


@contextmanager
def without_moves() -> Iterator[None]:
    """Leave modules with weights where they are: those without memory cannot be given others.

    peft moves a LoRA's matrices to their layer's device, on which they were made.
    """
    move = nn.Module.to

    def stay(module: Any, *args: Any, **kwargs: Any) -> Any:
        weighted = next(module.parameters(), None) is not None
        return module if weighted else move(module, *args, **kwargs)

    nn.Module.to = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


@contextmanager
def without_memory() -> Iterator[None]:
    """Run what is within on tensors without memory, and attention as on a GPU."""
    with (
        warnings.catch_warnings(),
        without_moves(),
        standing_in(flex_shapes),
        FusedKernels(),
        WithoutMemory(),
    ):
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def memory_of_step(
    method: AnyMethod, run: Any, reply_share: float = 1.0, gpus: int = 1
) -> StepMemory:
    """Return the memory of a step of `run`, a `RunConfig` of the method, on one of `gpus` GPUs.

    Batches are full, and `reply_share` of each document is the reply. Raises `UserError` for a
    target without a config, heads that do not fit it, or a target whose code looks at numbers.
    """
    try:
        return _memory_of_step(method, copy.deepcopy(run), reply_share, gpus)
    except NEEDS_NUMBERS as error:
        raise UserError(
            f"the memory of a step cannot be found for {run.target.path}, whose code looks at "
            f"numbers ({first_line(error)}); train a few steps on a GPU"
        ) from error


def _memory_of_step(method: AnyMethod, run: Any, reply_share: float, gpus: int) -> StepMemory:
    if hasattr(run.objective, "out_of_vocabulary"):
        # Positions that lose nothing are only found and left out on a CPU.
        run.objective.out_of_vocabulary = "keep"
    with without_memory():
        with DEVICE:
            config = config_at(run.target.path, run.target.trust_remote_code).get_text_config()
            model = make_causal_lm(config, dtype=torch.bfloat16)
            give_numbers(model)
            target = Target(model, None, run.target.path)
            drafter = method.outline(run, cast(ConfigOnly, target)).drafter
            give_numbers(drafter)
        objective = method.make_objective(run, target, drafter)
        for packed in [target, *([runner_of(drafter)] if isinstance(drafter, DraftModel) else [])]:
            # What `check_packing` finds out with numbers.
            packed.attends_in_documents = packed.window is None
            packed.masks_packed_rows = packed.window is not None
        batch = full_batch(run, reply_share, gpus)
        live = run.features.live
        extraction, features = extracted(target, objective.taps, batch, live)
        bf16 = run.precision == "bf16"
        step, activations, gradients = step_of(objective, drafter, features, bf16)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    muon = hidden_matrices(drafter) if run.optim.optimizer == "muon" else []
    orthogonal = sum(p.numel() for p in muon)
    ends = nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])
    return StepMemory(
        # `parameters` names a matrix once that both ends share.
        target=sum(p.nbytes for p in (model if live else ends).parameters()),
        drafter=sum(p.nbytes for p in drafter.parameters()),
        moments=MOMENT_BYTES * (trained - orthogonal) + MUON_BYTES * orthogonal,
        gradients=gradients,
        features=sum(x.nbytes for x in (features.last, *features.taps)),
        extraction=extraction,
        activations=activations,
        step=step,
    )


def give_numbers(module: nn.Module) -> None:
    """Move a module's buffers to the host, since code looks at their numbers; they are few."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def full_batch(run: RunConfig, reply_share: float, gpus: int = 1) -> Batch:
    """Return a batch of full rows, as one of `gpus` has it; ids are zero.

    Documents have at most `LONGEST` tokens.
    """
    length = run.data.max_length
    documents = []
    for start in range(0, length, LONGEST):
        count = min(LONGEST, length - start)
        written = np.arange(count) >= round(count * (1 - reply_share))
        documents.append((np.zeros(count, int), written))
    return collate([documents] * divided(run, gpus).rows)


def extracted(
    target: Target, taps: tuple[int, ...], batch: Batch, live: bool
) -> tuple[int, Features]:
    """Return the bytes of the target's forward pass at its peak, and the batch's features."""
    if not live:
        states = [
            torch.empty(*batch.ids.shape, target.hidden_size, dtype=target.dtype, device=DEVICE)
            for _ in range(len(taps) + 1)
        ]
        return 0, Features(batch, states[0], tuple(states[1:]))
    tracker = Tracker()
    with tracker, torch.no_grad():
        ids, positions = (torch.empty_like(x, device=DEVICE) for x in (batch.ids, batch.positions))
        rows = Pass(positions=positions, documents=batch.documents)
        hidden = target.forward(ids, rows, taps=taps)
    return tracker.peak, Features(batch, hidden.last, hidden.taps)


def step_of(
    objective: Any,
    drafter: nn.Module,
    features: Features,
    bf16: bool,
    device: torch.device = DEVICE,
) -> tuple[int, int, int]:
    """Return the bytes of both passes at their peak, of activations and of gradients."""
    module = TrainingModule(drafter, objective, bf16)
    denominators = objective.weights(features.batch)
    tracker = Tracker(device)
    with tracker:
        loss, sums = module(features, denominators)
        activations = tracker.now
        loss.backward()
        del loss, sums
    gradients = sum(p.grad.nbytes for p in drafter.parameters() if p.grad is not None)
    return tracker.peak, activations, gradients
