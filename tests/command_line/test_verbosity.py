"""--quiet and --verbose of every command."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from transformers.utils import logging as transformers_logging

from draftsmith.command_line.process import set_up_logging, take_verbosity
from draftsmith.commands.cli import main
from draftsmith.inference.base.console import ProgressReporter

OURS, DATASETS = logging.getLogger("draftsmith"), logging.getLogger("datasets")


@pytest.fixture(autouse=True)
def levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Levels without a command, restored afterwards."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    before = transformers_logging.get_verbosity()
    levels = [(one, one.level) for one in (logging.root, OURS, DATASETS)]
    yield
    for one, level in levels:
        one.setLevel(level)
    transformers_logging.set_verbosity(before)
    ProgressReporter.quiet = False
    take_verbosity([])


@pytest.mark.parametrize(
    ("word", "ours", "transformers"),
    [
        ("--quiet", logging.WARNING, logging.ERROR),
        ("--verbose", logging.DEBUG, None),
        ("--seed", logging.INFO, None),
    ],
)
def test_libraries_follow_the_switch(
    word: str, ours: int, transformers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own, or nothing is set up
    before = transformers_logging.get_verbosity()
    left = take_verbosity(["generate", word, "--prompt", "x"])
    assert left == ["generate", *([word] * (word == "--seed")), "--prompt", "x"]
    set_up_logging(main=True)
    assert OURS.getEffectiveLevel() == ours and ProgressReporter.quiet == (word == "--quiet")
    assert transformers_logging.get_verbosity() == (transformers or before)
    assert DATASETS.level == logging.WARNING


def test_a_variable_of_transformers_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    before = transformers_logging.get_verbosity()
    take_verbosity(["--quiet"])
    set_up_logging(main=True)
    assert transformers_logging.get_verbosity() == before


def test_progress_is_silent_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressReporter.quiet = True
    for _ in (progress := ProgressReporter(range(2), desc="work")):
        progress.say("a line")
    assert capsys.readouterr() == ("", "")


def test_the_switches_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor"], ["train", "eagle"], ["data", "plan"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--quiet", "--verbose"])
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            "error: --quiet and --verbose exclude each other; give one\n"
        )
    main(["--quiet", "--version"])
    assert capsys.readouterr().out.startswith("draftsmith ")
