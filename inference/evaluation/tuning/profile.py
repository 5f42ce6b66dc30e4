"""Profile that `draftsmith tune` writes, and drafters with the settings of one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ....heads.files import JsonObject
from ...decode import Generation, Request, generate
from ...drafters import Given, load_proposer
from ...profile import TuningProfile, key_of, machine_of
from ...settings import Sampling
from ...targets.target import Target
from ..names import distinct_names
from .options import TuneOptions

SCHEMA = 1


def empty_profile(options: TuneOptions, target: Target, prompts: int) -> JsonObject:
    """Return a profile that says what it is about, with no result for any drafter yet.

    `prompts`: how many there are.
    """
    return {
        "schema_version": SCHEMA,
        "command": shlex.join(["draftsmith", *sys.argv[1:]]),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target.fingerprint().as_dict(),
        "machine": machine_of(target),
        "prompts": {"path": options.prompts, "count": prompts},
        "drafters": {key_of(spec): [] for spec in options.drafter},
    }


class Tuned:
    """Drafter with its setting from a profile for one temperature and batch size.

    It is a way to decode: a `measure.OwnLoop`.
    """

    def __init__(
        self, profile: TuningProfile, spec: str, target: Target, sampling: Sampling, batch: int
    ) -> None:
        self.spec = spec
        self.setting = profile.setting(spec, sampling.temperature, batch)
        self._target = target
        self.proposer: Any = load_proposer(spec, target, lambda message: None, self.setting)
        self.name, self.given = self.proposer.name, self.proposer.given

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """Decode like `decode.generate`."""
        return generate(self._target, self.proposer, requests, max_new_tokens, sampling)


def untuned(ways: Sequence[object]) -> dict[str, tuple[str, bool]]:
    """Return, by the names of tuned drafters, the names of the same drafters without the profile.

    The second value is True where both draft the same tree: the profile keeps the one that the
    drafter has without it. Tuned drafters of `ways` that are alone are left out.
    """
    named = dict(zip(distinct_names(ways), ways, strict=True))
    by_given = {getattr(way, "given", None): name for name, way in named.items()}
    found = {}
    for name, way in named.items():
        if isinstance(way, Tuned) and (default := by_given.get(Given(way.spec))) is not None:
            found[name] = default, _tree_of(way.proposer) == _tree_of(named[default])
    return found


def _tree_of(proposer: Any) -> tuple[object, ...]:
    """Return everything about what a proposer drafts that the settings of a profile may change."""
    proposer = getattr(proposer, "trained", proposer)  # of a drafter with a lookup
    own = proposer.max_drafted, getattr(proposer, "slots", None)
    plan = getattr(proposer, "plan", proposer)
    names = ("fixed", "length", "width", "nodes")
    return *own, *(getattr(plan, name, None) for name in names)
