"""Forks of one process that has imported what every command imports; see `python` beside this file.

    server.py SOCKET PARENT         # it ends when process PARENT has ended

Nothing is computed here and no thread is started before the fork: a fork is as good as a fresh
process for all but what a test of imports, of memory, of closed streams or of process trees looks
at. Such tests start `sys.executable`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "accelerate.commands.launch", "torch.distributed.run", "datasets",
    "transformers.models.llama.modeling_llama",
    "draftsmith.commands.cli", "draftsmith.train.loop", "draftsmith.train.extraction",
    "draftsmith.heads.exchange.exporter", "draftsmith.inference.evaluation.evaluate",
    "draftsmith.inference.evaluation.report.command",
)  # fmt: skip
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")
CLIENT = Path(__file__).with_name("python")


def main() -> None:
    path, parent = sys.argv[1], int(sys.argv[2])
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork that touches no object of the parent copies no page of it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # a client that sees it can connect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects the supervisors
    while Path(f"/proc/{parent}").exists():
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ended(supervised(connection))
        connection.close()


def supervised(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: the job, in the child; the parent passes signals to it, reports its status
    and ends."""
    _, streams, _, _ = socket.recv_fds(connection, 3, 3)
    size = int.from_bytes(received(connection, 4), "big")
    job = json.loads(received(connection, size))
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return job
    gone = os.pidfd_open(child)
    while gone not in (ready := select.select([gone, connection], [], [])[0]):
        assert connection in ready
        # an end of file: the client was killed
        for number in connection.recv(64) or [signal.SIGKILL]:
            os.kill(child, number)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if (wanted := job["environment"].get("DRAFTSMITH_WARM_USAGE")) is not None:
        Path(wanted).write_text(str(usage.ru_maxrss * 1024))
    try:
        connection.sendall(code.to_bytes(4, "big", signed=True))
    finally:
        os._exit(0)


def received(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def ended(job: dict[str, Any]) -> NoReturn:
    """Run a job and end with its status as the interpreter does, but without taking every module
    apart (0.3 s)."""
    code = 0
    try:
        run(job)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  this process ends here, whatever happened
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code)


def run(job: dict[str, Any]) -> None:
    """What `python ARGUMENTS` does, in the folder and the environment of the client."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    # the shell's background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    buffered = not os.environ.get("PYTHONUNBUFFERED")
    output: Any = sys.stdout
    output.reconfigure(line_buffering=output.isatty() or not buffered, write_through=not buffered)
    arguments = (
        [word for word in job["arguments"] if word != "-u"]
        if job["arguments"][:1] == ["-u"]
        else job["arguments"]
    )
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        if rest[0] in LAUNCHERS:  # what it starts is forked too
            sys.executable = str(CLIENT)
        sys.path.insert(0, job["folder"])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
