"""Files and directories that are complete or absent, and clear errors for those that are neither.

They are written under another name, flushed to disk and then renamed. Checksums find what was
damaged afterwards, and a file's name that was read from another file may not leave its folder. One
process at a time may write: its lock is the system's own (`flock`), which ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors import SafetensorError

from .errors import UserError, first_line

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
"""Object of a JSON or YAML file, or of a message to or from a server: its values are anything that
such files hold."""
CHECKSUMS = "checksums.json"
# torch.save reports a full disk as a RuntimeError with one of these texts, without an errno.
STREAM_ERRORS = ("PytorchStreamWriter", "unexpected pos", "iostream error")
# Errors of the operating system that the user can fix by choosing another place.
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
LOCK_FILE = ".lock"  # in a folder; that of a file is .NAME.lock next to it
OLD_S = 24 * 3600.0
"""Age in seconds at which an unfinished file of another machine counts as abandoned."""
SKEW_S = 60.0  # seconds by which the clock of a file server may differ
# A file system that cannot lock says so with one of these.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
PARTIAL = re.compile(r"\.(?P<host>[^.]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?:partial|replaced)$")


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty directory next to `path`, which becomes `path` on success.

    An existing `path` is replaced; on any error until then the new directory is removed. A reader
    never sees a half-written directory, whenever the process is killed. An existing `path` is
    absent between two renames; if the process is killed there, the next writer in the same folder
    puts the old one back. The directory that a killed writer leaves is named as `partial_path`
    says; `remove_partials` deletes it. Raises `UserError` if the disk is full or refuses the files,
    and for a link.
    """
    path = Path(path)
    refuse_link(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_back(path.parent)
        # In the same folder, since a rename is atomic only within one file system.
        aside = partial_path(path)
        aside.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror}; choose another output folder"
        ) from error
    with _removed_on_error(aside, path, "output folder"):
        yield aside
        # safetensors writes files that only their owner may read, and a server may run as another
        # user. The umask can only be read by setting it.
        mask = os.umask(0)
        os.umask(mask)
        for inner in (aside, *aside.rglob("*")):
            if inner.is_file():
                inner.chmod(0o666 & ~mask)
            # The contents reach the disk before the rename does: after a crash of the machine, a
            # directory of the right name must not hold empty files.
            _sync(inner)
        old = _put_in_place(aside, path)
        # The new name is in the parent folder, which is flushed like a file.
        _sync(path.parent)
        if old is not None:
            _remove(old)


@contextmanager
def _removed_on_error(aside: Path, path: Path, other: str) -> Iterator[None]:
    """Delete `aside` on any error; raise `UserError` if the disk refused to write `path`."""
    try:
        yield
    # Ctrl-C too: nothing half-written may remain.
    except BaseException as error:
        _remove(aside)
        if (reason := write_failure(error)) is not None:
            raise UserError(
                f"cannot write {path}: {reason}; free some space or choose another {other}"
            ) from error
        raise


def _put_in_place(aside: Path, path: Path) -> Path | None:
    """Give the directory `aside` the name `path`; return where the old `path` is now, if any."""
    if not path.exists():
        aside.rename(path)
        return None
    # A directory that is not empty cannot be renamed over, so the old one is renamed first.
    old = partial_path(path, "replaced")
    path.rename(old)
    try:
        aside.rename(path)
    except BaseException:
        old.rename(path)
        raise
    return old


def _remove(path: Path) -> None:
    """Delete a file, a link, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_failure(error: BaseException) -> str | None:
    """Return why the disk refused a file, or None if `error` is about something else.

    Python, safetensors and torch report a full disk in three different ways.
    """
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error.strerror
    if isinstance(error, SafetensorError) and "I/O error" in str(error):
        return str(error).split("I/O error: ")[-1]
    if isinstance(error, RuntimeError) and any(text in str(error) for text in STREAM_ERRORS):
        return "the disk is full or refuses the file"
    return None


def refuse_link(path: Path) -> None:
    """Raise `UserError` for a link, in place of which no folder is put."""
    if path.is_symlink():
        raise UserError(
            f"cannot write {path}: it is a link to {os.readlink(path)}; remove the link, or name "
            "another folder"
        )


def check_space(path: Path, needed: float, remedy: str) -> None:
    """Raise `UserError`, with `remedy`, unless `needed` bytes are free where `path` will be."""
    candidates = (path.absolute(), *path.absolute().parents)
    # The path itself need not exist; the root folder always does.
    existing = next(candidate for candidate in candidates if candidate.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"cannot write {path}: {free / 1e6:,.1f} MB are free there and {needed / 1e6:,.1f} MB "
            "are needed; free some space, "
            f"or {remedy}"
        )


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file next to `path`, which becomes `path` on success.

    On any error the file is removed. Raises `UserError` if the disk is full or refuses it.
    """
    path = Path(path)
    aside = partial_path(path)
    with _removed_on_error(aside, path, "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        _sync(aside)
        aside.rename(path)
        # Otherwise a crash of the machine could keep a file that was written later, and not this.
        _sync(path.parent)


def remove_partials(folder: Path, owned: bool = False) -> None:
    """Delete the unfinished files and directories that killed writers left in `folder`.

    Those of living processes stay; with `owned`, those of this machine alone: no other one writes
    there. A directory that was about to be replaced gets its name back.
    """
    put_back(folder)
    for leftover in folder.glob(".*.partial"):
        if is_abandoned(leftover, owned):
            _remove(leftover)


def put_back(folder: Path) -> None:
    """Give directories their names back whose replacement was killed; delete replaced ones."""
    for old in folder.glob(".*.replaced"):
        if is_abandoned(old):
            path = folder / PARTIAL.sub("", old.name).removeprefix(".")
            if path.exists():
                _remove(old)
            else:
                old.rename(path)


def host_name() -> str:
    """Return this machine's name as it is in names of files: letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:32] or "host"


def partial_path(path: Path, ending: str = "partial") -> Path:
    """Return a new path next to `path` for what will become it: `.NAME.HOST.PID.HEX.partial`.

    With the ending `replaced`, for what it replaces.
    """
    owner = f"{host_name()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return path.parent / f".{path.name}.{owner}.{ending}"


def is_abandoned(partial: Path, owned: bool = False) -> bool:
    """Return true for an unfinished file or directory whose writer is dead.

    The processes of another machine are not known here: its writer counts as dead when nothing in
    `partial` has changed for `OLD_S`, or at once with `owned`, for a folder that this process alone
    writes. Files without a name of `partial_path` are not ours.
    """
    if (found := PARTIAL.search(partial.name)) is None:
        return False
    times = [0.0]
    for path in (partial, *partial.rglob("*")):
        with suppress(OSError):  # it may be renamed meanwhile
            times.append(path.lstat().st_ctime)
    if found["host"] != host_name():
        return owned or time.time() - max(times) > OLD_S
    try:
        # A process that began after the last write is another one of the same number.
        return psutil.Process(int(found["pid"])).create_time() > max(times) + SKEW_S
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # of another user
        return False


def lock_of(path: Path, is_folder: bool) -> Path:
    """Return the lock file of the folder `path`, which is in it, or of the file `path`."""
    return path / LOCK_FILE if is_folder else path.parent / f".{path.name}{LOCK_FILE}"


@contextmanager
def only_writer(path: Path, is_folder: bool, remedy: str) -> Iterator[None]:
    """Keep other processes from writing the folder or file `path`, which need not exist.

    The folder of the lock is made if it is not there, and removed if nothing was written to it.
    Raises `UserError` if another process holds the lock; the message names `path`, the process, and
    ends with `remedy`. A warning says so where the file system has no locks.
    """
    lock = lock_of(path, is_folder)
    made = not lock.parent.exists()
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock, path, remedy)
    except OSError as error:
        raise UserError(
            f"cannot write to {lock.parent}: {error.strerror}; choose another output"
        ) from error
    try:
        yield
    finally:
        # Removed while it is held: a process that waits for it finds it gone (`_locked`).
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        if made:
            with suppress(OSError):  # it holds something now
                lock.parent.rmdir()


def _locked(lock: Path, path: Path, remedy: str) -> int:
    """Return the descriptor of the locked file. Raises as `only_writer`, and `OSError`."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{path} is being written by {holder or 'another process'}; {remedy}"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
            log.warning(
                "%s is on a file system without locks (%s): nothing keeps another process from "
                "writing there too",
                path,
                error.strerror,
            )
        with suppress(FileNotFoundError):
            # The one that held it may have removed the file between the two calls above.
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    # Reading is enough for `fsync`, and a directory cannot be opened for anything else.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts_of(folder: Path) -> dict[str, JsonObject]:
    """Return size and SHA-256 of every file below `folder`, by its path relative to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): file_facts(path) for path in files}


def file_facts(path: Path) -> JsonObject:
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def write_checksums(folder: Path) -> None:
    """Write size and SHA-256 of every file below `folder` to its `checksums.json`, for `damage`."""
    # The table is computed before its own file exists, so that it does not list itself.
    write_json(folder / CHECKSUMS, facts_of(folder))


def differs(folder: Path, name: str, noted_in: str, size: int | None, sha256: str) -> str | None:
    """Return a sentence about how a file differs from what was noted of it, or None.

    `name` is the file's path in `folder`; `size` in bytes (None: not noted) and `sha256` are in
    the file `noted_in` there. Raises `UserError` for a name that leads out of the folder.
    """
    path = inside(folder, name, noted_in)
    if not path.is_file():
        return f"{name} is missing"
    # The size first: a file that was cut short is found without reading it.
    if size is not None and (now := path.stat().st_size) != size:
        return f"{name} has {now} bytes instead of {size}"
    if checksum(path) != sha256:
        return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def damage(folder: Path) -> str | None:
    """Return a sentence about a file that is not as `write_checksums` found it, or None."""
    try:
        table = read_json(folder / CHECKSUMS)
        for name, facts in table.items():
            reason = differs(folder, name, CHECKSUMS, facts["bytes"], facts["sha256"])
            if reason is not None:
                return reason
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    # A garbled table may be a list, or lack a key: everything that reading it can raise.
    except (UserError, AttributeError, KeyError, TypeError):
        return f"{CHECKSUMS} is missing or garbled"
    known = {*table, CHECKSUMS}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # What a user puts next to the drafter, such as a report, is read by nobody here.
        read = name.parts[0] == "state" or path.suffix == ".safetensors"
        if read and path.is_file() and str(name) not in known:
            return f"{name} does not belong to it"
    return None


def inside(folder: Path, name: Any, named_by: str) -> Path:
    """Return the path of the file `name`, which `named_by`, a file of `folder`, names.

    The file need not exist. Raises `UserError` for a name that leads out of the folder: an absolute
    one, one with `..`, or a symbolic link to another place.
    """
    path = folder / str(name)
    resolved = folder.resolve()
    allowed = [resolved]
    # In the hub's cache a snapshot is a folder of links to ../../blobs, so these are within it.
    if resolved.parent.name == "snapshots":
        allowed.append(resolved.parent.parent / "blobs")
    # A name from a damaged or malicious file may be of any type, and `resolve` fails for a NUL.
    plain = (
        isinstance(name, str)
        and name
        and "\0" not in name
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
    )
    if not plain or not any(path.resolve().is_relative_to(parent) for parent in allowed):
        raise UserError(
            f"{folder / named_by} names {name!r}, which is not a file within its folder; copy or "
            "download it again"
        )
    return path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, finite: bool = True, remedy: str = "copy or download it again") -> Any:
    """Return the JSON value in the file `path`; a byte order mark is skipped.

    Raises `UserError` for a missing or broken file, and, where numbers have to be `finite`, for NaN
    and infinities, which JSON does not have but Python reads. The message ends with `remedy`.
    """
    try:
        return json.loads(
            path.read_text(encoding="utf-8-sig"), parse_constant=no_constant if finite else None
        )
    except OSError as error:
        advice = "check the path" if isinstance(error, FileNotFoundError) else remedy
        raise UserError(f"cannot read {path}: {error.strerror}; {advice}") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON (line {error.lineno}): {error.msg}; {remedy}"
        ) from error
    # Text in another encoding, tables within tables without end, or an integer of more digits than
    # Python converts.
    except (RecursionError, ValueError) as error:
        reason = first_line(error).partition(";")[0]
        raise UserError(f"{path} cannot be read: {reason}; {remedy}") from error


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader in which a date is a text."""


YamlLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith("timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> JsonObject:
    """Return the table in a YAML file; a byte order mark is skipped. Raises `UserError`."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8-sig"), YamlLoader)
    except FileNotFoundError as error:
        raise UserError(f"config file {path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{path} is not valid YAML: {error.problem}{place}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is not valid YAML: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a table of keys; see configs/ for examples")
    return value


def no_constant(name: str) -> float:
    """Raise `ValueError` for NaN and infinities: the `parse_constant` of a strict `json.loads`."""
    raise ValueError(f"it holds {name}, which is not a number in JSON")
