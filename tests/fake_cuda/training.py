"""The forward pass of one training step of every method on CUDA tensors without memory.

    python -m tests.fake_cuda.training GUARD    (GUARD: the library made of guard.cpp)

Numbers on the host are real, since a batch's rows are found there; what lies on the device has
none. It prints JSON: operators that mix devices or cross them, and the calls of attention.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from draftsmith.heads.draft_model import DraftModel
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.targets import masks as documents_module
from draftsmith.inference.targets.target import Target
from draftsmith.train.config import TargetConfig
from draftsmith.train.data.batches import collate
from draftsmith.train.data.config import Data, Source
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.losses import blocks, unroll, unrolled
from draftsmith.train.methods.dflash import method as dflash
from draftsmith.train.methods.distill.method import runner_of
from draftsmith.train.methods.registry import method_named
from draftsmith.train.objectives import TrainingModule
from tests.conftest import random_heads
from tests.fake_cuda.rounds import MODE, Watch, borrowed, cast
from tests.helpers.architectures import architecture
from tests.helpers.random_blocks import random_block
from tests.helpers.random_eagles import random_eagle


class Cuda(TorchDispatchMode):
    """Runs operators of fake tensors and of the device "cuda" without memory, all others really."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs)))
        device = kwargs.get("device")
        if not fake and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)

        def without_memory(x: Any) -> Any:
            real = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            return MODE.from_tensor(x) if real else x

        args, kwargs = tree_map(without_memory, (args, kwargs))
        with MODE:
            return func(*args, **kwargs)


class Crossings(Watch):
    """Notes operators that mix devices, and what crosses them; work of the host is its own."""

    def note(self, name: str, given: list[Any], made: list[Any]) -> None:
        tensors = [x for x in (*given, *made) if isinstance(x, Tensor)]
        if any(x.device.type == "cuda" for x in tensors):
            super().note(name, given, made)


class Kernels:
    """Calls of attention, by what kernels ask for. Every one of them is answered by shape alone."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def dispatched(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any = None, **_: Any
    ) -> Tensor:
        """In place of torch's attention, which chooses a kernel itself; the target calls it too."""
        if attn_mask is None:
            facts = {
                "kernel": "maskless",
                "grouped": queries.shape[1] != keys.shape[1],
                "head": queries.shape[-1],
                "types": sorted({str(x.dtype) for x in (queries, keys, values)}),
                "last": [x.stride(-1) for x in (queries, keys, values)],
            }
            self.calls[json.dumps(facts)] += 1
        else:
            self.masked(queries, keys, values, attn_mask)
        return queries.new_empty(*queries.shape[:-1], values.shape[-1])

    def flex(self, queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
        facts = {"kernel": "flex", "head": queries.shape[-1], "rows": queries.shape[2]}
        shared = queries.shape[1] != keys.shape[1]
        facts |= {"keys": keys.shape[2], "grouped": shared and not options.get("enable_gqa")}
        self.calls[json.dumps(facts)] += 1
        output = queries.new_empty(*queries.shape[:-1], values.shape[-1]) * keys.sum()
        if "return_aux" not in options:
            return output
        return output, SimpleNamespace(lse=output.float().sum(-1))

    def masked(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *_: Any) -> Any:
        facts = {
            "kernel": "masked",
            "grouped": queries.shape[1] != keys.shape[1],
            "head": queries.shape[-1],
            "type": str(queries.dtype) == str(bias.dtype) == str(keys.dtype),
            "row": bias.stride(-2) * bias.element_size() % 16,
            "start": bias.storage_offset() * bias.element_size() % 16,
            "last": [x.stride(-1) for x in (queries, keys, values, bias)],
        }
        self.calls[json.dumps(facts)] += 1
        output = queries.new_empty(queries.shape)
        return output, output[..., 0].float(), None, None


def step(
    method: str, target: Target, drafter: Any, options: dict[str, Any], bf16: bool = True
) -> dict[str, Any]:
    """Return what the forward pass of a training step of a method did, and its live target's."""
    known = method_named(method)  # type: ignore[arg-type]
    run = known.run_class(out="-", target=TargetConfig(path="-"), data=Data(sources=[Source("-")]))
    for option, value in options.items():
        setattr(run.objective, option, value)
    with patch.object(dflash, "restore_tap_scales"):  # it looks at numbers
        objective = known.make_objective(run, target, drafter)
    documents = [(np.arange(n) % 90, np.arange(n) > n // 3) for n in (150, 90, 41)]
    batch = collate([documents, documents[:2]])
    source = object.__new__(LiveTarget)  # its check of packed rows compares numbers
    source._target, source._taps = target, objective.taps
    for packed in [target, *([runner_of(drafter)] if method == "distill" else [])]:
        packed.attends_in_documents = True  # what that check finds
    watch, pinned = Crossings(), Counter[str]()
    kernels = Kernels()

    def pin_memory(tensor: Any) -> Any:
        pinned["pinned"] += 1
        return tensor

    def grad(loss: Any, inputs: Any, **_: Any) -> Any:
        """In place of the gradients that a chunk makes: the engine needs a device."""
        return [torch.zeros_like(x) for x in inputs]

    aten = torch.ops.aten
    with (
        patch.object(unroll, "flex_for", lambda device: kernels.flex),
        patch.object(blocks, "flex_for", lambda device: kernels.flex),
        patch.object(unroll, "block_mask", lambda *_: None),
        patch.object(blocks, "block_mask", lambda *_: None),
        patch.object(functional, "scaled_dot_product_attention", kernels.dispatched),
        patch.object(documents_module, "scaled_dot_product_attention", kernels.dispatched),
        patch.object(aten, "_scaled_dot_product_efficient_attention", kernels.masked),
        patch.object(torch.autograd, "grad", grad),
        patch.object(torch.Tensor, "pin_memory", pin_memory),
    ):
        denominators = objective.weights(batch)
        with Cuda(), watch:
            features = source.features(batch)
            extraction = dict(kernels.calls)
            watch.on = True
            module = TrainingModule(drafter, objective, bf16)
            loss, sums = module(features, denominators)
            watch.on = False
    assert loss.device.type == "cuda" and sums, method
    return {
        "faults": dict(watch.faults),
        "uploads": watch.uploads,
        "pinned": pinned["pinned"],
        "extraction": extraction,
        "attention": dict(kernels.calls - Counter(extraction)),
    }


class Texts:
    """Data of a run, as far as its beginning needs them."""

    def token_counts(self, vocab_size: int) -> Tensor:
        return torch.arange(vocab_size)

    def sample_ids(self, most: int) -> list[int]:
        return [5 + i % 90 for i in range(min(most, 30))]


def beginnings() -> dict[str, Any]:
    """Return, by method, "ok" or the error of making a drafter and running it as evaluation does.

    The drafter is made on the CPU for a target on the device, with a draft vocabulary where the
    method has one, and then run over a text there.
    """
    text = collate([[(np.arange(30) % 90, np.ones(30, bool))]])
    with MODE, torch.device("cuda"):
        target = architecture("llama", dtype=torch.bfloat16, layers=4)
        ids, states = torch.zeros(30, dtype=torch.long), torch.zeros(30, target.hidden_size)
    hidden = Hidden(states, (states,) * 3)
    sampled = tuple(states.bfloat16() for _ in range(3))
    found = {}
    for way in ("medusa", "eagle", "eagle shared-head", "dflash", "dspark"):
        method, _, shared = way.partition(" ")
        known = method_named(method)  # type: ignore[arg-type]
        data = Data(sources=[Source("-")])
        run = known.run_class(out="-", target=TargetConfig(path="-"), data=data)
        if method != "medusa":
            run.heads.taps, run.heads.draft_vocab_size = [1, 2, 3], 64
        if shared:
            run.heads.shared_head = True
        try:
            with (
                patch.object(type(target), "tap_sizes", lambda *_: (1.0, 8.0, 30.0)),
                patch.object(type(target), "tap_sample", lambda *_: sampled),
                patch.object(dflash, "choose_mask_token", lambda *_: 3),
                patch.object(unrolled, "batch_of_text", lambda _: text),
                patch.object(dflash, "batch_of_text", lambda _: text),
                patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
                torch.inference_mode(),
                Cuda(),
            ):
                drafter = known.make_drafter(run, target, Texts(), None)  # type: ignore[arg-type]
                moved(drafter)
                outcome = known.teacher_forced(drafter, hidden, ids)
            found[way] = "ok" if outcome.device.type == "cuda" else str(outcome.device)
        except Exception as error:  # noqa: BLE001  # it is the result
            found[way] = f"{type(error).__name__}: {error}"
    return found


def moved(drafter: nn.Module) -> None:
    """Put a drafter's weights and buffers on the device."""
    cast(drafter, torch.device("cuda"))
    for part in drafter.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to("cuda")


def steps() -> dict[str, Any]:
    """Return the facts of all methods, by name and backend of attention."""
    with MODE, torch.device("cuda"):
        target = architecture("llama", dtype=torch.bfloat16)
        drafters: dict[str, Any] = {
            "medusa": random_heads(target),
            "eagle": random_eagle(target, "eagle3 draft vocabulary"),
            "eagle shared-head": random_eagle(target, "eagle3 shared head"),
            "dflash": random_block(target, "dflash"),
            "dspark": random_block(target, "dspark"),
            "distill": DraftModel(
                architecture("llama", dtype=torch.float32).model, None, target.vocab_size
            ),
        }
        exact = architecture("llama", dtype=torch.float32)
    found = {}
    for way, drafter in drafters.items():
        method = way.partition(" ")[0]
        drafter.requires_grad_(True)
        backends = {"eagle": ("flex",), "dflash": ("sdpa", "flex"), "dspark": ("sdpa", "flex")}
        for backend in backends.get(method, ("",)):
            with (
                patch.object(unroll, "backend_for", lambda *_, one=backend: one),
                patch.object(blocks, "backend_for", lambda *_, one=backend: one),
            ):
                found[f"{way} {backend}".strip()] = step(method, target, drafter, {})
    float32 = step("distill", exact, drafters["distill"], {}, bf16=False)
    return found | {"distill float32": float32}


def main(guard: str) -> None:
    torch.ops.load_library(guard)
    with (
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(nn.Module, "to", cast),
        patch.object(Target, "embedding_and_head", property(borrowed)),
        patch.object(Target, "final_norm_weight", lambda target: None),
    ):
        print(json.dumps({"steps": steps(), "beginnings": beginnings()}, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1])
