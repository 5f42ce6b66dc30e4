"""Run the steps of a check one after another, each in a process of its own, and measure them.

A step is one or several commands as a user would type them. Those of this package run in a fork of
this process, which has imported everything once: that saves each of them some seconds, and nothing
of one step is left behind in the next.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.commands import cli
from draftsmith.heads.errors import UserError

TABLE = "│┃└┘─━┏┓┡┩┴┳╇┼"  # what tables on a terminal are drawn with
REFUSED = 2  # exit code of every command for what a user has to change


@dataclass
class Command:
    """What a step runs: arguments of `draftsmith`, of `python -m draftsmith.train`, or of any other
    program."""

    arguments: Sequence[str]
    program: Sequence[str] = ("draftsmith",)
    may_refuse: bool = False
    """Exit code 2 with a reason is an answer too, such as of an engine that cannot serve this
    drafter."""

    def __str__(self) -> str:
        return shlex.join([*self.program, *self.arguments])

    @property
    def entry(self) -> Callable[[list[str]], None] | None:
        """The function of a program of this package; None for another program."""
        entries = {("draftsmith",): cli.main, TRAIN: cli.train_main}
        return entries.get(tuple(self.program))


TRAIN = ("python", "-m", "draftsmith.train")


@dataclass
class Step:
    """One row of the table."""

    name: str
    commands: Sequence[Command] = ()
    after: Callable[[Path], str] | None = None
    """Looks at what the commands made (given their log) and returns a remark; raises
    `AssertionError` with what is wrong."""
    needs: Sequence[str] = ()
    """Steps without which this one means nothing."""


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    result: str
    """pass, FAIL or skipped."""
    remark: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Largest resident memory of one of its processes."""


@dataclass
class Runner:
    """Runs steps, keeps their logs in `folder` and their outcomes here."""

    folder: Path
    timeout_s: float
    tell: Callable[[Outcome], None]
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, step: Step) -> None:
        bad = {outcome.name for outcome in self.outcomes if outcome.result != "pass"}
        if missing := [name for name in step.needs if name in bad]:
            outcome = Outcome(step.name, "skipped", f"needs {missing[0]}")
        else:
            outcome = self._run(step)
        self.outcomes.append(outcome)
        self.tell(outcome)

    def _run(self, step: Step) -> Outcome:
        log = self.folder / f"{len(self.outcomes) + 1:02d} {step.name}.log".replace(
            " ", "-"
        ).replace("/", "-")
        started, peak, refused = time.monotonic(), 0, []
        outcome = Outcome(step.name, "pass")
        for command in step.commands:
            with log.open("a") as file:
                file.write(f"$ {command}\n")
            before = log.stat().st_size
            code, used = run_command(command, log, self.timeout_s)
            peak = max(peak, used)
            if code == REFUSED and command.may_refuse:
                refused.append(last_line(log, before))
            elif code != 0:
                outcome.result, outcome.remark = (
                    "FAIL",
                    f"exit code {code}: {last_line(log, before)}",
                )
                break
        if outcome.result == "pass":
            try:
                outcome.remark = step.after(log) if step.after is not None else ""
            except AssertionError as error:
                outcome.result, outcome.remark = "FAIL", str(error)
        if refused:
            outcome.remark = "; ".join(filter(None, [outcome.remark, *refused]))
        outcome.seconds, outcome.peak_bytes = time.monotonic() - started, peak
        return outcome


def run_command(command: Command, log: Path, timeout_s: float) -> tuple[int, int]:
    """Exit code and peak resident bytes of `command`, whose output goes to the end of `log`."""
    pid = _forked(command, log) if command.entry is not None else _started(command, log)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                with log.open("a") as file:
                    file.write(f"killed: it ran for more than {timeout_s:.0f} seconds\n")
            time.sleep(0.02)
    except BaseException:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def _started(command: Command, log: Path) -> int:
    with log.open("a") as file:
        return subprocess.Popen(
            [*command.program, *command.arguments], stdout=file, stderr=file, start_new_session=True
        ).pid


def _forked(command: Command, log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [*command.program, *command.arguments]
    code = 1
    try:
        assert command.entry is not None
        command.entry(list(command.arguments))
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # noqa: BLE001  this process ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def last_line(log: Path, start: int) -> str:
    """The last line of a log after byte `start` that says something: an error line if there is
    one."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace").replace("\r", "\n")
    lines = [line.strip(TABLE + " ") for line in text.splitlines() if line.strip(TABLE + " ")]
    errors = [
        line.removeprefix("error: ")
        for line in lines
        if line.startswith("error: ") or "│ error" in line
    ]
    return (errors or lines or ["it said nothing"])[-1]


def run_isolated(work: Callable[[], None]) -> None:
    """`work` in a fork of this process, so that its memory and threads are gone afterwards. Raises
    `UserError`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except UserError as error:
            os.write(writer, str(error).encode())
            code = REFUSED
        except BaseException:  # noqa: BLE001  this process ends here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        reason = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise UserError(reason or f"a process that made the target ended with exit code {code}")
