"""A drafter's directory on disk: an engine's own layout, and beside it `draftsmith.json` with what
only we need.

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

from .documents import SCHEMA, DocumentError, OwnFile, read_document
from .embedding_and_head import EmbeddingAndHead
from .errors import UserError, first_line
from .files import differs, facts_of, whole_directory, write_json
from .fingerprint import Fingerprint

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
    def load(
        cls, directory: Path, dtype: torch.dtype, embedding_and_head: EmbeddingAndHead | None
    ) -> DrafterModule:
        """Read it back; raises `UserError`, or `KeyError` and its kin for a config that lacks or
        garbles a field."""
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
            write_json(aside / OWN_FILE, {**self.own_facts(dtype), "files": facts_of(aside)})

    def own_facts(self, dtype: torch.dtype) -> dict[str, Any]:
        """The content of `draftsmith.json`, but for the checksums of the other files."""
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
        embedding_and_head: EmbeddingAndHead | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> Artifact:
        """Read a directory and check it against the target that it is to be used with.

        Raises `UserError` for a missing or broken file, for a missing, surplus, misshapen or
        miscast tensor, and for a target of another shape. A target of equal shape but other
        weights, tokenizer or template is reported through `warn`.
        """
        directory = Path(directory)
        if not (directory / OWN_FILE).is_file():
            raise not_a_drafter(directory)
        own, _ = read_document(directory / OWN_FILE, OwnFile, "save or copy the drafter again")
        trained_for, dtype = own.target, getattr(torch, own.dtype)
        if own.export is not None and own.export.layout != "native":
            raise UserError(
                f"{directory} is an export in the layout of {own.export.layout}; "
                f"read it with draftsmith import --from {directory}"
            )
        check_files(directory, own, warn)
        drafter_type = drafter_class(own.method)
        check_target(trained_for, target, drafter_type.bound_to, directory, warn)
        config_path = directory / "config.json"
        try:
            drafter = drafter_type.load(directory, dtype, embedding_and_head)
        except DocumentError as error:
            raise UserError(f"{config_path}: {error}; save or copy the drafter again") from error
        except (
            KeyError,
            TypeError,
            IndexError,
            ValueError,
            RuntimeError,
            ArithmeticError,
        ) as error:
            if isinstance(error, UserError):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"{config_path} describes no drafter ({reason}); save or copy the drafter again"
            ) from error
        check_shape(drafter, own.taps, own.shape, config_path)
        drafter.eval().requires_grad_(False)
        return cls(drafter, trained_for, own.calibration, own.provenance)


def check_files(directory: Path, own: OwnFile, warn: Callable[[str], None]) -> None:
    """Demand the files that were written, bit by bit. Raises `UserError` that names the one that is
    not; a drafter of version 0.1, which noted no checksums, is reported through `warn`."""
    noted = {name: (facts.bytes, facts.sha256) for name, facts in own.files.items()}
    if not noted and own.export is not None:
        noted = {name: (None, sha256) for name, sha256 in own.export.sha256.items()}
    if not noted:
        warn(
            f"{directory} has no checksums (draftsmith 0.1 wrote none), so damage to its files "
            "cannot be seen"
        )
    for name, (size, sha256) in noted.items():
        if (reason := differs(directory, name, OWN_FILE, size, sha256)) is not None:
            raise UserError(f"{directory}: {reason}; copy or save the drafter again")
    unlisted = [
        path.name
        for path in sorted(directory.glob("*.safetensors"))
        if noted and path.name not in noted
    ]
    if unlisted:
        raise UserError(
            f"{directory}: {unlisted[0]} is not among the files that were written; copy or save "
            "the drafter again"
        )


def not_a_drafter(directory: Path) -> UserError:
    """For a folder without `draftsmith.json`: a training run's own folder has its drafters further
    down."""
    below = [
        directory / name for name in ("best", "last") if (directory / name / OWN_FILE).is_file()
    ]
    remedy = f"did you mean {below[0]}?" if below else "name the folder that training wrote"
    return UserError(f"{directory} is not a drafter: it has no {OWN_FILE}; {remedy}")


def check_target(
    trained_for: Fingerprint,
    target: Fingerprint,
    bound_to: tuple[str, ...],
    directory: Path,
    warn: Callable[[str], None],
) -> None:
    """Raise `UserError` for a target of another shape; tell through `warn` what else differs."""
    if errors := trained_for.errors_against(target, bound_to):
        raise UserError(
            f"{directory} was trained for another target ({trained_for.name}): "
            f"{'; '.join(errors)}; "
            "use that target or train a drafter for this one"
        )
    for message in trained_for.warnings_against(target):
        warn(message)


def check_shape(
    drafter: DrafterModule, taps: list[int], shape: dict[str, Any], config_path: Path
) -> None:
    """Demand that what `config_path` made is what was saved. Raises `UserError`."""
    facts = {**drafter.facts(), "taps": list(drafter.taps)}
    # drafters of version 0.1 noted their taps only
    for name, value in [("taps", taps), *shape.items()]:
        if (now := facts.get(name)) != value:
            raise UserError(
                f"{config_path} says {name} {now}, {OWN_FILE} beside it says {value}; one of them "
                "was changed"
            )


def drafter_class(method: str) -> Any:
    """The module class of a method: `Drafter` in the file of that name in this folder."""
    if not method.isidentifier() or importlib.util.find_spec(f".{method}", __package__) is None:
        raise UserError(
            f"unknown drafting method {method!r}; this version may be too old for that drafter"
        )
    return importlib.import_module(f".{method}", __package__).Drafter
