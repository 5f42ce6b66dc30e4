"""Mistakes that are found before the seconds or minutes in which a target is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import draftsmith
from draftsmith.commands.cli import main
from draftsmith.heads.errors import UserError
from tests.conftest import QUICKSTART, ROOT

DSPARK = QUICKSTART.parent / "drafters" / "dspark"
SETTING = "has no setting 'bad'; there are: length, width"


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's target without weights: a command that loads it ends in another error."""
    folder = tmp_path_factory.mktemp("targets") / "target"
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


GENERATE = ("generate", "--prompt", "x")
EVALUATE = ("evaluate", "--prompts", "PROMPTS", "--drafter", "ngram")
TUNE = ("tune", "--prompts", "PROMPTS", "--out", "OUT", "--drafter")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*GENERATE, "--drafter", f"{DSPARK}:bad=1"), SETTING),
        ((*GENERATE, "--max-new-tokens", "0"), "--max-new-tokens must be at least 1, not 0"),
        ((*GENERATE, "--profile", "missing.json"), "cannot read missing.json"),
        (("generate", "--prompt", "  "), "the prompt is empty"),
        (("generate", "--prompts", "EMPTY"), "empty.jsonl:1: the prompt is empty; fix or remove"),
        ((*EVALUATE, "--drafter", f"{DSPARK}:bad=1"), SETTING),
        ((*EVALUATE, "--max-new-tokens", "0"), "--max-new-tokens must be at least 1, not 0"),
        ((*EVALUATE, "--profile", "missing.json"), "cannot read missing.json"),
        ((*EVALUATE, "--batch-size", "4"), "a batch of 4 needs as many prompts, and there are 1"),
        (("evaluate", "--drafter", "ngram"), "--prompts is missing"),
        (("evaluate", "--prompts", "EMPTY"), "empty.jsonl:1: the prompt is empty"),
        (("evaluate", "--prompts", "EMPTY", "--bad-rows", "skip"), "holds no prompts"),
        ((*TUNE, f"{DSPARK}:bad=1"), SETTING),
        ((*TUNE, "ngram:length=x"), "length must be a whole number of at least 1, not 'x'"),
        ((*TUNE, "ngram", "--batch-size", "0"), "--batch-size must be at least 1, not 0"),
        ((*TUNE, "ngram", "--prompts", "EMPTY"), "the prompt is empty"),
        (("serve", "--port", "0", "--drafter", f"{DSPARK}:bad=1"), SETTING),
        (("serve", "--port", "0", "--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
    ],
)
def test_invalid_commands_are_refused_before_loading_the_target(
    words: tuple[str, ...],
    says: str,
    unloadable: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    Path("empty.jsonl").write_text('{"prompt": ""}\n')
    files = {"PROMPTS": "prompts.jsonl", "EMPTY": "empty.jsonl", "OUT": "profile.json"}
    given = [files.get(word, word) for word in words]
    if given.count("--prompts") > 1:
        place = given.index("--prompts")
        del given[place : place + 2]
    with pytest.raises(SystemExit) as stopped:
        main([*given, "--target", str(unloadable)])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stopped.value.code == 2 and len(said) == 1 and says in said[0]
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "empty.jsonl"}


def test_a_drafter_from_python_is_looked_at_first(unloadable: Path) -> None:
    with pytest.raises(UserError, match="has no setting 'bad'"):
        draftsmith.load(unloadable, f"{DSPARK}:bad=1", device="cpu")


def test_held_out_sources_of_a_shipped_configuration_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration holds out its own source `valid`; the user has replaced all sources."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "def add(a, b):", "response": " return a + b"}\n' * 3)
    words = ["train", "eagle", "--config", str(ROOT / "configs/eagle/quickstart.yaml")]
    words += ["--target", str(QUICKSTART), "--data.sources", str(own)]
    words += ["--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stopped.value.code == 2
    assert f"asks to hold out valid, but the sources are {own}" in said
    assert said.endswith("or hold out a share of all rows: --data.held-out.by row")
    with pytest.raises(SystemExit):
        main([*words, "--data.held-out.sources", f"{own},{own}"])
    assert "name one of these, several as a list [a,b], or" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
