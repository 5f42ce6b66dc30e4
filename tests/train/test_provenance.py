"""Provenance of a checkpoint."""

from __future__ import annotations

import pytest

from draftsmith.train.provenance import command_line


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/opt/venv/bin/draftsmith", "train", "eagle"], "draftsmith train eagle"),
        (["/home/me/draftsmith/train/__main__.py", "eagle"], "python -m draftsmith.train eagle"),
        (["/opt/draftsmith/__main__.py", "tune"], "python -m draftsmith tune"),
    ],
)
def test_a_command_is_noted_as_it_is_typed(argv: list[str], typed: str) -> None:
    assert " ".join(command_line(argv)) == typed
