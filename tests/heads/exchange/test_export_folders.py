"""The folder of an export: its name, its files and the command that is printed for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import ENGINES, EngineName
from draftsmith.heads.exchange.exporter import export
from tests.helpers.random_artifacts import (
    block,
    eagle,
    heads,
    order,
)


def test_nothing_but_a_drafter_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(UserError, match="holds something else"):
        export(eagle(), order("vllm", tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "ten years"
    for _ in range(2):
        export(eagle(), order("vllm", tmp_path / "drafter"))


def test_every_engine_has_its_command(tmp_path: Path) -> None:
    """The printed command stands in the folder's README and in draftsmith.json too."""
    for engine in ENGINES:
        for kind in ENGINES[engine].recipes:
            artifact = {
                "eagle1": lambda: eagle("eagle1"),
                "eagle3": eagle,
                "medusa": heads,
                "dflash": block,
            }.get(kind, lambda: None)()
            if artifact is None:
                continue
            out = tmp_path / f"{engine}-{kind.replace('_', '-')}"
            command = export(artifact, order(engine, out), "apache-2.0").serve
            page = (out / "README.md").read_text()
            assert (
                command in page
                and str(out) in command
                and page.startswith("---\n")
                and "\nlicense: apache-2.0\n" in page
            )
            assert json.loads((out / "draftsmith.json").read_text())["export"]["serve"] == command
            assert engine == "speculators" or engine == "tgi" or "the/target" in command


@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang", "trtllm", "llamacpp"])
def test_commands_are_safe_to_paste(engine: EngineName, tmp_path: Path) -> None:
    """Whatever the folder is called, a shell sees it as one word (TensorRT-LLM's stands in
    YAML)."""
    out = tmp_path / "it's my head"
    command = export(eagle(), order(engine, out)).serve
    if engine == "trtllm":
        assert json.dumps(str(out)) in command
        return
    words = [
        word for line in command.replace("\\\n", " ").splitlines() for word in shlex.split(line)
    ]
    assert any(
        word == str(out) or (word.startswith("{") and json.loads(word)["model"] == str(out))
        for word in words
    )


def test_no_file_link_or_drafter_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    eagle().save(tmp_path / "trained")
    monkeypatch.chdir(tmp_path)
    refused = {
        "file": "is a file, a link",
        "link": "a link",
        ".": "the folder that you are in",
        "trained": "something else than an export",
    }
    for name, says in refused.items():
        with pytest.raises(UserError, match=says):
            export(eagle(), order("vllm", Path(name)))
    assert (tmp_path / "file").read_text() == "x" and (
        tmp_path / "trained" / "model.safetensors"
    ).is_file()


def test_files_may_be_read_by_a_server_of_another_user(tmp_path: Path) -> None:
    export(eagle(), order("vllm", tmp_path / "drafter"))
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in (tmp_path / "drafter").iterdir())
