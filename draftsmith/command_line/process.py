"""A command as a process: what it logs, its signals, and its end in one line and an exit status.

| status | meaning |
|---|---|
| 0 | done |
| 1 | an internal error, or another rank was lost |
| 2 | an error that the user can correct |
| 130, 143 | asked to stop by SIGINT, by SIGTERM |
| 141 | nobody reads the output any more (SIGPIPE) |
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn

import psutil

from ..heads.errors import UserError, first_line, out_of_memory
from ..heads.files import write_failure

MAIN_SPEAKS_S = 5.0  # seconds that another rank waits for the first one to report the error
WATCH_S = 1.0  # seconds between two checks that the launcher is still running
DEBUG = "DRAFTSMITH_DEBUG"
# Parts of the messages of gloo and NCCL when another rank has died.
LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "nccl",
    "gloo",
)
# Numbers of the signals that `_interrupt` has seen, and the process that waits for them.
_INTERRUPTED: list[int] = []
_PROCESS = 0


PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "safetensors",
    "tokenizers",
)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of each of `PACKAGES`; None for one that is absent."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


class Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM, after which nothing asks whether to continue."""


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with status 2.

    Of several ranks only the first one prints, and its end ends the others; another rank prints if
    the first one is still running after a while, so that the error is its own.
    """
    print_on_one_rank(f"error: {message}")
    leave(2)


def print_on_one_rank(line: str) -> None:
    """Print a last line on stderr.

    The first rank prints at once, another one only if the first has not ended them all by then.
    """
    if not is_main_rank():
        # While it waits, the launcher may end it in the ordinary way: training's own handler would
        # only note the wish to stop.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(MAIN_SPEAKS_S)
        kind, _, rest = line.partition(": ")
        line = f"{kind}: rank {os.environ['RANK']}: {rest}"
    print(line, file=sys.stderr)


def leave(code: int = 0) -> NoReturn:
    """End this process; one of several ranks at once, without shutting the interpreter down.

    A gloo rank sometimes aborts while it shuts down (6 of 60 in a trial), and the launcher then
    reports a good run as failed; or it waits for the others, who wait for it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # `os._exit` flushes nothing by itself.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def is_main_rank() -> bool:
    """Return true in the first of the processes that a launcher started, and without a launcher."""
    # Accelerate's own test needs accelerate to be imported.
    return os.environ.get("RANK", "0") == "0"


def run_command(command: Callable[[list[str]], None], argv: list[str]) -> None:
    """Run a whole command; in every case it ends with a line and a status of this module.

    `--debug`, which is taken out of `argv` as `--quiet` and `--verbose` are, or DRAFTSMITH_DEBUG=1
    lets Python print the traceback of an unforeseen error.
    """
    debug = "--debug" in argv or os.environ.get(DEBUG, "") not in ("", "0")
    _open_closed_streams()
    _listen()
    try:
        command(take_verbosity([argument for argument in argv if argument != "--debug"]))
        # A full disk or a closed pipe as the output has to show here, not after `main`.
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(report_interrupt("nothing was written")) from None
    except BrokenPipeError:
        # Python flushes the rest of the output at its end and would complain about the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if (
            _INTERRUPTED
        ):  # an error in place of the interrupt; `exit_on_error` sees those of the work
            raise SystemExit(report_interrupt("nothing was written")) from None
        if debug:
            raise
        report_failure(error, argv)


def report_failure(error: Exception, argv: list[str]) -> NoReturn:
    """Print one line for an exception and exit.

    The status is 2 for errors that the user can correct: a `UserError`, a disk that refuses a file,
    and memory that runs out. Otherwise it is 1, and the line names a file with the traceback.
    """
    if isinstance(error, UserError):
        fail(str(error))
    if isinstance(error, OSError) and (reason := write_failure(error)) is not None:
        fail(
            f"cannot write {error.filename or 'the output'}: {reason}; free some space or choose "
            "another folder"
        )
    if out_of_memory(error):
        fail(
            f"out of memory: {(str(error) or 'Python could get no more').splitlines()[0]}; make "
            "batches or lengths smaller"
        )
    line = (str(error).strip() or "no message").splitlines()[0]
    print_on_one_rank(
        f"internal error: {type(error).__name__}: {line}; details in {_details(error, argv)}, "
        "please report them (or see them with --debug)"
    )
    leave(1)


def _details(error: Exception, argv: list[str]) -> str:
    """Write the traceback, the command line and versions to a file, and return its name.

    The name is `nowhere`, with the reason, if no file can be written.
    """
    lines = [f"{sys.argv[0]} {argv!r}", platform.platform()]
    lines += [f"{name} {version}" for name, version in versions().items() if version]
    lines += ["", "".join(traceback.format_exception(error))]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="draftsmith-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("\n".join(lines))
        return file.name
    except OSError:
        return "nowhere (no temporary file can be written)"


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed (`>&-`) by the null device.

    Python sets a closed stream to None, which has no `isatty`; and the next file that is opened
    would get the number of the closed stream, so that output meant for it goes into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is the closed stream's own.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


_ORDINARY = sys.unraisablehook


def _listen() -> None:
    """Let SIGINT and SIGTERM end this process in a line and a status of this module."""
    global _PROCESS
    _INTERRUPTED.clear()
    _PROCESS = os.getpid()
    signal.signal(signal.SIGINT, _interrupt)
    # Of several ranks one may wait for another without end, where no handler runs.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _unraisable


def _unraisable(found: Any) -> None:
    """Handle an exception that Python cannot raise, by repeating an interrupt a moment later.

    An interrupt within a destructor or a callback of the interpreter would otherwise be lost.
    """
    if isinstance(found.exc_value, KeyboardInterrupt):
        # By an alarm, since an exception that is raised here is dropped too.
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        _ORDINARY(found)


def _interrupt(number: int, _frame: object) -> None:
    """Handle SIGINT and SIGTERM: note the signal, and raise `KeyboardInterrupt`.

    An import that is interrupted may raise an error of its own in its place, so `run_command` and
    `exit_on_error` look at the note. A fork of this process ends at once when it is asked to.
    """
    if number == signal.SIGTERM and os.getpid() != _PROCESS:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _INTERRUPTED.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def report_interrupt(what_is_left: str) -> int:
    """Print the last line of a command that a signal has stopped, and return its status."""
    if signal.SIGTERM in _INTERRUPTED:
        print(f"ended by SIGTERM; {what_is_left}", file=sys.stderr)
        return 128 + signal.SIGTERM
    print(f"interrupted; {what_is_left}", file=sys.stderr)
    return 128 + signal.SIGINT


def exit_on_error(work: Callable[[], None], if_interrupted: Callable[[], str]) -> None:
    """Run the work of a command, once its options are known.

    An interrupt ends in the line of `if_interrupted` and status 130, or 143 for SIGTERM; so does,
    with status 1, the loss of another rank. A run that was asked to stop ends with its own status.
    """
    set_up_logging(is_main_rank())
    try:
        work()
    except StopRequested as stopped:
        leave(stopped.status)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, RuntimeError) and lost_peer(error):
            reason = first_line(error)
            print(
                f"error: rank {os.environ['RANK']} lost another one ({reason}); {if_interrupted()}",
                file=sys.stderr,
            )
            leave(1)
        # An error may be a consequence of the interrupt.
        if isinstance(error, Exception) and not _INTERRUPTED:
            raise
        leave(report_interrupt(if_interrupted()) if is_main_rank() else 128 + signal.SIGINT)


def lost_peer(error: RuntimeError) -> bool:
    """Return true if a collective operation failed because another rank has died."""
    message = str(error).lower()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and any(phrase in message for phrase in LOST_PEER)


def follow_launcher() -> None:
    """End this process, as SIGTERM does, when the launcher that started it is gone.

    Launchers are `accelerate launch`, torchrun and deepspeed. With one process a launcher does not
    pass signals on: if it is killed, the training would continue unseen.
    """
    launcher = psutil.Process().parent()
    try:
        command_line = " ".join(launcher.cmdline()) if launcher is not None else ""
    except psutil.Error:
        return
    parent = os.getppid()

    def watch() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)

    launchers = ("accelerate", "torchrun", "torch.distributed", "deepspeed")
    if any(name in command_line for name in launchers):
        threading.Thread(target=watch, daemon=True, name="follow-launcher").start()


class StopRequested(Exception):
    """Exception of a run that was asked to stop and has saved a checkpoint."""

    def __init__(self, status: int) -> None:
        super().__init__("asked to stop; the same call resumes from the last checkpoint")
        self.status = status


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Requests to stop this process, so that training can save a checkpoint first.

    They are SIGTERM, SIGINT (Ctrl-C), and SIGUSR1, which schedulers send before they kill. A second
    SIGINT, some seconds later, ends the process at once.
    """

    # A terminal sends SIGINT to all processes, and a launcher passes its own on: both are one
    # request.
    AGAIN_S = 3.0

    def __init__(self) -> None:
        self.status = 0
        """Exit status of a run that was asked to stop; 0 before a request."""
        self._since = 0.0
        for number in SIGNALS:
            signal.signal(number, self._ask)

    @property
    def asked(self) -> bool:
        """True once this rank was asked to stop; others may not have been."""
        return self.status != 0

    def _ask(self, number: int, frame: object) -> None:
        """Handle a signal: note the first request, and let a second SIGINT interrupt."""
        if number == signal.SIGINT and self.asked and time.monotonic() - self._since > self.AGAIN_S:
            raise KeyboardInterrupt
        if not self.asked:
            # SIGUSR1 stands for the SIGTERM that would follow.
            reason = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self.status, self._since = 128 + reason, time.monotonic()


SWITCHES = {"--quiet": "quiet", "--verbose": "verbose"}
Verbosity = Literal["quiet", "usual", "verbose"]
_chosen: list[Verbosity] = ["usual"]


def take_verbosity(argv: list[str]) -> list[str]:
    """Return the words of a command without the switches, and note which one was given.

    Raises `UserError` for both.
    """
    given = {word for word in argv if word in SWITCHES}
    if len(given) > 1:
        raise UserError("--quiet and --verbose exclude each other; give one")
    _chosen[0] = SWITCHES[given.pop()] if given else "usual"  # type: ignore[assignment]
    return [word for word in argv if word not in SWITCHES]


def quiet() -> bool:
    """Return whether the command is to say warnings and results alone."""
    return _chosen[0] == "quiet"


def set_up_logging(main: bool) -> None:
    """Let logging, progress and transformers say as much as was asked for, on stderr.

    Other ranks than the `main` one say warnings alone. Imports transformers.
    """
    from transformers.utils import logging as transformers_logging

    from ..inference.base.console import ProgressReporter

    ProgressReporter.quiet = quiet()
    usual = logging.INFO if main else logging.WARNING
    level = logging.WARNING if quiet() else usual
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpx2", "datasets", "filelock", "fsspec", "accelerate"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It reports at every save that tied weights are stored once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    if _chosen[0] == "verbose" and main:
        logging.getLogger("draftsmith").setLevel(logging.DEBUG)
    if quiet() and "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    if quiet() or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
