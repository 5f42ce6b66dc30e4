"""Threads of a command are chosen by the load before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.commands.threads import CHOICES, crowded, crowded_threads, stored_threads
from draftsmith.inference.evaluation.journal import Journal
from tests.conftest import ROOT

CHOOSE = """
import os, sys
from types import SimpleNamespace
from draftsmith.commands.threads import choose_threads
choose_threads(SimpleNamespace(target="t", out=sys.argv[1]))
print(os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
"""


def test_thread_count_depends_on_load_of_other_processes() -> None:
    # cores, wanted threads, others -> threads of decoding and of training
    for cores, wanted, others, decoding, training in [
        (2, 2, 1.0, 1, 2), (2, 2, 2.0, 1, 2), (2, 2, 4.0, 1, 1), (8, 8, 3.0, 5, 8),
        (64, 32, 40.2, 24, 32), (64, 32, 96.0, 1, 1),
    ]:  # fmt: skip
        assert crowded(others, wanted, cores)
        assert crowded_threads(others, wanted, cores, training=False) == decoding
        assert crowded_threads(others, wanted, cores, training=True) == training
    assert not crowded(0.3, 2, 2)
    assert not crowded(30.0, 32, 64)


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """A process more than there are cores."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range((os.cpu_count() or 1) + 1)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def chosen(out: Path, **environment: str) -> tuple[list[str], str]:
    """Return number, waiting and whether torch was imported; and the line on stderr."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE, str(out)],
        env={**kept, **environment}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), done.stderr.strip()


@pytest.mark.usefixtures("busy_machine")
def test_a_busy_machine_gets_threads_that_do_not_spin(tmp_path: Path) -> None:
    facts, line = chosen(tmp_path)
    assert facts == ["1", "None", "False"]
    assert line.startswith("the machine is busy (load ")
    assert line.endswith("): one thread; read tau, not tokens/s")
    # what the user set stays
    assert chosen(tmp_path, OMP_NUM_THREADS="2") == (["2", "None", "False"], "")
    assert chosen(tmp_path, OMP_WAIT_POLICY="active") == (["None", "active", "False"], "")
    assert chosen(tmp_path, WORLD_SIZE="2")[0] == ["None", "None", "False"]
    # a run continues with its own number
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000010"
    (checkpoint / "drafter").mkdir(parents=True)
    (checkpoint / "provenance.json").write_text('{"threads": 2}')
    (tmp_path / "run" / "last").symlink_to("checkpoints/step-000010/drafter")
    facts, line = chosen(tmp_path / "run")
    assert facts == ["2", "passive", "False"]
    assert "2 threads, which sleep while they wait" in line


def test_thread_count_is_restored_from_profile_or_journal(tmp_path: Path) -> None:
    assert stored_threads(SimpleNamespace(target="t", out=None, json=None, profile=None)) is None
    profile, damaged = tmp_path / "profile.json", tmp_path / "damaged.json"
    profile.write_text(json.dumps({"machine": {"threads": 3}}, indent=2))
    damaged.write_text('{"machine": {"threads": "many"')
    assert stored_threads(SimpleNamespace(profile=str(profile))) == 3
    assert stored_threads(SimpleNamespace(profile=str(damaged))) is None
    report = str(tmp_path / "report.json")
    Journal(report, {"threads": 4}, "an evaluation").put("key", 1)
    assert stored_threads(SimpleNamespace(json=report)) == 4
    tuned = str(tmp_path / "tuned.json")
    Journal(tuned, {"machine": {"threads": 5}}, "a tuning").put("key", 1)
    assert stored_threads(SimpleNamespace(out=tuned)) == 5
