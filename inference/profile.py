"""Profile that `draftsmith tune` has written: the best settings of each drafter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct

from ..heads.documents import Document, read_document
from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..heads.fingerprint import Fingerprint, changed_numbers, without_name
from ..heads.layout import dtype_name
from .base.tree_settings import LOOKUP_SETTINGS
from .proposers.registry import parse_spec, without_tree
from .targets.target import Target


class TunedRow(Struct):
    """Best setting of one drafter for one temperature and batch size."""

    temperature: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    setting: dict[str, int | float | str | bool | list[list[int]] | None]
    """Settings that the drafter is loaded with; a fixed tree is a list of rank tuples."""


class ProfileFile(Document):
    """JSON profile of `draftsmith tune`: settings for one target on one machine."""

    what: ClassVar[str] = "a profile of draftsmith tune"
    version_key: ClassVar[str] = "schema_version"
    finite: ClassVar[bool] = False

    target: Fingerprint | None = None
    machine: JsonObject = {}
    drafters: dict[str, list[TunedRow]] = {}
    prompts: JsonObject = {}
    command: str = ""
    started_at: str = ""
    schema_version: Annotated[int, Meta(ge=1)] = 1


def timing_conditions(target: Target) -> JsonObject:
    """Return the facts about machine and target on which times depend; a profile holds for them."""
    cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(target.dtype),
        "compiled": target.static,
        "torch": str(torch.__version__),
    }


def read_profile(path: str) -> JsonObject:
    """Return the profile at `path`, whose target need not be loaded. Raises `UserError`."""
    _, facts = read_document(
        Path(path), ProfileFile, "write the profile again with draftsmith tune"
    )
    if lacking := [key for key in ("target", "drafters", "machine") if not facts.get(key)]:
        raise UserError(
            f"{path} is not a profile: it lacks {lacking[0]}; write one with draftsmith tune"
        )
    return facts


class TuningProfile:
    """Best setting for each drafter, temperature and batch size."""

    def __init__(self, path: str, target: Target) -> None:
        """Read the profile at `path`.

        Raises `UserError` for a file that is not a profile, and for a profile of another target or
        machine.
        """
        self.path = path
        facts = read_profile(path)
        made_for, self._drafters, machine = facts["target"], facts["drafters"], facts["machine"]
        fingerprint = target.fingerprint().as_dict()
        apart = {"numbers": None}
        if without_name({**made_for, **apart}) != without_name({**fingerprint, **apart}):
            raise UserError(
                f"{path} was tuned for target {made_for.get('name')}, which is not "
                f"{fingerprint['name']}; tune again"
            )
        if changes := changed_numbers(made_for.get("numbers", {}), fingerprint["numbers"]):
            raise UserError(
                f"{path} was tuned before the target's configuration was changed ({changes}); tune "
                "again"
            )
        this_machine = timing_conditions(target)
        # Another version of torch is accepted; the number of threads counts on a CPU only.
        threads = ("threads",) if this_machine["device"] == "cpu" else ()
        for name in ("device", "dtype", "compiled", *threads):
            if machine.get(name) != this_machine[name]:
                raise UserError(
                    f"{path} was tuned with {name} {machine.get(name)}, this is "
                    f"{this_machine[name]}; tune again here"
                )

    def setting(self, spec: str, temperature: float, batch: int) -> JsonObject:
        """Return the settings that `load_proposer` takes as `tuned`.

        They are those of the nearest temperature that was tuned and, there, of the nearest batch
        size. Raises `UserError` for a drafter that is not in the profile.
        """
        rows = self._drafters.get(key_of(spec))
        if not rows:
            raise UserError(
                f"{self.path} knows no drafter {spec}; it has: {', '.join(self._drafters)}"
            )

        def distance(row):
            # Batch sizes are compared by their ratio: 8 is as far from 4 as from 16.
            return abs(row["temperature"] - temperature), abs(math.log(row["batch"] / batch))

        return min(rows, key=distance)["setting"]

    def __contains__(self, spec: str) -> bool:
        return key_of(spec) in self._drafters


def tuned_setting(
    path: str | None, spec: str, target: Target, temperature: float, batch: int = 1
) -> JsonObject | None:
    """Return a drafter's setting in the profile at `path`; None without one. Raises `UserError`."""
    if path is None:
        return None
    return TuningProfile(path, target).setting(spec, temperature, batch)


def key_of(spec: str) -> str:
    """Return a drafter's name in a profile.

    It is the absolute path of its folder, or its own name, followed by the settings that do not
    concern its tree, nor a lookup with it.
    """
    name, _ = parse_spec(spec)
    short = without_tree(spec, (*LOOKUP_SETTINGS, "name"))
    return str(Path(name).resolve()) + short.removeprefix(name) if Path(name).is_dir() else short
