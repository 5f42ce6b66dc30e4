"""A server of the quickstart target, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.conftest import QUICKSTART

EAGLE3 = QUICKSTART.parent / "drafters" / "eagle3"
# oneDNN keeps up to 1024 kernels, one for each shape, and malloc an arena for each thread, which
# take hundreds of megabytes before they are full. With few of both a test sees what requests leave.
QUICKLY_FULL = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}
CLI = "from draftsmith.commands.cli import main; main()"


@dataclass
class Running:
    """Address and process of a server."""

    address: str
    process: psutil.Process


def started(*options: str, said: list[str] | None = None) -> tuple[subprocess.Popen[str], str]:
    """A server's process and its address, read from what it prints, which goes into `said`."""
    command = [sys.executable, "-c", CLI, "serve", "--target", str(QUICKSTART), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--target.device", "cpu", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **QUICKLY_FULL},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if said is not None:
            said.append(line)
        if found := re.search(r"page: (http://\S+)", line):
            # Read on, so that the server never waits for a reader of its log.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    raise AssertionError("the server has not said where it is")


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    process, address = started("--drafter", str(EAGLE3), "--drafter", "ngram")
    yield Running(address, psutil.Process(process.pid))
    process.terminate()
    process.wait(timeout=60)
