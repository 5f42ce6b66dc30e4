"""Who may write a folder or a file, and whose unfinished ones are deleted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import time
from pathlib import Path

import pytest

from draftsmith.heads import locks
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import remove_partials
from draftsmith.heads.locks import lock_of, only_writer, partial_path


def test_partials_of_living_processes_stay_and_those_of_dead_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = partial_path(tmp_path / "mine")
    monkeypatch.setattr(os, "getpid", lambda: sleeping.pid)
    sleeping = subprocess.Popen(["sleep", "600"])
    theirs = partial_path(tmp_path / "theirs")
    monkeypatch.undo()
    for path in (mine, theirs):
        path.mkdir()
    others = tmp_path / ".x.01234567.partial"  # not called as ours are
    elsewhere = tmp_path / ".x.other-host.7.01234567.partial"
    for path in (others, elsewhere):
        path.write_text("x")
    try:
        remove_partials(tmp_path)
        assert set(tmp_path.iterdir()) == {mine, theirs, others, elsewhere}
    finally:
        sleeping.kill()
        sleeping.wait()
    remove_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, others, elsewhere}
    monkeypatch.setattr(locks, "OLD_S", 0.0)
    time.sleep(0.01)
    remove_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, others}, "nothing has changed elsewhere for a day"


def test_partial_of_a_reused_process_id_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's main process is number 1 again after a restart."""
    left = partial_path(tmp_path / "x")
    left.mkdir()
    monkeypatch.setattr(locks, "SKEW_S", -1e9)  # as if this process had begun after that write
    remove_partials(tmp_path)
    assert not left.exists()


def test_second_writer_of_a_path_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    for is_folder in (True, False):
        with only_writer(out, is_folder, "wait"):
            with (
                pytest.raises(UserError, match=rf"out is being written by process {os.getpid()} "),
                only_writer(out, is_folder, "wait"),
            ):
                raise AssertionError
            assert lock_of(out, is_folder).exists()
        assert not (tmp_path / "deep" / "out").exists() and not lock_of(out, is_folder).exists()
    with only_writer(out, True, "wait"):
        (out / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]
    with only_writer(out, True, "wait"):
        pass
    assert [path.name for path in out.iterdir()] == ["file"]


def test_lock_file_removed_before_locking_is_reacquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is removed between opening and locking it, as the former holder does."""
    lock, flock, calls = lock_of(tmp_path, True), fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with only_writer(tmp_path, True, "wait"):
        assert len(calls) == 2
        with pytest.raises(UserError), only_writer(tmp_path, True, "wait"):
            raise AssertionError


def test_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    with caplog.at_level(logging.WARNING), only_writer(tmp_path, True, "wait"):
        pass
    assert f"{tmp_path} is on a file system without locks (No locks available)" in caplog.text


def test_lock_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    lock_of(tmp_path, True).mkdir()
    with (
        pytest.raises(UserError, match="cannot write to .*: Is a directory; choose"),
        only_writer(tmp_path, True, "wait"),
    ):
        raise AssertionError
