"""Directories that are whole or absent: written aside, synced to disk, then renamed into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from .errors import UserError

LEAST_FREE = 1 << 20  # bytes, for whatever is to be written
CHECKSUMS = "checksums.json"
STREAM_ERRORS = ("PytorchStreamWriter", "unexpected pos", "iostream error")
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
)


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty directory beside `path`; on success it becomes `path` (replacing it), on any
    error it is removed.

    `path` is always whole or absent; while an old one is replaced it is absent for the moment
    between two renames.

    A reader never sees a half-written directory, whenever the process is killed. What a killed
    writer leaves behind is named `.NAME.HEX.partial`; `remove_partials` deletes it.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        aside.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror}; choose another output folder"
        ) from error
    try:
        yield aside
        mask = os.umask(0)
        os.umask(mask)
        for file in aside.rglob("*"):
            # safetensors writes files that nobody else may read, and a server may be somebody else
            if file.is_file():
                file.chmod(0o666 & ~mask)
        sync_tree(aside)
        if path.exists():
            old = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
            path.rename(old)
            aside.rename(path)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        else:
            aside.rename(path)
        _sync(path.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if (reason := write_failure(error)) is not None:
            raise UserError(
                f"cannot write {path}: {reason}; free some space or choose another output folder"
            ) from error
        raise


def write_failure(error: BaseException) -> str | None:
    """Why the disk refused, if that is what `error` is about; each library says it in its own
    way."""
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error.strerror
    if isinstance(error, SafetensorError) and "I/O error" in str(error):
        return str(error).split("I/O error: ")[-1]
    if isinstance(error, RuntimeError) and any(word in str(error) for word in STREAM_ERRORS):
        return "the disk is full or refuses the file"
    return None


def check_output(path: str | os.PathLike[str] | None, option: str) -> None:
    """Demand that the file which `option` names can be written, before anything that takes long.
    None is no file. Raises `UserError`."""
    if path is None:
        return
    if not str(path).strip():
        raise UserError(f"{option} is empty; name a file")
    if Path(path).is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file with {option}")
    _check_parent(Path(path), option)


def check_output_folder(path: str | os.PathLike[str], option: str) -> None:
    """`check_output` for a folder, which may be there already."""
    if not str(path).strip():
        raise UserError(f"{option} is empty; name a folder")
    if Path(path).exists() and not Path(path).is_dir():
        raise UserError(f"cannot write {path}: it is a file; name a folder with {option}")
    if Path(path).is_dir() and not os.access(path, os.W_OK):
        raise UserError(
            f"cannot write to {path}: permission denied; name another folder with {option}"
        )
    _check_parent(Path(path), option)


def _check_parent(path: Path, option: str) -> None:
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; name another with {option}"
        ) from error
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"cannot write {path}: {folder} is not a folder that may be written to; name another "
            f"with {option}"
        )
    check_space(path, LEAST_FREE, f"name another place with {option}")


def check_space(path: Path, needed: float, remedy: str) -> None:
    """Demand that many bytes of free space where `path` is or will be. Raises `UserError`."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"cannot write {path}: {free / 1e6:,.1f} MB are free there and {needed / 1e6:,.1f} MB "
            "are needed; free some space, "
            f"or {remedy}"
        )


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success it becomes `path`, on any error it is
    removed."""
    path = Path(path)
    aside = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        _sync(aside)
        aside.rename(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if (reason := write_failure(error)) is not None:
            raise UserError(
                f"cannot write {path}: {reason}; free some space or choose another file"
            ) from error
        raise


def remove_partials(folder: Path, but: str = "") -> None:
    """Delete what killed writers left in `folder`, but of the file of that name, which somebody
    else may be writing."""
    for left in folder.glob(".*.partial"):
        if but and left.name.startswith(f".{but}."):
            continue
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and directory below `folder` to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `folder`, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): file_facts(path) for path in files}


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def write_checksums(folder: Path) -> None:
    """Note size and SHA-256 of every file below `folder`, for `damage` to look at."""
    write_json(folder / CHECKSUMS, facts_of(folder))


def differs(folder: Path, name: str, noted_in: str, size: int | None, sha256: str) -> str | None:
    """A sentence about how a file of `folder` differs from what the file `noted_in` says of it, or
    None.

    Raises `UserError` for a name that leads out of the folder.
    """
    path = inside(folder, name, noted_in)
    if not path.is_file():
        return f"{name} is missing"
    if size is not None and (now := path.stat().st_size) != size:
        return f"{name} has {now} bytes instead of {size}"
    return (
        None
        if checksum(path) == sha256
        else f"{name} has changed since it was written (its SHA-256 differs)"
    )


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_checksums` has seen, or None."""
    try:
        table = read_json(folder / CHECKSUMS)
        for name, facts in table.items():
            if (
                reason := differs(folder, name, CHECKSUMS, facts["bytes"], facts["sha256"])
            ) is not None:
                return reason
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except (UserError, AttributeError, KeyError, TypeError):
        return f"{CHECKSUMS} is missing or garbled"
    known = {*table, CHECKSUMS}
    surplus = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and str(path.relative_to(folder)) not in known
    ]
    return f"{surplus[0].relative_to(folder)} does not belong to it" if surplus else None


def inside(folder: Path, name: Any, named_by: str) -> Path:
    """The path of a file that `named_by`, a file of `folder`, names. It need not exist.

    Raises `UserError` for a name that leads out of the folder: an absolute one, one with `..`, or a
    symbolic link to another place. Links into the blobs of the hub's cache, of which its snapshots
    are made, are within.
    """
    path = folder / str(name)
    own = folder.resolve()
    homes = [own] + [own.parent.parent / "blobs"] * (own.parent.name == "snapshots")
    plain = (
        isinstance(name, str)
        and name
        and "\0" not in name
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
    )
    if not plain or not any(path.resolve().is_relative_to(home) for home in homes):
        raise UserError(
            f"{folder / named_by} names {name!r}, which is not a file within its folder; copy or "
            "download it again"
        )
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, finite: bool = True, remedy: str = "copy or download it again") -> Any:
    """The JSON value in `path`; a byte order mark is skipped. Raises `UserError` for a missing or
    broken file, and, where numbers have to be `finite`, for NaN and infinities, which Python reads
    although they are no JSON."""
    try:
        return json.loads(
            path.read_text(encoding="utf-8-sig"), parse_constant=no_constant if finite else None
        )
    except OSError as error:
        what = "check the path" if isinstance(error, FileNotFoundError) else remedy
        raise UserError(f"cannot read {path}: {error.strerror}; {what}") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON (line {error.lineno}): {error.msg}; {remedy}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason}); {remedy}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read; {remedy}") from error
    except ValueError as error:  # such as an integer of more digits than Python converts
        raise UserError(
            f"{path} cannot be read: {str(error).partition(';')[0]}; {remedy}"
        ) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The table of keys in `path`. Raises `UserError` for a missing file, and one that is no YAML
    or no table."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is not YAML ({str(error).splitlines()[0]}); mend it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a table of keys; see configs/ for examples")
    return value


def no_constant(name: str) -> float:
    """For `parse_constant` of `json.loads`. Raises `ValueError` for NaN and infinities."""
    raise ValueError(f"it holds {name}, which is no number in JSON")
