"""How a command ends: one line and an exit status for everything that may befall it, in one process
or in each of many ranks.

0 done, 2 what the user can mend, 1 a mistake of ours or a lost rank, 130 and 143 asked to stop
(SIGINT, SIGTERM), 141 nobody reads the output any more.
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
from importlib import metadata
from typing import Any, NoReturn

import psutil

from ..heads.errors import UserError
from ..heads.files import write_failure

MAIN_SPEAKS_S = 5.0  # how long another rank waits for the first one to say what is wrong
WATCH_S = 1.0  # between two looks at whether the launcher is still there
DEBUG = "DRAFTSMITH_DEBUG"
LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "nccl",
    "gloo",
)
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
)
_INTERRUPTED: list[int] = []


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with 2. Of several ranks the first speaks, whose end is
    that of the others; another one does if it finds that it is alone with its trouble."""
    say_for_all_ranks(f"error: {message}")
    leave(2)
    raise SystemExit(2)


def say_for_all_ranks(line: str) -> None:
    """Print a last line on stderr: the first rank at once, another one only if the first has not
    ended all by then."""
    if not is_main_rank():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(MAIN_SPEAKS_S)
        kind, _, rest = line.partition(": ")
        line = f"{kind}: rank {os.environ['RANK']}: {rest}"
    print(line, file=sys.stderr)


def leave(code: int = 0) -> None:
    """End one of several ranks at once, without shutting the interpreter down; does nothing where
    there is only one.

    A gloo rank sometimes aborts while it shuts down (6 of 60 in a trial), and the launcher then
    reports a good run as failed; or it waits for the others, who wait for it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_main_rank() -> bool:
    """Whether this process is the first of those that a launcher started; known before accelerate
    is."""
    return os.environ.get("RANK", "0") == "0"


def run_command(command: Callable[[list[str]], None], argv: list[str]) -> None:
    """Run a whole command; whatever happens, it ends as the head of this file says.

    `--debug`, taken out of `argv`, or DRAFTSMITH_DEBUG=1 lets Python print the traceback of what
    was not foreseen.
    """
    debug = "--debug" in argv or os.environ.get(DEBUG, "") not in ("", "0")
    _open_closed_streams()
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    try:
        command([argument for argument in argv if argument != "--debug"])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # or Python complains when it flushes what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if debug:
            raise
        report_failure(error, argv)


def report_failure(error: Exception, argv: list[str]) -> NoReturn:
    """One line for an exception, by what it is about."""
    if isinstance(error, UserError):
        fail(str(error))
    if isinstance(error, OSError) and (reason := write_failure(error)) is not None:
        fail(
            f"cannot write {error.filename or 'the output'}: {reason}; free some space or choose "
            "another folder"
        )
    if isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in OUT_OF_MEMORY
    ):
        fail(
            f"out of memory: {(str(error) or 'Python could get no more').splitlines()[0]}; make "
            "batches or lengths smaller"
        )
    line = (str(error).strip() or "no message").splitlines()[0]
    say_for_all_ranks(
        f"internal error: {type(error).__name__}: {line}; details in {_details(error, argv)}, "
        "please report them "
        f"(or see them with --debug)"
    )
    leave(1)
    raise SystemExit(1)


def _details(error: Exception, argv: list[str]) -> str:
    """The file that holds the traceback, what was run, and the versions; `nowhere` if none can be
    written."""
    versions = "\n".join(
        f"{name} {metadata.version(name)}"
        for name in ("draftsmith", "torch", "transformers", "accelerate")
        if _installed(name)
    )
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="draftsmith-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(
                f"{sys.argv[0]} {argv!r}\npython {platform.python_version()}, "
                f"{platform.platform()}\n{versions}\n\n{text}"
            )
        return file.name
    except OSError:
        return "nowhere (no temporary file can be written)"


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _open_closed_streams() -> None:
    """Streams that the caller has closed (`>&-`) read as empty and swallow what is written: without
    them, isatty() is no method and the first file that is opened takes the place of standard
    output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            mode = "r" if name == "stdin" else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


_ORDINARY = sys.unraisablehook


def _interrupt(number: int, frame: object) -> None:
    """An import that is interrupted may hide that behind an error of its own: `guarded` asks
    here."""
    _INTERRUPTED.append(number)
    raise KeyboardInterrupt


def _unraisable(found: Any) -> None:
    """An interrupt within a destructor or a callback of the interpreter is lost there: it comes
    again a moment later."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        _ORDINARY(found)


def guarded(work: Callable[[], None], if_interrupted: str) -> None:
    """Run the work of a command, once its options are known; an interrupt ends in the line
    `if_interrupted` and status 130."""
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(
        level=logging.INFO if is_main_rank() else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "datasets", "filelock", "fsspec", "accelerate"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # of every save: that tied weights are stored once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        try:
            work()
        except UserError:
            if _INTERRUPTED:
                raise KeyboardInterrupt from None
            raise
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        reason = str(error).strip().splitlines()[0]
        print(
            f"error: rank {os.environ['RANK']} lost another one ({reason}); {if_interrupted}",
            file=sys.stderr,
        )
        leave(1)
    except Stopped as stopped:
        leave(stopped.status)
        raise SystemExit(stopped.status) from None
    except KeyboardInterrupt:
        if is_main_rank():
            print(f"interrupted; {if_interrupted}", file=sys.stderr)
        leave(130)
        raise SystemExit(130) from None


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because a rank has died: gloo and NCCL each say it in their own
    words."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and any(
        word in str(error).lower() for word in LOST_PEER
    )


def follow_launcher() -> None:
    """End as SIGTERM asks to when `accelerate launch` (or torchrun, or deepspeed), which started
    this process, is gone.

    With one process the launcher does not pass signals on: killed, it would leave the training to
    run on unseen.
    """
    launcher = psutil.Process().parent()
    try:
        words = " ".join(launcher.cmdline()) if launcher is not None else ""
    except psutil.Error:
        return
    if any(name in words for name in ("accelerate", "torchrun", "torch.distributed", "deepspeed")):
        threading.Thread(
            target=_watch, args=(os.getppid(),), daemon=True, name="follow-launcher"
        ).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)


class Stopped(Exception):
    """A run was asked to end and has saved where it stands."""

    def __init__(self, status: int) -> None:
        self.status = status


class Stop:
    """Whether somebody has asked this process to end: SIGTERM, SIGINT (Ctrl-C), or SIGUSR1, which
    schedulers send before they kill. Training then saves a checkpoint. A second SIGINT, some
    seconds later, ends it at once."""

    AGAIN_S = 3.0  # a launcher passes on the SIGINT that a terminal has sent to everybody already

    def __init__(self) -> None:
        self.status = 0
        """Exit status of a run that was asked to stop; 0 while nobody has asked."""
        self._since = 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._ask)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked; of several ranks one may have been alone with it."""
        return self.status != 0

    def _ask(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.asked and time.monotonic() - self._since > self.AGAIN_S:
            raise KeyboardInterrupt
        if not self.asked:
            self.status, self._since = (
                128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM),
                time.monotonic(),
            )
