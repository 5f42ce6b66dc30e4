"""A training run's log whose last line is not whole."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from draftsmith.inference.evaluation import training_log
from draftsmith.inference.evaluation.training_log import read_metrics


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "loss": 1.5}', "{"])
def test_truncated_last_log_line_is_skipped_and_repaired(
    torn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    whole = torn.endswith("}")
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in read_metrics(path)] == ([1, 2] if whole else [1])
        assert ("its last line is not whole and is left out" in caplog.text) != whole
        training_log.repair_metrics(path)
    with path.open("a") as file:
        file.write('{"step": 3}\n')
    assert [row["step"] for row in read_metrics(path)] == ([1, 2, 3] if whole else [1, 3])
    assert ("its last line was not whole and is cut off" in caplog.text) != whole
    before = path.read_bytes()
    training_log.repair_metrics(path)
    training_log.repair_metrics(tmp_path / "none.jsonl")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
