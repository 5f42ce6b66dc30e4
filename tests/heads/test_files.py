"""Files and folders that are whole or absent after a kill; their locks, and unfinished ones."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from draftsmith.heads import files
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import (
    lock_of,
    only_writer,
    partial_path,
    remove_partials,
    whole_directory,
    whole_file,
)

KILLED = """
import os, sys
from pathlib import Path
from draftsmith.heads.files import whole_directory
path, renames = Path(sys.argv[1]), int(sys.argv[2])
rename = Path.rename
def killing(self, target):
    global renames
    if renames == 0:
        os._exit(9)
    renames -= 1
    return rename(self, target)
Path.rename = killing
with whole_directory(path) as aside:
    (aside / "file").write_text("new")
"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_or_the_new(
    renames: int, tmp_path: Path
) -> None:
    """Killed in place of its rename of that number. What is left behind is put right by the next
    that cleans up."""
    path = tmp_path / "x"
    path.mkdir()
    (path / "file").write_text("old")
    command = [sys.executable, "-c", KILLED, str(path), str(renames)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 9), done.stderr
    remove_partials(tmp_path)
    assert (path / "file").read_text() == ("new" if done.returncode == 0 else "old")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "x").symlink_to("there")
    (tmp_path / "y").symlink_to("nowhere")
    for name in ("x", "y"):
        with (
            pytest.raises(UserError, match=f"{name}: it is a link to .*remove the link"),
            whole_directory(tmp_path / name) as aside,
        ):
            (aside / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "x", "y"]
    assert (tmp_path / "x").is_symlink() and not list((tmp_path / "there").iterdir())


def test_the_folder_of_a_file_is_flushed_after_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        at = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed.append((at, (tmp_path / "f").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    with whole_file(tmp_path / "f") as aside:
        aside.write_text("x")
    assert flushed == [(str(aside), False), (str(tmp_path), True)]


def test_user_files_with_similar_names_are_not_deleted(tmp_path: Path) -> None:
    """The folder of an export may be the user's own, with any files in it."""
    names = (".notes.replaced", "notes.replaced", ".vimrc.replaced", ".a.host.1.replaced")
    for name in names:
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 0))
    with patch("draftsmith.heads.files.OLD_S", -1), whole_directory(tmp_path / "out") as aside:
        (aside / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*names, "out"))


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
    monkeypatch.setattr(files, "OLD_S", 0.0)
    time.sleep(0.01)
    remove_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, others}, "nothing has changed elsewhere for a day"


def test_partial_of_a_reused_process_id_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's main process is number 1 again after a restart."""
    left = partial_path(tmp_path / "x")
    left.mkdir()
    monkeypatch.setattr(files, "SKEW_S", -1e9)  # as if this process had begun after that write
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
