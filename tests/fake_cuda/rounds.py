"""Rounds of every method on CUDA tensors without memory: which operators they call, and where.

    python -m tests.fake_cuda.rounds GUARD [--every | --kernels]

GUARD is the library made of guard.cpp. It prints JSON, with `--every` of all methods and samplings.
With `--kernels` it prints how many kernels a round of a target of Qwen3's form with 36 layers has:
over growing and static caches, and with draftsmith's own kernels. No GPU is needed, and no number
is computed: whatever depends on one is given here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from accelerate import dispatch_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.heads.layout import EmbeddingAndHead
from draftsmith.inference import decode, recorded
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.proposers import cached
from draftsmith.inference.rounds import attention, outcome
from draftsmith.inference.rounds.outcome import DeviceOutcome, Outcome
from draftsmith.inference.targets import fused
from draftsmith.inference.targets.target import Target
from tests.helpers.architectures import architecture, proposers

VIEWS = {
    *("view", "_unsafe_view", "expand", "slice", "select", "transpose", "t", "permute", "unbind"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "alias", "detach", "as_strided"),
    *("reshape", "_reshape_alias", "chunk", "narrow", "lift_fresh"),
}
LAUNCHES = {"attend": 2}  # kernels of an operator, where they are not one
MODE = FakeTensorMode()  # one for all, since tables of tensors are cached
ACCEPTED = 3  # nodes of the path of every round, with the root
QUICK = ("eagle3 tree", "draft-model tree")
SPREAD = ("eagle3 tree",)  # it borrows the target's head and embedding
WAYS = (
    "plain",
    "dflash chain",
    *QUICK,
    *(
        "medusa",
        "dspark tree",
        "eagle3 with lookup",
        "draft-model chain",
        "medusa best-first",
        "eagle3 chain",
        "eagle1 tree",
        "dflash tree",
    ),
)
ROUNDS = 4  # of which the first two are not counted


class Watch(TorchDispatchMode):
    """Counts operators that start a kernel, and notes those that mix devices or cross them."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.counts = Counter[str]()
        self.faults = Counter[str]()
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if self.on and name not in VIEWS and name != "device":
            self.note(name, tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def note(self, name: str, given: list[Any], made: list[Any]) -> None:
        self.counts[name] += LAUNCHES.get(name, 1)
        inputs = {x.device for x in given if isinstance(x, torch.Tensor) and x.ndim}
        outputs = {x.device for x in made if isinstance(x, torch.Tensor)}
        if len(inputs) > 1:
            self.faults[f"{name} on {sorted(map(str, inputs))}"] += 1
        elif {device.type for device in (*inputs, *outputs)} == {"cpu", "cuda"}:
            if any(device.type == "cpu" for device in outputs):
                self.faults[f"{name} to the host"] += 1
            self.uploads += 1
        elif any(device.type == "cpu" for device in inputs):
            self.faults[f"{name} on the host"] += 1


class Census:
    """Every call of attention in counted rounds, by what its kernels ask for."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self.calls = watch, Counter[str]()

    def __call__(
        self, queries: Any, keys: Any, values: Any, attn_mask: Any = None, **options: Any
    ) -> Any:
        if self._watch.on:
            self._watch.counts["attention"] += 1
            facts: dict[str, Any] = {
                "head": queries.shape[-1],
                "type": str(queries.dtype),
                "shared": queries.shape[1] // keys.shape[1],
            }
            if attn_mask is not None:
                row = attn_mask.stride(-2) * attn_mask.element_size()
                start = attn_mask.storage_offset() * attn_mask.element_size()
                facts["mask"] = [str(attn_mask.dtype), row % 16, start % 16, attn_mask.stride(-1)]
            self.calls[json.dumps(facts)] += 1
        was, self._watch.on = self._watch.on, False
        result = queries.new_empty(*queries.shape[:-1], values.shape[-1])
        self._watch.on = was
        return result


def rounds(
    target: Any, proposer: Any, static: bool, sampling: Sampling, batch: int
) -> dict[str, Any]:
    """Return what the counted rounds of a method did."""
    watch = Watch()
    census = Census(watch)
    reads = Counter[str]()

    def tolist(tensor: Any) -> Any:
        reads["packed"] += watch.on
        return zeros(list(tensor.shape))

    def pin_memory(tensor: Any) -> Any:
        reads["pinned"] += watch.on
        return tensor

    def unpack(packed: DeviceOutcome, values: Any) -> Outcome:
        """Every row has accepted the first nodes of one path."""
        rows, levels = packed.counts.shape[0], packed.path.shape[1] - 1
        count = min(ACCEPTED, levels + 1)
        path = [0, *range(2, count + 1)] if packed.shape is None else list(range(count))
        return Outcome(
            nodes=[path] * rows,
            tokens=[[7] * count] * rows,
            drafted=[levels] * rows,
            refused=[False] * rows,
            rule=packed.verdict.rule,
        )

    original = decode._RunningBatch.rounds
    seen = Counter[str]()

    def watched(self: Any) -> Any:
        found = original(self)
        while True:
            seen["rounds"] += 1
            watch.on = seen["rounds"] > 2
            try:
                steps = next(found)
            finally:
                watch.on = False
            yield steps

    with (
        patch.object(decode._RunningBatch, "rounds", watched),
        patch.object(DeviceOutcome, "_unpacked", unpack),
        patch.object(outcome, "read_later", lambda tensor: tensor.tolist),
        patch.object(recorded, "recorder_for", lambda device: Again),
        patch.object(decode, "Clock", NoClock),
        patch.object(FakeTensor, "tolist", tolist),
        patch.object(torch.Tensor, "pin_memory", pin_memory),
        patch.object(attention, "scaled_dot_product_attention", census),
        patch.object(fused, "rms_norm", OneNorm(watch)),
        patch.object(functional, "rms_norm", OneNorm(watch)),
    ):
        target.static = static
        prompts = [[5 + i for i in range(9 + row)] for row in range(batch)]
        limit = 1 + ACCEPTED * ROUNDS
        with watch:
            decode.decode = torch.no_grad()(decode.decode.__wrapped__)
            decode.generate(target, proposer, prompts, limit, sampling, frozenset())
    counted = seen["rounds"] - 2
    return {
        "operators": round(sum(watch.counts.values()) / counted, 1),
        "faults": dict(watch.faults),
        "uploads": watch.uploads / counted,
        "reads": {name: count / counted for name, count in reads.items()},
        "attention": dict(census.calls),
    }


class OneNorm:
    """`rms_norm` as on CUDA, where it is one kernel; without memory it would be taken apart."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, x: Any, *others: Any) -> Any:
        if self._watch.on:
            self._watch.counts["rms_norm"] += 1
        was, self._watch.on = self._watch.on, False
        result = torch.empty_like(x)
        self._watch.on = was
        return result


class Again:
    """In place of a CUDA graph, which needs a device: runs the function each time."""

    def warm_up(self, function: Any) -> Any:
        return function()

    def record(self, function: Any) -> Any:
        self.replay = function
        return function()


class NoClock:
    """In place of CUDA events, which need a device."""

    def __init__(self, device: Any) -> None: ...

    def mark(self, part: str = "") -> None: ...

    def close(self, records: Any) -> None: ...

    def settle(self, wait: bool = False) -> None: ...


def borrowed(target: Any) -> Any:
    return EmbeddingAndHead(target.embed, target.head, target.vocab_size)


def cast(module: nn.Module, goal: torch.dtype | torch.device) -> nn.Module:
    """In place of `Module.to`, which cannot exchange parameters without memory."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.to(goal), requires_grad=False)
    return module


def zeros(shape: list[int]) -> Any:
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def fuse(model: Any, kernels: bool) -> None:
    """`CausalModel.fuse` without its trial, which compares numbers."""
    kinds = ["full_attention"] * model.num_layers
    model.fused = fused.FusedDecoder(
        model.decoder, kinds, move=True, windows={"full_attention": None}
    )
    model.fused.takes_trees = kernels


def models(
    kind: str = "llama", layers: int = 2, kernels: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return a fused target and the proposers for it, by name."""
    with torch.device("cuda"):
        target = architecture(kind, dtype=torch.bfloat16, layers=layers)
        drafter = architecture(kind, seed=1, dtype=torch.bfloat16)
        for model in (target, drafter):
            fuse(model, kernels)
        with patch.object(cached, "attention_fits", lambda *_: kernels):
            return target, dict(proposers(target, drafter))


def spread_models() -> tuple[Any, dict[str, Any]]:
    """Return a target of which each layer lies on another GPU, and proposers beside its head."""
    first, last = "cuda:0", "cuda:1"
    with torch.device(first):
        target = architecture("llama", dtype=torch.bfloat16)
        model: Any = target.model
        for part in (model.model.layers[1], model.model.norm, model.lm_head):
            cast(part, torch.device(last))
        places: dict[str, Any] = dict.fromkeys(
            ("model.embed_tokens", "model.rotary_emb", "model.layers.0"), first
        )
        places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), last)
        dispatch_model(model, places)
        target.spread = "devices"
    with torch.device(last), patch.object(cached, "attention_fits", lambda *_: True):
        drafter = architecture("llama", seed=1, dtype=torch.bfloat16)
        return target, dict(proposers(target, drafter))


def counted(way: str, *setting: Any) -> dict[str, Any]:
    """Return the facts of `rounds`.

    The tables of looked-up chains are made at the first chain, which comes after the rounds that
    are left out.
    """
    if "lookup" in way:
        rounds(*setting)
    return rounds(*setting)


def of_methods(every: bool) -> dict[str, Any]:
    """Return facts of the rounds of all methods and settings."""
    samplings = {"greedy": Sampling()}
    if every:
        samplings["coupled"] = Sampling(temperature=0.8)
        samplings["rejection"] = Sampling(temperature=0.8, rule="rejection")
    found = {}
    target, drafters = models()
    for way in WAYS if every else QUICK:
        for name, sampling in samplings.items():
            found[f"{way}, {name}"] = counted(way, target, drafters[way], False, sampling, 1)
        greedy = samplings["greedy"]
        found[f"{way}, static"] = counted(way, target, drafters[way], True, greedy, 1)
        if every:
            found[f"{way}, batch of 3"] = counted(way, target, drafters[way], False, greedy, 3)
    target, drafters = models(kernels=False)
    for way in WAYS if every else QUICK:
        greedy = samplings["greedy"]
        found[f"{way}, torch"] = counted(way, target, drafters[way], False, greedy, 1)
        found[f"{way}, static, torch"] = counted(way, target, drafters[way], True, greedy, 1)
        if every:
            found[f"{way}, batch of 3, torch"] = counted(
                way, target, drafters[way], False, greedy, 3
            )
    target, drafters = spread_models()
    for way in WAYS if every else SPREAD:
        greedy = samplings["greedy"]
        found[f"{way}, spread"] = counted(way, target, drafters[way], False, greedy, 1)
    return found


def of_layers(layers: int) -> dict[str, Any]:
    """Return the kernels of a round of a deep target, by method and form of the round."""
    found: dict[str, dict[str, float]] = {}
    for kernels in (False, True):
        target, drafters = models("qwen3", layers, kernels)
        for way in WAYS:
            for static in (False, True):
                form = f"{'static' if static else 'growing'}{', own kernels' * kernels}"
                facts = rounds(target, drafters[way], static, Sampling(), 1)
                found.setdefault(way, {})[form] = facts["operators"]
    return found


def main(guard: str, options: list[str]) -> None:
    torch.ops.load_library(guard)
    with (
        MODE,
        patch.object(nn.Module, "to", cast),
        patch.object(Target, "embedding_and_head", property(borrowed)),
        patch.object(Target, "final_norm_weight", lambda target: None),
    ):
        found = of_layers(36) if "--kernels" in options else of_methods("--every" in options)
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
