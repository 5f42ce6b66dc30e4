"""Drafters whose files are a `config.json` and one file of tensors under names that engines read.

Loading demands every tensor by name, shape and dtype, and nothing besides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .documents import convert
from .embedding_and_head import EmbeddingAndHead
from .errors import UserError
from .files import read_json, write_json
from .stored_tensors import header


@torch.no_grad()
def place(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a drafter and cast its parameters; buffers keep their type: rotary frequencies in bf16
    would be other positions."""
    module.to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


class EngineLayout(ABC):
    """`save` and `load` of a module that says what its files hold."""

    weights_file: str
    document: type
    """What its `config.json` has to be, of `documents`."""
    bound_to: tuple[str, ...] = ("hidden_size", "vocab_size", "num_layers")

    @abstractmethod
    def serving_state(self) -> dict[str, Tensor]:
        """This module's tensors under their names on disk (views, so that loading can fill
        them)."""

    @abstractmethod
    def serving_config(self, target_name: str, dtype: str) -> dict[str, Any]:
        """`config.json` beside the tensors."""

    @classmethod
    @abstractmethod
    def from_serving_config(
        cls, config: dict[str, Any], embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        """An untrained module of the shape that `config.json` describes; `KeyError` when a key is
        missing."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything that decides what this module computes besides its tensors, as JSON has it."""

    def check(self) -> None:  # noqa: B027  # most have nothing to check
        """Raise `UserError` if the loaded tensors contradict each other."""

    def save(self, directory: Path, target_name: str, dtype: torch.dtype) -> None:
        tensors = {
            name: t.detach().to("cpu", stored_as(t, dtype)).contiguous().clone()
            for name, t in self.serving_state().items()
        }
        write_json(
            directory / "config.json",
            self.serving_config(target_name, str(dtype).removeprefix("torch.")),
        )
        save_file(tensors, directory / self.weights_file, metadata={"format": "pt"})

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        config = read_json(directory / "config.json")
        convert(config, cls.document)
        stored = header(directory / cls.weights_file)
        with torch.device("meta"):  # a damaged size must not be allocated
            expected = cls.from_serving_config(config, embedding_and_head).serving_state()
        check_same(
            expected,
            {name: tuple(facts.shape) for name, facts in stored.items()},
            directory / cls.weights_file,
        )
        drafter = cls.from_serving_config(config, embedding_and_head)
        fill(drafter.serving_state(), directory / drafter.weights_file, dtype)
        drafter.check()
        return drafter


def stored_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vocabulary maps keep their own type; everything else is stored as `dtype`."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def fill(expected: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Copy the tensors of the safetensors file `path` into `expected`, after checking that they are
    exactly those."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot read {path}: {error}; the drafter is incomplete, copy or save it again"
        ) from error
    fill_from(stored, expected, path, dtype)


def check_same(
    expected: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Demand exactly the tensors of `expected`, by name and shape, in the file `path` with
    `shapes`. Raises `UserError`."""
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of this drafter" for name in shapes if name not in expected]
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != tuple(expected[name].shape):
            problems.append(
                f"{name} has shape {list(shapes[name])}, expected {list(expected[name].shape)}"
            )
    refuse(problems, path)


def refuse(problems: list[str], path: Path) -> None:
    """Raise `UserError` that names the first few problems, if there are any."""
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"{path} does not fit its config: {'; '.join(sorted(problems)[:3])}{more}")


@torch.no_grad()
def fill_from(
    stored: Mapping[str, Tensor], expected: dict[str, Tensor], path: Path, dtype: torch.dtype
) -> None:
    """`fill` from tensors that were read from `path`. Raises `UserError`."""
    check_same(expected, {name: tuple(tensor.shape) for name, tensor in stored.items()}, path)
    kinds = {name: stored_as(tensor, dtype) for name, tensor in expected.items()}
    others = [name for name, kind in kinds.items() if stored[name].dtype != kind]
    refuse([f"{name} is {stored[name].dtype}, expected {kinds[name]}" for name in others], path)
    for name, tensor in expected.items():
        tensor.copy_(stored[name])
