"""A tape that records the operators of a round and replays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.inference import decode as loop
from draftsmith.inference import recorded
from draftsmith.inference.rounds import cache as cache_module

HOST = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Recorder that notes every operator with its tensors, and runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.outside: set[int] = set()  # storages that were read and not made
        self._inside: set[int] = set()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in HOST:
            raise RuntimeError(f"{func} waits for the device")  # as CUDA does
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._before += [(x, x.clone()) for x in written if storage(x) not in self._inside]
        result = func(*args, **kwargs)
        given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = {storage(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        self.outside |= given - self._inside
        self._inside |= made - given
        if written or not made <= given:  # and not a view
            self.operators.append((func, args, kwargs, result))
        return result

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        try:
            with self:
                result = function()
        except RuntimeError:
            for tensor, before in reversed(self._before):  # a recording that fails has run nothing
                tensor.copy_(before)
            raise
        TAPES.append(self)
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self.operators:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and storage(old) != storage(new):
                    old.copy_(new)


TAPES: list[Tape] = []

"""All that have recorded."""


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Have static rounds recorded by tapes; return those that have recorded."""
    TAPES.clear()
    monkeypatch.setattr(recorded, "recorder_for", lambda device: Tape)
    monkeypatch.setattr(loop, "static_pays", lambda device, rows: True)
    monkeypatch.setattr(cache_module, "joins_layers", lambda device: True)
    return TAPES
