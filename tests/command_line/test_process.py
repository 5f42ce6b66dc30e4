"""Ends of commands: never a traceback, the exit status that a shell expects, and no process that is
left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from draftsmith.command_line import process
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import damage
from draftsmith.train.checkpoint import RunFolder
from tests.helpers.training import LAUNCH, environment, make_config

SIMULATE = ["simulate", "--acceptance", "0.8"]


def started(arguments: list[str], **options) -> subprocess.Popen[str]:
    code = "from draftsmith.commands.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], text=True, stderr=subprocess.PIPE, **options
    )


@pytest.mark.full
def test_closed_output_pipe_ends_quietly_with_sigpipe_status() -> None:
    reader, writer = os.pipe()
    process = started(SIMULATE, stdout=writer)
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.full
def test_full_disk_on_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = started(SIMULATE, stdout=full)
        _, errors = process.communicate(timeout=60)
    assert (
        process.returncode == 2
        and errors.startswith("error: cannot write the output: No space left")
        and errors.count("\n") == 1
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "closed", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)]
)
def test_commands_work_with_closed_standard_streams(closed: int) -> None:
    process = started(SIMULATE, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(closed))
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and not errors and (closed == 1 or "tokens a round" in out)


def interrupted_import(*_: object) -> None:
    """Raise another error instead of an interrupt, as transformers does within an import."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    except KeyboardInterrupt as error:
        raise RuntimeError("Failed to import it") from error


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (interrupted_import, "nothing was written"),
        (lambda _: process.exit_on_error(interrupted_import, lambda: "it goes on"), "it goes on"),
    ],
)
def test_an_error_in_place_of_an_interrupt_is_an_interrupt(
    command: Callable[[list[str]], None], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            process.run_command(command, [])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        process._INTERRUPTED.clear()
    assert ended.value.code == 143
    assert capsys.readouterr().err == f"ended by SIGTERM; {left}\n"


def broken(argv: list[str]) -> None:
    raise {
        "memory": MemoryError(),
        "cuda": RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        "user": UserError("no"),
    }.get(argv[0], ZeroDivisionError("one by\nzero"))


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        (
            "memory",
            2,
            "error: out of memory: Python could get no more; make batches or lengths smaller",
        ),
        (
            "cuda",
            2,
            "error: out of memory: CUDA out of memory. Tried to allocate 2 GiB; make batches",
        ),
        ("user", 2, "error: no"),
        ("else", 1, "internal error: ZeroDivisionError: one by; details in "),
    ],
)
def test_unexpected_error_is_one_line_with_details_file(
    kind: str, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            process.run_command(broken, [kind])
        said = capsys.readouterr().err
        assert ended.value.code == code and said.startswith(line) and said.count("\n") == 1
        if code == 1:
            details = Path(said.split("details in ")[1].split(",")[0])
            assert (
                "ZeroDivisionError: one by\nzero" in details.read_text()
                and "transformers 5" in details.read_text()
            )
            details.unlink()
            with pytest.raises(ZeroDivisionError):
                process.run_command(broken, [kind, "--debug"])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "to_launcher"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.full),
    ],
)
def test_training_ends_together_with_its_launcher(
    tmp_path: Path, saved_tiny: Path, number: int, to_launcher: bool
) -> None:
    """accelerate passes no signal on to a single process; Ctrl-C in a terminal reaches both."""
    config = make_config(tmp_path, saved_tiny, max_steps=100_000)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_processes", "1"]
    command = [*launcher, "-m", "draftsmith.train", "medusa", "--config", str(config)]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command, env=environment(PYTHONUNBUFFERED="1"), stdout=log, stderr=log, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        while "step 3/" not in (tmp_path / "log").read_text():
            time.sleep(0.1)
            assert process.poll() is None, (tmp_path / "log").read_text()
        (child,) = [
            c
            for c in psutil.Process(process.pid).children(recursive=True)
            if "draftsmith.train" in c.cmdline()
        ]
        (process if to_launcher else child).send_signal(number)
        process.wait(timeout=60)
        psutil.wait_procs([child], timeout=60)
    said = (tmp_path / "log").read_text()
    assert not child.is_running() and process.returncode != 0
    folder = RunFolder(str(tmp_path / "run"))
    saved = folder.steps()[-1]
    assert (
        f"asked to stop: saved step {saved} of 100000" in said and damage(folder.at(saved)) is None
    )


def test_sigterm_ends_a_chat_that_was_interrupted_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier Ctrl-C that did not end the command does not change the status."""
    monkeypatch.setattr(process, "_INTERRUPTED", [])
    monkeypatch.setattr(process, "_PROCESS", os.getpid())
    with pytest.raises(KeyboardInterrupt) as first:
        process._interrupt(signal.SIGINT, None)
    assert first.type is KeyboardInterrupt
    with pytest.raises(process.Terminated):
        process._interrupt(signal.SIGTERM, None)
    assert process.report_interrupt("nothing is left") == 143
    assert capsys.readouterr().err == "ended by SIGTERM; nothing is left\n"


def test_interrupt_swallowed_by_a_destructor_is_raised_again() -> None:
    """Python only prints an exception in a destructor, such as that of an import lock."""
    code = (
        "import os, signal, time\n"
        "from draftsmith.command_line.process import run_command\n"
        "class Swallows:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)\n"
        "def work(argv):\n"
        "    Swallows()\n"
        "    time.sleep(20)\n"
        "run_command(work, [])\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr == "interrupted; nothing was written\n", (
        done.stderr
    )
    assert time.monotonic() - began < 15
