"""Completion in a shell, by bash itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from draftsmith.train.commands.cli import main

TYPED = {
    "": "data mtp export import evaluate compare report simulate tune generate serve doctor train "
    "completion",
    "data ": "plan extract regenerate split",
    "mtp ": "doctor extract graft stitch",
    "train ea": "eagle",
    "train eagle --optim.o": "--optim.optimizer",
    "train eagle --optim.optimizer ": "adamw muon",
    "export --to v": "vllm",
    "report READ": "README.md",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "README.md").touch()
    lines = [f"source {script}"]
    for typed in TYPED:
        words = ["draftsmith", *typed.split(" ")]
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}")
        lines.append("_shtab_draftsmith 2>/dev/null; echo ${COMPREPLY[*]}")
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == list(TYPED.values()), done.stderr


def test_another_word_than_a_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["csh"]):
        with pytest.raises(SystemExit) as ended:
            main(["completion", *words])
        assert ended.value.code == 2 and "name your shell" in capsys.readouterr().err
