"""Names of drafters in tables, reports and lists of models: short, and distinct from each other.

A trained drafter is called after its folder, without its settings, or as its setting `name` says.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..drafters import UNTRAINED, Given, parse_spec
from ..own_drafters import is_own, own_name

PLAIN = "plain"
"""Name of decoding without a drafter."""
CHECKPOINT = re.compile(r"best|last|step-\d+|checkpoints")
"""Folders within that of a training run, which say nothing of the drafter."""


def short_name(spec: str) -> str:
    """Return a drafter's name if there is no other.

    `runs/eagle/best:length=3` is `eagle`, `ngram:length=8` stays, `package.module:Mine` is `Mine`,
    and `..:name=mine` is `mine`.
    """
    name, settings = parse_spec(spec)
    if "name" in settings:
        return str(settings["name"])
    if name in UNTRAINED:
        return PLAIN if name == "none" else with_settings(name, settings)
    if is_own(name) and not Path(name).is_dir():
        shown = {key: value for key, value in settings.items() if key != "folder"}
        return with_settings(own_name(name), shown)
    return next(longer_names(name))


def with_settings(name: str, settings: dict[str, object]) -> str:
    """Return `name:key=value,...`, and the name alone without settings."""
    rest = ",".join(f"{key}={value}" for key, value in settings.items() if key != "name")
    return f"{name}:{rest}" if rest else name


def longer_names(folder: str) -> Iterator[str]:
    """Yield names for a folder, the shortest first; the last one is its whole path.

    Example: `/a/eagle/best` has eagle, eagle/best, a/eagle and a/eagle/best.
    """
    parts = Path(os.path.abspath(folder)).parts[1:]
    end = len(parts)
    while end > 1 and CHECKPOINT.fullmatch(parts[end - 1]):
        end -= 1
    for start in range(end - 1, -1, -1):
        for stop in dict.fromkeys((end, len(parts))):
            name = "/".join(parts[start:stop])
            if name not in (PLAIN, *UNTRAINED):
                yield name
    yield os.path.abspath(folder)


def distinct_labels(specs: Iterable[str]) -> dict[str, str]:
    """Return the name of each spec among the others.

    Drafters of equal names are distinguished by more of their paths, and by the settings in which
    they differ. Only those that a user called alike, or that are alike, keep one name.
    """
    labels = {spec: short_name(spec) for spec in specs}
    counts = Counter(labels.values())
    for label in [label for label, count in counts.items() if count > 1]:
        alike = [spec for spec in labels if labels[spec] == label]
        if not any("name" in parse_spec(spec)[1] for spec in alike):
            labels |= told_apart(alike)
    return labels


def told_apart(specs: Sequence[str]) -> dict[str, str]:
    """Return longer names of folders whose `short_name` is the same."""
    parsed = {spec: parse_spec(spec) for spec in specs}
    folders = {os.path.abspath(folder): folder for folder, _ in parsed.values()}
    names: dict[str, str] = {}
    for candidates in zip(*map(longer_names, folders), strict=False):
        names = dict(zip(folders, candidates, strict=True))
        if len({*candidates}) == len(folders):
            break
    labels = {}
    for spec, (folder, settings) in parsed.items():
        path = os.path.abspath(folder)
        others = [found for name, found in parsed.values() if os.path.abspath(name) == path]
        differing = {
            key: value
            for key, value in settings.items()
            if any(other.get(key) != value for other in others)
        }
        labels[spec] = with_settings(names[path], differing)
    return labels


def distinct_names(ways: Sequence[object]) -> list[str]:
    """Return the names of ways to decode, in order.

    A way that has a `given` is called after it, any other as its `name` says. The second of one
    name ends in -2, and so on.
    """
    given = [getattr(way, "given", None) or Given("") for way in ways]
    labels: dict[tuple[str, str], str] = {}
    for suffix in dict.fromkeys(each.suffix for each in given):
        # Ways with another suffix have other names already, and must not change these.
        specs = [each.spec for each in given if each.suffix == suffix and each.spec]
        for spec, label in distinct_labels(specs).items():
            labels[spec, suffix] = label + suffix
    names: list[str] = []
    for way, each in zip(ways, given, strict=True):
        first = labels.get(each) or getattr(way, "name", "")
        name, number = first, 2
        while name in names:
            name, number = f"{first}-{number}", number + 1
        names.append(name)
    return names
