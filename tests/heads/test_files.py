"""Files and folders that are whole or absent, whoever is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.heads.files import remove_partials, whole_directory, whole_file

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
    with patch("draftsmith.heads.locks.OLD_S", -1), whole_directory(tmp_path / "out") as aside:
        (aside / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*names, "out"))
