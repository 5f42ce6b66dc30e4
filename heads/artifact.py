"""A drafter's directory on disk: an engine's own layout, and beside it `draftsmith.json` with what only we need.

    config.json          what engines read
    *.safetensors        the drafter's tensors, under the names that engines read
    draftsmith.json      method, fingerprint of the target, taps, calibration, provenance

Loading demands every tensor by name, shape and dtype, and nothing besides.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .ends import TargetEnds
from .errors import UserError
from .files import read_json, whole_directory, write_json
from .fingerprint import Fingerprint

SCHEMA = 1
OWN_FILE = "draftsmith.json"


class DrafterModule(Protocol):
    """What a method's module offers to be stored: see `heads/medusa.py`."""

    method: str
    weights_file: str
    taps: tuple[int, ...]

    def serving_state(self) -> dict[str, Tensor]: ...
    def serving_config(self, target_name: str, dtype: str) -> dict[str, Any]: ...
    def check(self) -> None: ...


@dataclass
class Artifact:
    """A drafter with what it was trained for and how it was calibrated."""

    drafter: Any
    fingerprint: Fingerprint
    calibration: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.drafter.method

    def save(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the directory whole or not at all; floating tensors are cast to `dtype`."""
        drafter: DrafterModule = self.drafter
        tensors = {
            name: t.detach().to("cpu", stored_as(t, dtype)).contiguous().clone() for name, t in drafter.serving_state().items()
        }
        with whole_directory(directory) as aside:
            write_json(aside / "config.json", drafter.serving_config(self.fingerprint.name, str(dtype).removeprefix("torch.")))
            write_json(aside / OWN_FILE, self._own_facts(dtype))
            save_file(tensors, aside / drafter.weights_file, metadata={"format": "pt"})

    def _own_facts(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "method": self.method,
            "dtype": str(dtype).removeprefix("torch."),
            "taps": list(self.drafter.taps),
            "target": self.fingerprint.as_dict(),
            "calibration": self.calibration,
            "provenance": self.provenance,
        }

    @classmethod
    def load(
        cls,
        directory: str | Path,
        target: Fingerprint,
        ends: TargetEnds | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> Artifact:
        """Read a directory and check it against the target that it is to be used with.

        Raises `UserError` for a missing or broken file, for a missing, surplus, misshapen or miscast tensor, and for a target of
        another shape. A target of equal shape but other weights, tokenizer or template is told through `warn`.
        """
        directory = Path(directory)
        if not (directory / OWN_FILE).is_file():
            raise UserError(f"{directory} is not a drafter: it has no {OWN_FILE}; name the folder that training wrote")
        own = read_json(directory / OWN_FILE)
        try:
            trained_for = Fingerprint(**own["target"])
            method, dtype = own["method"], getattr(torch, own["dtype"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / OWN_FILE} lacks or garbles a field ({error}); save the drafter again") from error
        if errors := trained_for.errors_against(target):
            raise UserError(
                f"{directory} was trained for another target ({trained_for.name}): {'; '.join(errors)}; "
                "use that target or train a drafter for this one"
            )
        for message in trained_for.warnings_against(target):
            warn(message)
        config_path = directory / "config.json"
        try:
            drafter = drafter_class(method).from_serving_config(read_json(config_path), ends)
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"{config_path} lacks or garbles a field ({error}); save the drafter again") from error
        if list(drafter.taps) != own["taps"]:
            raise UserError(f"{directory}: {OWN_FILE} says taps {own['taps']}, config.json says {list(drafter.taps)}")
        fill(drafter.serving_state(), directory / drafter.weights_file, dtype)
        drafter.check()
        drafter.eval().requires_grad_(False)
        return cls(drafter, trained_for, own.get("calibration", {}), own.get("provenance", {}))


def drafter_class(method: str) -> Any:
    """The module class of a method: `Drafter` in the file of that name in this folder."""
    if not method.isidentifier() or importlib.util.find_spec(f".{method}", __package__) is None:
        raise UserError(f"unknown drafting method {method!r}; this version may be too old for that drafter")
    return importlib.import_module(f".{method}", __package__).Drafter


def stored_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vocabulary maps keep their own type; everything else is stored as `dtype`."""
    return dtype if tensor.is_floating_point() else tensor.dtype


@torch.no_grad()
def fill(expected: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Copy the tensors of the safetensors file `path` into `expected`, after checking that they are exactly those."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; the drafter is incomplete, copy or save it again") from error
    problems = [f"{name} is missing" for name in expected if name not in stored]
    problems += [f"{name} is not part of this drafter" for name in stored if name not in expected]
    for name in expected.keys() & stored.keys():
        if stored[name].shape != expected[name].shape:
            problems.append(f"{name} has shape {list(stored[name].shape)}, expected {list(expected[name].shape)}")
        elif stored[name].dtype != stored_as(expected[name], dtype):
            problems.append(f"{name} is {stored[name].dtype}, expected {stored_as(expected[name], dtype)}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"{path} does not fit its config: {'; '.join(sorted(problems)[:3])}{more}")
    for name, tensor in expected.items():
        tensor.copy_(stored[name])
