"""Checks of the paths that a command is to write to, made before anything that takes long."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from ...heads.errors import UserError
from ...heads.files import check_space, refuse_link, whole_file, write_json

LEAST_FREE = 1 << 20  # bytes that have to be free before anything is written
STANDARD_OUTPUT = "-"  # in place of the path of a file


def check_output(
    path: str | os.PathLike[str] | None, option: str, kind: Literal["file", "folder"] = "file"
) -> None:
    """Demand that the file or folder `path`, which `option` names, can be written or made.

    Commands call this before anything that takes long. None stands for no file. Raises `UserError`.
    """
    if path is None:
        return
    if not str(path).strip():
        raise UserError(f"{option} is empty; name a {kind}")
    place, remedy = Path(path).absolute(), f"name another {kind} with {option}"
    try:
        is_folder = place.is_dir()
        if place.exists() and is_folder != (kind == "folder"):
            found = "folder" if is_folder else "file"
            raise UserError(f"cannot write {path}: it is a {found}; name a {kind} with {option}")
        above = next(parent for parent in place.parents if parent.exists())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}") from error
    for folder in (place, above) if is_folder else (above,):
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(
                f"cannot write {path}: {folder} is not a folder that may be written to; {remedy}"
            )
    check_space(place, LEAST_FREE, f"name another place with {option}")


def check_json(path: str | None) -> None:
    """Demand that `--json path` can be written; `-` is standard output. Raises `UserError`."""
    if path != STANDARD_OUTPUT:
        check_output(path, "--json")


def output_json(path: str | None, value: object) -> bool:
    """Write `value` as `--json path` asks for: to a file, to standard output for `-`, or not.

    Returns True if it went to standard output, in place of what a command prints there else.
    """
    if path == STANDARD_OUTPUT:
        print(json.dumps(value, indent=2, ensure_ascii=False))
        return True
    if path is not None:
        with whole_file(path) as aside:
            write_json(aside, value)
    return False


def check_output_folder(path: str | os.PathLike[str], option: str, replaced: bool = False) -> None:
    """Demand that the folder `path`, which `option` names, can be written or, if need be, made.

    `replaced`: it is replaced as a whole, which a link is not. Raises `UserError`.
    """
    if replaced:
        refuse_link(Path(path))
    check_output(path, option, "folder")


def check_new_folder(path: str | os.PathLike[str], option: str) -> None:
    """Demand that the folder `path`, which `option` names, can be made. Raises `UserError`."""
    check_output_folder(path, option, replaced=True)
    if Path(path).exists():
        raise UserError(f"{path} is there already; name another {option}")
