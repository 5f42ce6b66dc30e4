"""Names of drafters in tables, reports and lists of models: short, and distinct from each other.

A drafter's setting `name` is its name. Otherwise a trained drafter is named after its folder, with
every setting that changes what is drafted: `eagle:length=3,nodes=4 + lookup`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ..base.tree_settings import LOOKUP_SETTINGS
from ..proposers.contract import DrafterSpec
from ..proposers.custom_drafters import is_class_path
from ..proposers.kind import Settings
from ..proposers.registry import UNTRAINED, method_of, parse_spec

PLAIN = "plain"
"""Name of decoding without a drafter."""
BASELINES = ("ngram",)
"""Drafters without training that `evaluate` measures in addition to those that a user names."""
CHECKPOINT = re.compile(r"best|last|step-\d+|checkpoints")
"""Folders within that of a training run, whose names do not identify the drafter."""
SAYS_NOTHING = re.compile(r"drafter|draft|model|out|output|runs?")
"""Generic names of folders; such a drafter is named after its method."""
HIDDEN = ("name", "dtype", "folder")
"""Settings that do not change what is drafted, and the folder of a user's own drafter. A name has
them only if it would not be distinct otherwise."""
LOOKUP = " + lookup"
"""End of the name of a drafter whose drafts an n-gram lookup may replace."""


def short_name(spec: str) -> str:
    """Return the name of a drafter that is listed alone.

    `runs/eagle/best:length=3` is `eagle:length=3`, `runs/eagle/best:lookup=4` is `eagle + lookup`,
    `package.module:Mine` is `Mine`, and `..:name=mine` is `mine`.
    """
    name, settings = parse_spec(spec)
    if "name" in settings:
        return str(settings["name"])
    return with_settings(next(longer_names(name)), settings)


def with_settings(name: str, settings: Settings, distinguishing: Iterable[str] = ()) -> str:
    """Return `name:key=value,... + lookup` with all settings that change what is drafted.

    The numbers of a lookup are included only if its length was given or if one of them is in
    `distinguishing`, `HIDDEN` settings only in the latter case.
    """
    shown = [key for key in settings if key not in HIDDEN or key in distinguishing]
    own = [key for key in shown if key not in LOOKUP_SETTINGS]
    looked_up = [key for key in shown if key in LOOKUP_SETTINGS]
    text = name + _listed(":", own, settings)
    if looked_up:
        numbers = len(looked_up) > 1 or any(key in distinguishing for key in looked_up)
        text += _listed(" + ", looked_up, settings) if numbers else LOOKUP
    return text


def _listed(start: str, keys: Sequence[str], settings: Settings) -> str:
    """Return `start` and the settings `keys`; "" for none."""
    return start + ",".join(f"{key}={settings[key]}" for key in keys) if keys else ""


def longer_names(drafter: str) -> Iterator[str]:
    """Yield names for a drafter without its settings, the shortest first.

    Those of a folder end with its whole path. Example: `/a/eagle/best` has eagle, eagle/best,
    a/eagle and a/eagle/best. For a folder with a generic name the method comes first.
    """
    if drafter in UNTRAINED:
        yield PLAIN if drafter == "none" else drafter
        return
    if not Path(drafter).is_dir() and is_class_path(drafter):
        yield drafter.rpartition(":")[2]
        yield drafter
        return
    parts = Path(os.path.abspath(drafter)).parts[1:]
    end = len(parts)
    while end > 1 and CHECKPOINT.fullmatch(parts[end - 1]):
        end -= 1
    if SAYS_NOTHING.fullmatch(parts[end - 1]):
        method = method_of(drafter)
        if method.isidentifier() and method not in (PLAIN, *UNTRAINED):
            yield method
    for start in range(end - 1, -1, -1):
        for stop in dict.fromkeys((end, len(parts))):
            name = "/".join(parts[start:stop])
            if name not in (PLAIN, *UNTRAINED):
                yield name
    yield os.path.abspath(drafter)


def distinct_labels(specs: Iterable[str]) -> dict[str, str]:
    """Return the name of each spec among the others.

    Drafters of equal names are distinguished by more of their paths and by the settings in which
    they differ. Only identical drafters, and those that a user named alike, share a name.
    """
    labels = {spec: short_name(spec) for spec in specs}
    unnamed: dict[str, list[str]] = defaultdict(list)
    for spec in labels:
        drafter, settings = parse_spec(spec)
        if "name" not in settings:
            unnamed[next(longer_names(drafter))].append(spec)
    for alike in unnamed.values():
        labels |= disambiguate(alike)
    return labels


def disambiguate(specs: Sequence[str]) -> dict[str, str]:
    """Return distinct names for drafters whose names without settings are equal."""
    parsed = {spec: parse_spec(spec) for spec in specs}
    drafters = {os.path.abspath(drafter): drafter for drafter, _ in parsed.values()}
    names: dict[str, str] = {}
    for candidates in zip(*map(longer_names, drafters.values()), strict=False):
        names = dict(zip(drafters, candidates, strict=True))
        if len({*candidates}) == len(drafters):
            break
    labels = {}
    for spec, (drafter, settings) in parsed.items():
        name = names[os.path.abspath(drafter)]
        alike = [
            other
            for own, other in parsed.values()
            if with_settings(names[os.path.abspath(own)], other) == with_settings(name, settings)
        ]
        differing = [
            key for key in settings if any(other.get(key) != settings[key] for other in alike)
        ]
        labels[spec] = with_settings(name, settings, differing)
    return labels


class NamedWay(Protocol):
    """Way to decode: a `Proposer`, or one with chosen settings."""

    name: str
    spec: DrafterSpec | None


def distinct_names(ways: Sequence[NamedWay]) -> list[str]:
    """Return the names of ways to decode, in order.

    A way with a `spec` is named after it, any other by its `name`. The second of one name ends in
    -2, and so on.
    """
    given = [way.spec or DrafterSpec("") for way in ways]
    labels: dict[tuple[str, str], str] = {}
    for suffix in dict.fromkeys(each.suffix for each in given):
        # Ways with another suffix have other names already, and must not change these.
        specs = [each.text for each in given if each.suffix == suffix and each.text]
        for spec, label in distinct_labels(specs).items():
            labels[spec, suffix] = label + suffix
    names: list[str] = []
    for way, each in zip(ways, given, strict=True):
        first = labels.get(each) or way.name
        name, number = first, 2
        while name in names:
            name, number = f"{first}-{number}", number + 1
        names.append(name)
    return names
