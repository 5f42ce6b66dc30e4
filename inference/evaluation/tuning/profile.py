"""The profile that `draftsmith tune` writes and `evaluate` and `generate` read: which tree pays on
one machine for one target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ....heads.documents import read_document
from ....heads.errors import UserError
from ...decode import Generation, Request, generate
from ...documents import ProfileFile
from ...proposer import load_proposer, parse_spec, without_tree
from ...settings import Sampling
from ...target import Target

SCHEMA = 1


def machine_of(target: Target) -> dict[str, Any]:
    """What the times of a profile hold for."""
    cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compiled": target.compiled,
        "torch": torch.__version__,
    }


class TuningProfile:
    """What was found for each drafter, temperature and batch size."""

    def __init__(self, path: str, target: Target) -> None:
        """Raises `UserError` for what is no profile, and for one of another target or machine."""
        self.path = path
        _, found = read_document(
            Path(path), ProfileFile, "write the profile again with draftsmith tune"
        )
        if lacking := [key for key in ("target", "drafters", "machine") if not found.get(key)]:
            raise UserError(
                f"{path} is not a profile: it lacks {lacking[0]}; write one with draftsmith tune"
            )
        made_for, self._drafters, machine = found["target"], found["drafters"], found["machine"]
        own = target.fingerprint().as_dict()
        if {**made_for, "name": None} != {**own, "name": None}:
            raise UserError(
                f"{path} was tuned for target {made_for.get('name')}, which is not {own['name']}; "
                "tune again"
            )
        here = machine_of(target)
        threads = ("threads",) if here["device"] == "cpu" else ()
        for name in ("device", "dtype", "compiled", *threads):
            if machine.get(name) != here[name]:
                raise UserError(
                    f"{path} was tuned with {name} {machine.get(name)}, this is {here[name]}; "
                    "tune again here"
                )

    def setting(self, spec: str, temperature: float, batch: int) -> dict[str, Any]:
        """What `load_proposer` takes as `tuned`: of the nearest temperature that was tuned, and
        there of the nearest batch size. Raises `UserError` for a drafter that is not in the
        profile."""
        rows = self._drafters.get(key_of(spec))
        if not rows:
            raise UserError(
                f"{self.path} knows no drafter {spec}; it has: {', '.join(self._drafters)}"
            )

        def far(row):
            return (
                abs(row["temperature"] - temperature),
                abs(math.log(row["batch"] / batch)),
            )

        return min(rows, key=far)["setting"]

    def __contains__(self, spec: str) -> bool:
        return key_of(spec) in self._drafters


class Tuned:
    """A drafter as a way to decode: with what a profile says for one temperature and batch size."""

    def __init__(
        self, profile: TuningProfile, spec: str, target: Target, sampling: Sampling, batch: int
    ) -> None:
        self.spec = spec
        self.setting = profile.setting(spec, sampling.temperature, batch)
        self._target = target
        self._proposer = load_proposer(spec, target, lambda message: None, self.setting)
        self.name = self._proposer.name

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """As `decode.generate`."""
        return generate(self._target, self._proposer, requests, max_new_tokens, sampling)


def key_of(spec: str) -> str:
    """A drafter's name in a profile: its folder, or its own name, with the settings that are not
    about its tree."""
    name, _ = parse_spec(spec)
    kept = without_tree(spec)
    return str(Path(name).resolve()) + kept.removeprefix(name) if Path(name).is_dir() else kept
