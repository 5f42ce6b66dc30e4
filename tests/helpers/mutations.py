"""Every way to damage the files of a folder, one at a time, and what a command makes of it."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.commands.cli import main
from tests.conftest import PYTHON

SECONDS = 20
# of each folder under `--all`; 100000 tries every one, in some hours
MANY = int(os.environ.get("MUTATIONS", "150"))
KEYS, ITEMS = 40, 2  # of each table and each list in a document
GROWTH = 2 << 30  # bytes of memory that a damaged file may cost more than a sound one
TOTALS: Counter[str] = Counter()
"""What `complaints` found in this process, by outcome; what was neither accepted nor wrong was
refused in one line."""
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**9, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x",
    "../../x", [], [[]], {}, {"x": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One damage to a file."""

    name: str
    apply: Callable[[Path], None]
    """Takes the folder."""


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def mutations(folder: Path) -> Iterator[Mutation]:
    """All of them: of bytes for every file, of values for every JSON file."""
    for file in files_of(folder):
        yield from of_bytes(file, (folder / file).stat().st_size)
        if file.suffix == ".json":
            yield from of_values(file, json.loads((folder / file).read_text()))


def of_bytes(file: Path, size: int) -> Iterator[Mutation]:
    """Missing, empty, a folder, truncated at five places, a bit flipped at three."""

    def replace_by_folder(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    yield Mutation(f"{file}: missing", lambda folder: (folder / file).unlink())
    yield Mutation(f"{file}: empty", lambda folder: _write(folder / file, b""))
    yield Mutation(f"{file}: a folder", replace_by_folder)
    for at in sorted({1, 7, size // 3, size // 2, size - 1} - {0}):
        yield Mutation(
            f"{file}: cut at {at}",
            lambda folder, at=at: _write(folder / file, (folder / file).read_bytes()[:at]),
        )
    for at in sorted({0, size // 2, size - 2} & set(range(size))):
        yield Mutation(
            f"{file}: a bit of byte {at}", lambda folder, at=at: _flip(folder / file, at)
        )


def of_values(file: Path, document: Any) -> Iterator[Mutation]:
    """Every value of a document replaced by wrong ones, removed, and an unknown key added."""
    for place in places(document):
        for value in WRONG:
            if value == value_at(document, place):  # 1 for 1, or 0 for False, is no damage
                continue
            name = f"{file}: {'.'.join(map(str, place)) or 'all'} = {str(value)[:20]!r}"
            yield Mutation(
                name, lambda folder, place=place, value=value: _set(folder / file, place, value)
            )
        if place:
            yield Mutation(
                f"{file}: no {'.'.join(map(str, place))}",
                lambda folder, place=place: _remove(folder / file, place),
            )
    yield Mutation(
        f"{file}: unknown key", lambda folder: _set(folder / file, ("never_heard_of",), 1)
    )


def value_at(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        document = document[key]
    return document


def places(document: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value; of long lists and tables (a vocabulary) the first few."""
    yield ()
    items: Any = ()
    if isinstance(document, dict):
        items = islice(document.items(), KEYS)
    elif isinstance(document, list):
        items = enumerate(document[:ITEMS])
    for key, value in items:
        yield from ((key, *rest) for rest in places(value))


def _set(path: Path, place: tuple[Any, ...], value: Any) -> None:
    document = json.loads(path.read_text())
    if not place:
        document = value
    else:
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = copy.deepcopy(value)
    path.write_text(json.dumps(document))


def _remove(path: Path, place: tuple[Any, ...]) -> None:
    document = json.loads(path.read_text())
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    del holder[place[-1]]
    path.write_text(json.dumps(document))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    errors: str
    seconds: float
    growth: int

    def wrong(self) -> str | None:
        """What a user would complain about, or None: accepted, or refused in one line."""
        lines = [
            line
            for line in self.errors.splitlines()
            if line.startswith(("error:", "internal error:"))
        ]
        if "Traceback" in self.errors or "internal error" in self.errors:
            return f"it ends in {self.errors[-600:]}"
        if self.code not in (0, 2):
            return f"exit code {self.code}: {self.errors[-300:]}"
        if self.code == 2 and len(lines) != 1:
            return f"{len(lines)} lines of error: {self.errors[-300:]}"
        if self.seconds > SECONDS or self.growth > GROWTH:
            return f"it took {self.seconds:.0f} s and {self.growth / 2**30:.1f} GiB"
        return None


def outcome(arguments: list[str]) -> Outcome:
    """Run a command of ours in this process, as the console script does."""
    out, errors = io.StringIO(), io.StringIO()
    before, began, code = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), 0
    with redirect_stdout(out), redirect_stderr(errors), _deadline():
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    gc.collect()
    return Outcome(code, errors.getvalue(), time.monotonic() - began, growth)


def forked(arguments: list[str], usage: Path) -> Outcome:
    """Run `python -m ARGUMENTS` in a process of its own, such as a training. `usage`: a scratch
    file."""
    began = time.monotonic()
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "DRAFTSMITH_WARM_USAGE": str(usage)}
    try:
        done = subprocess.run(
            [PYTHON, "-m", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=3 * SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, "still running", time.monotonic() - began, 0)
    return Outcome(done.returncode, done.stderr, time.monotonic() - began, int(usage.read_text()))


@contextmanager
def _deadline() -> Iterator[None]:
    """A command that hangs ends as an internal error."""

    def too_late(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {3 * SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_late), signal.getsignal(signal.SIGINT)
    signal.alarm(3 * SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGINT, before[1])


def trials(folder: Path, seed: int, count: int) -> list[Mutation]:
    """A seeded sample of the mutations of a folder; all of them where there are no more."""
    found = list(mutations(folder))
    return found if count >= len(found) else random.Random(seed).sample(found, count)


def complaints(
    sound: Path,
    scratch: Path,
    chosen: list[Mutation],
    command: Callable[[Path], list[str]],
    after: Callable[[Path], None] = lambda folder: None,
    run: Callable[[list[str]], Outcome] = outcome,
    accepted_is: Callable[[Path], str | None] = lambda folder: None,
) -> tuple[list[str], list[str]]:
    """What is wrong with how `command(folder)` takes each mutation of `sound`, and which mutations
    were accepted. `after` is done to each folder when it is damaged; `accepted_is` says what is
    wrong with what an accepted one became."""
    wrong, accepted = [], []
    for mutation in chosen:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(sound, scratch, symlinks=True)
        mutation.apply(scratch)
        after(scratch)
        found = run(command(scratch))
        reason = found.wrong() or (accepted_is(scratch) if found.code == 0 else None)
        if reason is not None:
            wrong.append(f"{mutation.name}: {reason}")
        elif found.code == 0:
            accepted.append(mutation.name)
    TOTALS.update(tried=len(chosen), accepted=len(accepted), wrong=len(wrong))
    return wrong, accepted


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One to eight bytes or stretches changed, left out or put in; sometimes cut short too."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(max(len(changed), 1))
        length = draw.randrange(1, 20)
        kind = draw.randrange(4)
        if kind == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = draw.randbytes(length)
        else:
            changed[at : at + 8] = b"\xff" * 8
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.1 else changed)
