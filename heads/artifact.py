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

from .ends import TargetEnds
from .errors import UserError
from .files import read_json, whole_directory, write_json
from .fingerprint import Fingerprint

SCHEMA = 1
OWN_FILE = "draftsmith.json"


class DrafterModule(Protocol):
    """What a method's module offers to be stored; most have it from `layout.EngineLayout`."""

    method: str
    taps: tuple[int, ...]
    bound_to: tuple[str, ...]
    """Fields of the fingerprint that have to be the target's own."""

    def save(self, directory: Path, target_name: str, dtype: torch.dtype) -> None:
        """Write what engines read."""
        ...

    def facts(self) -> dict[str, Any]:
        """Everything that decides what it computes besides its tensors, as JSON has it."""
        ...

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, ends: TargetEnds | None) -> DrafterModule:
        """Read it back; raises `UserError`, or `KeyError` and its kin for a config that lacks or garbles a field."""
        ...


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
        with whole_directory(directory) as aside:
            drafter.save(aside, self.fingerprint.name, dtype)
            write_json(aside / OWN_FILE, self.own_facts(dtype))

    def own_facts(self, dtype: torch.dtype) -> dict[str, Any]:
        """What stands in `draftsmith.json`."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "dtype": str(dtype).removeprefix("torch."),
            "taps": list(self.drafter.taps),
            "shape": self.drafter.facts(),
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
            raise not_a_drafter(directory)
        own = read_json(directory / OWN_FILE)
        try:
            trained_for = Fingerprint(**own["target"])
            method, dtype = own["method"], getattr(torch, own["dtype"])
            layout = own.get("export", {}).get("layout", "native")
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / OWN_FILE} lacks or garbles a field ({error}); save the drafter again") from error
        if layout != "native":
            raise UserError(
                f"{directory} is an export in the layout of {layout}; read it with draftsmith import --from {directory}"
            )
        drafter_type = drafter_class(method)
        check_target(trained_for, target, drafter_type.bound_to, directory, warn)
        config_path = directory / "config.json"
        try:
            drafter = drafter_type.load(directory, dtype, ends)
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"{config_path} lacks or garbles a field ({error}); save the drafter again") from error
        check_shape(drafter, own, config_path)
        drafter.eval().requires_grad_(False)
        return cls(drafter, trained_for, own.get("calibration", {}), own.get("provenance", {}))


def not_a_drafter(directory: Path) -> UserError:
    """For a folder without `draftsmith.json`: a training run's own folder has its drafters further down."""
    below = [directory / name for name in ("best", "last") if (directory / name / OWN_FILE).is_file()]
    remedy = f"did you mean {below[0]}?" if below else "name the folder that training wrote"
    return UserError(f"{directory} is not a drafter: it has no {OWN_FILE}; {remedy}")


def check_target(
    trained_for: Fingerprint, target: Fingerprint, bound_to: tuple[str, ...], directory: Path, warn: Callable[[str], None]
) -> None:
    """Raise `UserError` for a target of another shape; tell through `warn` what else differs."""
    if errors := trained_for.errors_against(target, bound_to):
        raise UserError(
            f"{directory} was trained for another target ({trained_for.name}): {'; '.join(errors)}; "
            "use that target or train a drafter for this one"
        )
    for message in trained_for.warnings_against(target):
        warn(message)


def check_shape(drafter: DrafterModule, own: dict[str, Any], config_path: Path) -> None:
    """Demand that what `config_path` made is what was saved. Raises `UserError`."""
    facts = {**drafter.facts(), "taps": list(drafter.taps)}
    for name, value in [("taps", own["taps"]), *own.get("shape", {}).items()]:  # drafters of version 0.1 noted their taps only
        if (now := facts.get(name)) != value:
            raise UserError(f"{config_path} says {name} {now}, {OWN_FILE} beside it says {value}; one of them was changed")


def drafter_class(method: str) -> Any:
    """The module class of a method: `Drafter` in the file of that name in this folder."""
    if not method.isidentifier() or importlib.util.find_spec(f".{method}", __package__) is None:
        raise UserError(f"unknown drafting method {method!r}; this version may be too old for that drafter")
    return importlib.import_module(f".{method}", __package__).Drafter
