"""Measurements that are stopped: the same command goes on to the same figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from draftsmith.inference.decode import Generation, Round
from draftsmith.inference.evaluation.evaluate import comparable_facts
from draftsmith.inference.evaluation.journal import Journal, journal_path
from tests.conftest import PYTHON, QUICKSTART
from tests.helpers.command_line import run_cli
from tests.helpers.training import environment

DRAFTER = str(QUICKSTART.parent / "drafters" / "eagle3")
CLI = "from draftsmith.commands.cli import main; main()"


def test_a_journal_gives_back_what_was_put_and_is_gone_when_finished(tmp_path: Path) -> None:
    report, identity = str(tmp_path / "o.json"), {"target": "t", "options": {"limit": None}}
    first = Journal(report, identity, "an evaluation")
    reply = Generation(
        [1, 2],
        [3, 4],
        [Round(tokens=[4], drafted=2, accepted=1, offered=2, rule="greedy", overlap=[0.5])],
        "eos",
        0.25,
        0.5,
    )
    first.put("a", to_builtins({"plain": [reply]}))
    with journal_path(report).open("a") as file:
        file.write('["b", [1')  # the process died here
    second = Journal(report, identity, "an evaluation")
    assert convert(second.get("a"), dict[str, list[Generation]]) == {"plain": [reply]}
    assert second.get("b") is None
    second.put("b", 5)
    assert Journal(report, identity, "an evaluation").get("b") == 5
    other = Journal(report, {**identity, "target": "u"}, "an evaluation")
    assert other.get("a") is None, "of another target"
    other.finish()
    assert not journal_path(report).exists()


def test_without_a_report_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, {}, "an evaluation")
    journal.put("a", 1)
    journal.finish()
    assert journal.get("a") is None and not list(tmp_path.iterdir())


def prompts_in(folder: Path, count: int = 6) -> str:
    rows = [{"id": i, "prompt": f"def add{i}(a, b):\n    # Add two numbers."} for i in range(count)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "p.jsonl")


def killed_when(code: str, arguments: list[str], path: Path, lines: int) -> None:
    """Run a command and kill it without warning once `path` has so many lines."""
    process = subprocess.Popen(
        [PYTHON, "-c", code, *arguments], env=environment(), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not path.is_file() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def counted(report: dict[str, Any]) -> list[Any]:
    """Everything in a report that is no time."""
    return [
        (
            setting["temperature"],
            name,
            [(r["id"], r["rounds"], r["equal_to_ar"]) for r in drafter["per_request"]],
        )
        for setting in report["settings"]
        for name, drafter in setting["drafters"].items()
    ]


def test_killed_evaluation_resumes_from_its_journal(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    shared = [
        "evaluate",
        "--target",
        str(QUICKSTART),
        "--drafter",
        DRAFTER,
        "--no-baselines",
        "--prompts",
        prompts_in(tmp_path),
    ]
    sweep = [
        "--temperature",
        "0,1",
        "--max-new-tokens",
        "24",
        "--repeats",
        "1",
        "--json",
        str(out),
    ]
    journal = journal_path(str(out))
    # the head, T = 0, and three prompts of T = 1
    killed_when(CLI, [*shared, *sweep], journal, 1 + 6 + 3)
    assert not out.exists(), "a report is whole or absent"
    done = run_cli(*shared, *sweep)
    assert done.returncode == 0 and "resuming an evaluation that was interrupted" in done.stderr, (
        done.stderr
    )
    assert not journal.exists()
    resumed = json.loads(out.read_text())
    whole = run_cli(*shared, *sweep[:-1], str(tmp_path / "whole.json"))
    assert whole.returncode == 0 and counted(resumed) == counted(
        json.loads((tmp_path / "whole.json").read_text())
    )


def test_killed_tuning_resumes_from_its_journal(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    shared = [
        "tune",
        "--target",
        str(QUICKSTART),
        "--drafter",
        "ngram",
        "--drafter",
        "ngram:longest=5",
        "--prompts",
        prompts_in(tmp_path, 2),
    ]
    small = ["--budget", "0.01"]
    journal = journal_path(str(out))
    # the head, one drafter
    killed_when(CLI, [*shared, *small, "--out", str(out)], journal, 1 + 1)
    _, first = json.loads(journal.read_text().splitlines()[1])
    done = run_cli(*shared, *small, "--out", str(out))
    assert done.returncode == 0 and "resuming a tuning that was interrupted" in done.stderr, (
        done.stderr
    )
    profile = json.loads(out.read_text())
    drafters = profile["drafters"]
    assert drafters["ngram"] == [first] and drafters["ngram:longest=5"]
    assert not journal.exists()


def test_unwritable_output_path_is_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shared = [
        "evaluate",
        "--target",
        str(tmp_path),
        "--drafter",
        "ngram",
        "--prompts",
        prompts_in(tmp_path),
    ]
    done = run_cli(*shared, "--json", str(tmp_path / "file" / "o.json"))
    assert done.returncode == 2 and "is not a folder that may be written to" in done.stderr


@pytest.mark.parametrize("command", ["evaluate", "tune", "data regenerate"])
def test_sigterm_message_names_what_is_kept(tmp_path: Path, command: str) -> None:
    """SIGTERM, which schedulers and `timeout` send, ends in a line and its own status."""
    prompts, out = prompts_in(tmp_path), str(tmp_path / "o.json")
    words = {
        "evaluate": ["--prompts", prompts, "--no-baselines", "--json", out, "--repeats", "500"],
        "tune": ["--prompts", prompts, "--drafter", "ngram", "--out", out, "--budget", "0"],
        "data regenerate": ["--data", prompts, "--out", out, "--batch-size", "1",
                            "--max-new-tokens", "900"],
    }[command]  # fmt: skip
    written = {"data regenerate": tmp_path / "o.json"}.get(command, journal_path(out))
    process = subprocess.Popen(
        [PYTHON, "-c", CLI, *command.split(), "--target", str(QUICKSTART), *words],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(path.is_file() for path in {written, *tmp_path.glob("o.json*")}):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    last = errors.splitlines()[-1]
    assert last.startswith("ended by SIGTERM; ") and "the same command continues where" in last
    assert (str(written) in last) == (command != "data regenerate")
    assert "Traceback" not in errors


def handles(pid: int, number: int) -> bool:
    """Return whether a process has set a handler for a signal, by its status in /proc."""
    status = Path("/proc", str(pid), "status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("later_s", [0.0, 1.0])
def test_early_sigterm_reports_that_nothing_was_measured(tmp_path: Path, later_s: float) -> None:
    """The signal comes once it is handled, or a moment later, mostly within an import."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, "evaluate", "--target", str(QUICKSTART), "--prompts",
         prompts_in(tmp_path), "--json", str(tmp_path / "o.json")],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not handles(process.pid, signal.SIGTERM):
        time.sleep(0.05)
    time.sleep(later_s)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] in (
        "ended by SIGTERM; nothing was written",  # while modules are imported
        "ended by SIGTERM; nothing was measured yet; the same command begins again",
    )


def test_a_target_of_known_weights_may_be_named_otherwise() -> None:
    def facts(path: str, weights: str | None) -> dict[str, Any]:
        target = {"name": path, "weights_hash": weights}
        options = {"target": {"path": path, "adapter": None, "dtype": "auto"}}
        return comparable_facts({"target": target, "options": options | {"json": path}}, "json")

    assert facts("/models/one", "ab") == facts("one", "ab") != facts("one", "cd")
    assert facts("/models/one", None) != facts("one", None)
