"""Lines and table of the training log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.inference.base.console import OutputConsole
from draftsmith.inference.evaluation.training_log import METRICS_FILE
from draftsmith.train.evaluation import warn_of_other_replies
from draftsmith.train.reporting import evaluation_line, step_line, summary

STEP = {"loss": 0.42, "tau_rows": 2.384, "lr": 1e-4, "tokens_s": 12345.6}
MEASURED = {"tau_measured": 4.694, "tau_measured_low": 4.35, "tau_measured_high": 4.97}


def test_step_and_evaluation_lines_label_their_values() -> None:
    assert step_line(75, 150, STEP, 245.0) == (
        "step 75/150  loss 0.42  tau_rows 2.38  lr 0.0001  12,346 tok/s  4 min 5 s left"
    )
    assert step_line(150, 150, {**STEP, "tau_rows": float("nan")}, 0.0) == (
        "step 150/150  loss 0.42  lr 0.0001  12,346 tok/s"
    )
    assert evaluation_line(75, 150, MEASURED, 4.694, 75) == (
        "step 75/150  tau 4.69 (4.35-4.97) on held-out prompts  best so far"
    )
    assert evaluation_line(75, 150, {**MEASURED, "loop_share": 5 / 6}, 4.694, 75) == (
        "step 75/150  tau 4.69 (4.35-4.97) on held-out prompts; 83% of the replies loop, which "
        "raises tau  best so far"
    )
    few = {**MEASURED, "tau_measured_low": float("nan"), "tau_measured_high": float("nan")}
    assert evaluation_line(75, 150, few, 4.694, 75) == (
        "step 75/150  tau 4.69 on held-out prompts  best so far"
    )
    assert evaluation_line(75, 150, {"tau_estimated": 2.1}, 4.7, 50) == (
        "step 75/150  tau 2.10 estimated on held-out texts  best 4.70 at step 50"
    )


def test_the_longest_line_fits_100_columns() -> None:
    worst = {"loss": 0.0001234, "tau_rows": 12.34, "lr": 1.2e-5, "tokens_s": 1234567.0}
    assert len(step_line(999_998, 999_999, worst, 35_999_999.0)) <= 100


def test_final_table_shows_the_best_and_the_first_step(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "tau_estimated": 3.0, **MEASURED, "tau_measured": 4.4, "surv@1": 0.9},
        {"step": 10, "loss": 1.0},
        {"step": 10, "tau_estimated": 4.7, **MEASURED, "surv@1": 0.8, "surv@2": 0.4, "surv@3": 0.0},
        {"step": 20, "tau_estimated": 4.5, **MEASURED, "tau_measured": 4.5, "surv@1": 0.8},
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = OutputConsole(width=80, record=True)
    console.print(summary(tmp_path, 10))
    assert [line.split() for line in console.export_text().splitlines() if line.strip()] == [
        ["best", "step", "10,", "tau", "4.69", "(4.35-4.97)"],
        ["first", "measured", "step", "0,", "tau", "4.40", "(4.35-4.97)"],
    ]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float32, "text: in float32 that is a bug; please report it"),
        (
            torch.bfloat16,
            "text: in bfloat16 near-ties may be decided otherwise",
        ),
    ],
)
def test_replies_that_differ_have_the_reason_of_their_precision(
    dtype: torch.dtype, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_other_replies(1, 2, dtype)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("1 of 2 held-out replies differ") and said in line
