"""Ranks that wait for each other."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.training import LAUNCH, environment


@pytest.mark.full
def test_a_rank_that_has_failed_is_noticed_and_one_that_prepares_data_is_waited_for() -> None:
    """Limits of 4 seconds and of minutes; the main process prepares for 8 seconds."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH]
    command += ["--multi_gpu", "--num_processes", "2", "-m", "tests.train.patience_script"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.count("prepared") == 2, ran.stderr[-2000:]
    (seconds,) = re.findall(r"noticed after ([\d.]+) s", ran.stdout)
    assert 3 < float(seconds) < 12
