"""Shares of a step's rows, and intervals in steps or in shares of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.command_line.parse import parse
from draftsmith.heads.errors import UserError
from draftsmith.train.config import RankShare, divided, interval
from draftsmith.train.data.config import Evaluation
from draftsmith.train.methods.medusa.method import MedusaRun


def run(rows: int, most: int) -> Any:
    return cast(Any, SimpleNamespace(rows_per_step=rows, batch_rows=most))


@pytest.mark.parametrize(
    ("rows", "most", "ranks", "found"),
    [
        (8, 2, 1, (2, 4)),
        (8, 2, 4, (2, 1)),
        (8, 2, 8, (1, 1)),
        (24, 5, 2, (4, 3)),
        (7, 3, 1, (1, 7)),
        (512, 64, 512, (1, 1)),
        (4, 9, 1, (4, 1)),
    ],
)
def test_step_division_matches_hand_computed_values(
    rows: int, most: int, ranks: int, found: tuple[int, int]
) -> None:
    assert divided(run(rows, most), ranks) == RankShare(*found)


@pytest.mark.parametrize(
    ("rows", "ranks", "says"),
    [
        (8, 3, "--rows-per-step 6 or 9, or 2 ranks"),
        (8, 16, "--rows-per-step 16, or 8 ranks"),
        (8, 512, "--rows-per-step 512, or 8 ranks"),
        (7, 4, "--rows-per-step 4 or 8, or 1 rank"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_nearest_that_can(
    rows: int, ranks: int, says: str
) -> None:
    with pytest.raises(UserError, match=f"a step of {rows} rows cannot be shared .*{says}"):
        divided(run(rows, 1), ranks)


@given(share=st.integers(1, 60), most=st.integers(1, 70), ranks=st.integers(1, 40))
def test_every_row_is_in_one_pass_of_one_rank(share: int, most: int, ranks: int) -> None:
    """Against the passes that are tried one by one."""
    found = divided(run(share * ranks, most), ranks)
    assert found.rows * found.passes == share and found.rows <= most
    fits = [rows for rows in range(1, most + 1) if share % rows == 0]
    assert found.rows == max(fits)


def test_intervals_accept_steps_and_shares_of_a_run() -> None:
    assert [interval(every, 1000) for every in (1, 250, 0.1, 0.5, 0.06)] == [1, 250, 100, 500, 60]
    # A share has a lower limit, so that a short run is not mostly evaluated.
    assert [interval(every, 30) for every in (0.1, 0.5, 1.0, 3)] == [15, 15, 30, 3]
    assert [interval(0.1, steps) for steps in (1, 7, 80, 200, 955)] == [1, 3, 40, 50, 96]
    assert interval(0.0001, 1000) == 50 and interval(750.0, 100) == 750
    assert interval(1.0, 1000) == 1000 and interval(1, 1000) == 1


@pytest.mark.parametrize(
    ("word", "steps"), [("1", 1), ("1.0", 80), ("0.5", 40), ("20", 20), ("20.0", 20)]
)
def test_intervals_survive_command_line_and_yaml_round_trip(
    word: str, steps: int, tmp_path: Path
) -> None:
    """On a command line, in YAML, and as a checkpoint notes it."""
    config = tmp_path / "run.yaml"
    needed = "target: {path: t}\ndata: {sources: [d.jsonl]}\nout: o\n"
    for text, more in (
        (needed, ["--evaluation.every", word]),
        (f"{needed}evaluation: {{every: {word}}}\n", []),
    ):
        config.write_text(text)
        made = parse(MedusaRun, ["--config", str(config), *more], "x")
        assert interval(made.evaluation.every, 80) == steps
        config.write_text(made.as_yaml())
        again = parse(MedusaRun, ["--config", str(config)], "x")
        assert interval(again.evaluation.every, 80) == steps


def test_a_part_of_a_step_is_refused() -> None:
    with pytest.raises(UserError, match="every is 2.5; give a whole number of steps, or a share"):
        Evaluation(every=2.5)
