"""Locks on folders and files that one process at a time may write, and who owns unfinished ones.

The lock is the system's own (`flock`), so it ends with its process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .errors import UserError

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"  # in a folder; that of a file is .NAME.lock next to it
OLD_S = 24 * 3600.0
"""Seconds after which an unfinished file is nobody's, if its process cannot be asked for."""
SKEW_S = 60.0  # seconds by which the clock of a file server may differ
# A file system that cannot lock says so with one of these.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
PARTIAL = re.compile(r"\.(?P<host>[^.]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?:partial|replaced)$")


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

    A writer on another machine cannot be asked for: it is taken for dead when nothing in `partial`
    has changed for a day, or at once with `owned`, for a folder that this process alone writes.
    Files that are not called as `partial_path` says are not ours.
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
        # Removed while it is held: who waits for this file finds that it is gone (`_locked`).
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
