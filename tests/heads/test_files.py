"""Files and folders that are whole or absent, whoever is killed, and who may write them."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from draftsmith.heads import files, locks
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import remove_partials, whole_directory, whole_file
from draftsmith.heads.locks import lock_of, only_writer, partial_path
from draftsmith.inference.evaluation.training_log import mend_metrics, read_metrics

KILLED = """
import os, sys
from pathlib import Path
from draftsmith.heads import files
from draftsmith.heads.files import whole_directory
path, renames, exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
rename = Path.rename
if not exchange:
    files._exchange = lambda one, other: False
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


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_or_the_new(
    renames: int, exchange: bool, tmp_path: Path
) -> None:
    """Killed in place of its rename of that number. What is left behind is put right by the next
    that cleans up."""
    path = tmp_path / "x"
    path.mkdir()
    (path / "file").write_text("old")
    command = [sys.executable, "-c", KILLED, str(path), str(renames), str(exchange)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 9), done.stderr
    if exchange:
        assert (path / "file").exists(), "there is one at every moment"
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
    older = tmp_path / ".x.01234567.partial"  # as version 1.0 named it
    elsewhere = tmp_path / ".x.other-host.7.01234567.partial"
    for path in (older, elsewhere):
        path.write_text("x")
    try:
        remove_partials(tmp_path)
        assert set(tmp_path.iterdir()) == {mine, theirs, older, elsewhere}
    finally:
        sleeping.kill()
        sleeping.wait()
    remove_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, older, elsewhere}
    monkeypatch.setattr(locks, "OLD_S", 0.0)
    time.sleep(0.01)
    remove_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {mine}, "nothing has changed there for a day"


def test_a_number_that_another_process_has_now_is_not_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's main process is number 1 again after a restart."""
    left = partial_path(tmp_path / "x")
    left.mkdir()
    monkeypatch.setattr(locks, "SKEW_S", -1e9)  # as if this process had begun after that write
    remove_partials(tmp_path)
    assert not left.exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
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


def test_a_lock_that_is_given_back_meanwhile_is_taken_anew(
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


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    with caplog.at_level(logging.WARNING), only_writer(tmp_path, True, "wait"):
        pass
    assert f"{tmp_path} is on a file system without locks (No locks available)" in caplog.text


def test_a_folder_that_refuses_the_lock_is_one_line(tmp_path: Path) -> None:
    lock_of(tmp_path, True).mkdir()
    with (
        pytest.raises(UserError, match="cannot write to .*: Is a directory; choose"),
        only_writer(tmp_path, True, "wait"),
    ):
        raise AssertionError


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "loss": 1.5}', "{"])
def test_a_log_that_ends_in_half_a_line(
    torn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    whole = torn.endswith("}")
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in read_metrics(path)] == ([1, 2] if whole else [1])
        assert ("its last line is not whole and is left out" in caplog.text) != whole
        mend_metrics(path)
    with path.open("a") as file:
        file.write('{"step": 3}\n')
    assert [row["step"] for row in read_metrics(path)] == ([1, 2, 3] if whole else [1, 3])
    assert ("its last line was not whole and is cut off" in caplog.text) != whole
    before = path.read_bytes()
    mend_metrics(path)
    mend_metrics(tmp_path / "none.jsonl")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_two_names_are_exchanged_here(tmp_path: Path) -> None:
    """Otherwise the test of a kill would try one way only."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two names")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
