"""Configs of well-known targets, by which a run can be planned without the hub."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...heads.errors import UserError

FOLDER = Path(__file__).with_name("targets")  # NAME.json is the config.json of a target


def names() -> list[str]:
    """Return the names of the targets whose configs are here, such as qwen3-32b."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def name_of(target: str) -> str | None:
    """Return the name here of a target by its name on the hub; None if it is not here."""
    name = target.rpartition("/")[2].lower()
    return name if name in names() else None


@contextmanager
def folder_of(name: str) -> Iterator[str]:
    """Yield a folder that holds the config.json of a target, and nothing else, for as long as used.

    Upper case and the owner on the hub may be given. Raises `UserError` with the nearest names and
    all names if there is no such target.
    """
    if (found := name_of(name)) is None:
        wanted = name.rpartition("/")[2].lower()
        near = difflib.get_close_matches(wanted, names(), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"unknown target shape {name!r}; {hint}there are: {', '.join(names())}")
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        folder = Path(temporary) / found
        folder.mkdir()
        shutil.copyfile(FOLDER / f"{found}.json", folder / "config.json")
        yield str(folder)
