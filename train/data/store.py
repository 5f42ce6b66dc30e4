"""Feature store: the target's features on disk, read without the target in memory.

A shard holds the features of n = `rows_per_shard` packed rows end to end, without padding. Shard i
of a whole store has the packs i * n .. i * n + n - 1 of the data. A ring has the rows of the
training stream in its order, and only the shards from the one that the trainer reads to some ahead
of it: the extractor waits for the trainer, and the trainer for the extractor.

    shards/shard-000017.safetensors   last, tapN [S, Ht]: states of all rows; last_starts,
                                      tap_starts [rows + 1]: where each row begins in them; with
                                      fp8 also last_scale, tapN_scale [S]
    shards/shard-000017.json          its checksum, written last: a shard counts once this is there
    wanted.json                       ring: the first row that the trainer still needs

Shapes: S positions of a shard (of `last` fewer, unless the layout says `all_last`), Ht hidden size
of the target, B packed rows of a batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...heads.documents import read_document
from ...heads.errors import UserError
from ...heads.files import checksum, differs, whole_file, write_json
from ...inference.rounds.device import send
from ...inference.targets.stored import StoreLayout, manifest_of
from ...inference.targets.target import TargetSource
from .batches import PADDING, Batch, Batches
from .config import StoreType
from .documents import ShardNote, Wanted
from .features import Features

log = logging.getLogger(__name__)

FP8_LARGEST = 448.0  # largest finite value of float8_e4m3fn
WANTED = "wanted.json"
AGAIN = "run the same draftsmith data extract again"
PATIENCE_S = 30.0  # seconds of waiting for the extractor between two warnings


def shard_path(store: Path, index: int) -> Path:
    return store / "shards" / f"shard-{index:06d}.safetensors"


def shard_done(path: Path) -> bool:
    """Return whether a shard is complete: the file with its checksum is written last."""
    return path.with_suffix(".json").is_file()


def verify_shard(path: Path) -> None:
    """Raise `UserError` unless a shard is what was written, by its size and checksum."""
    note, _ = read_document(path.with_suffix(".json"), ShardNote, f"delete it and {AGAIN}")
    reason = differs(path.parent, path.name, f"{path.stem}.json", note.bytes, note.sha256)
    if reason is not None:
        raise UserError(
            f"{path.parent}: {reason}; delete {path.stem}.* and {AGAIN}, which fills it in"
        )


class ShardWriter:
    """Writer of one shard, which collects its rows and writes them at once."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        names = ["last", *(f"tap{tap}" for tap in layout.taps)]
        self._rows: dict[str, list[Tensor]] = {name: [] for name in names}
        self._lengths: dict[str, list[int]] = {"last": [], "tap": []}

    def add(self, features: Features) -> None:
        """Append every row of a batch."""
        batch = features.batch
        # Masks are on the CPU: what follows from them is known without waiting for a device.
        real = batch.documents != PADDING
        # Elsewhere no drafter learns the target's distribution of the next token.
        has_last = real if self._layout.all_last else batch.reply_run(1, 1)
        for r, length in enumerate(real.sum(-1).tolist()):
            last = features.last[r][has_last[r].to(features.last.device)]
            self._rows["last"].append(last.cpu())
            # Padding is at the end of a row, so a slice leaves it out.
            for tap, states in zip(self._layout.taps, features.taps, strict=True):
                self._rows[f"tap{tap}"].append(states[r, :length].cpu())
            self._lengths["last"].append(len(last))
            self._lengths["tap"].append(length)

    def write(self, path: Path) -> None:
        """Write the shard to `path`, then the file with its checksum by which it is complete."""
        tensors: dict[str, Tensor] = {}
        for name, rows in self._rows.items():
            tensors |= encoded(name, torch.cat(rows), self._layout.dtype)
        for name, lengths in self._lengths.items():
            # Rows of 3, 2 and 4 positions begin at 0, 3 and 5, and 9 is the end of the last.
            tensors[f"{name}_starts"] = torch.tensor([0, *lengths]).cumsum(0)
        with whole_file(path) as aside:
            save_file(tensors, aside)
            note = {
                "sha256": checksum(aside),
                "bytes": aside.stat().st_size,
                "positions": sum(self._lengths["tap"]),
            }
        with whole_file(path.with_suffix(".json")) as aside:
            write_json(aside, note)


def encoded(name: str, states: Tensor, dtype: StoreType) -> dict[str, Tensor]:
    """Return the tensors that `states` `[S, Ht]` are stored as, by name.

    With fp8 each position has a scale `[S]`, by which its largest element becomes 448.
    """
    if dtype != "fp8":
        return {name: states.to(getattr(torch, dtype)).contiguous()}
    # float8_e4m3fn reaches from 2^-9 to 448 only: with one scale for all positions, those of small
    # states would be near 0, where few digits are left. The least scale is for positions of zeros.
    scale = states.float().abs().amax(-1).clamp(min=1e-12) / FP8_LARGEST
    return {
        name: (states.float() / scale[:, None]).to(torch.float8_e4m3fn).contiguous(),
        f"{name}_scale": scale,
    }


class Shard:
    """A shard on disk, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises `UserError` for a file that is not a shard."""
        try:
            self._file: Any = safe_open(path, framework="pt")
            names = self._file.keys()
            self._scaled = "last_scale" in names
            self._starts = {
                name: self._file.get_tensor(f"{name}_starts").tolist() for name in ("last", "tap")
            }
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} is not a shard of features ({error}); delete it and {AGAIN}"
            ) from error

    def row(self, name: str, place: int) -> Tensor:
        """Return row `place` of tensor `name`, `[S, Ht]` for the S positions of this row."""
        starts = self._starts["last" if name == "last" else "tap"]
        span = slice(starts[place], starts[place + 1])
        # Of the mapped file only this span is read.
        states = self._file.get_slice(name)[span]
        if not self._scaled:
            return states
        return states.float() * self._file.get_slice(f"{name}_scale")[span][:, None]


class StoredFeatures:
    """Source of features that reads a store, whole or a ring."""

    OPEN = 64  # shards that are mapped at a time

    def __init__(
        self,
        store: str | Path,
        batches: Batches,
        target: TargetSource,
        taps: tuple[int, ...],
        all_last: bool,
        main: bool,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the store for a run that reads `taps`, and the last state everywhere if `all_last`.

        `main`: this rank notes for a ring's extractor how far training has come. `asked` returns
        true once the run was asked to stop. Raises `UserError` if the store lacks what the run
        reads, or is a ring too small for one step.
        """
        self._store, self._layout = Path(store), manifest_of(store).layout
        if missing := sorted(set(taps) - set(self._layout.taps)):
            raise UserError(
                f"{store} has taps {self._layout.taps}, not {missing}; extract again with "
                "this run's config"
            )
        if all_last and not self._layout.all_last:
            raise UserError(
                f"{store} has last states for replies only, EAGLE-1 reads them everywhere; "
                "extract again for it"
            )
        self._batches, self._target, self._taps, self._main = batches, target, taps, main
        self._asked = asked
        self._shards: dict[int, Shard] = {}  # the least recently used first
        self._verified: set[int] = set()
        self._announced = -1
        """Shard from which on the extractor knows that shards are needed."""
        # A step may begin at the last row of a shard, and all its rows have to exist at once: with
        # 7 rows a step and 4 rows a shard, the step of the rows 7 .. 13 reads shards 1 .. 3.
        layout = self._layout
        needed = batches.rows_per_step + layout.rows_per_shard - 1
        if layout.ring is not None and (held := layout.ring * layout.rows_per_shard) < needed:
            raise UserError(
                f"a step of {batches.rows_per_step} rows may need {needed} rows of {store} at a "
                f"time, its ring holds {held}; extract with a larger --ring or --rows-per-shard"
            )

    def features(self, batch: Batch) -> Features:
        """Return a batch with its stored features, waiting for the extractor of a ring.

        Raises `UserError` for a shard that is missing or damaged, or holds other rows.
        """
        device, dtype = self._target.device, self._target.dtype
        shape = (*batch.ids.shape, self._target.hidden_size)
        names = ["last", *(f"tap{tap}" for tap in self._taps)]
        # Positions without a stored state stay 0: no loss is about them.
        states = {name: torch.zeros(shape, dtype=dtype) for name in names}
        has_last = batch.documents != PADDING if self._layout.all_last else batch.reply_run(1, 1)
        if self._layout.ring is not None:
            self._release(min(batch.numbers))
        for r, number in enumerate(batch.numbers):
            # A ring is numbered by rows of the stream, a whole store by packs of the data.
            unit = number if self._layout.ring is not None else self._batches.pack_of(number)
            index, row_in_shard = divmod(unit, self._layout.rows_per_shard)
            shard = self._shard(index)
            for name in names:
                row = shard.row(name, row_in_shard).to(dtype)
                there = has_last[r] if name == "last" else batch.documents[r] != PADDING
                if len(row) != there.sum():
                    raise UserError(
                        f"{shard_path(self._store, index)} holds {len(row)} states of a row of "
                        f"which {int(there.sum())} are needed: manifest and shards are not of one "
                        f"store; {AGAIN}"
                    )
                states[name][r, there] = row
        last, *taps = (send(states[name], device) for name in names)
        return Features(batch, last, tuple(taps))

    def _shard(self, index: int) -> Shard:
        """Return shard `index`, verified and open. Raises `UserError`."""
        if index not in self._shards:
            path = shard_path(self._store, index)
            if self._layout.ring is not None:
                self._await(path)
            elif not shard_done(path):
                raise UserError(
                    f"{path} is missing from the feature store; {AGAIN}, which fills it in"
                )
            # A shard of a whole store is verified once. One of a ring may have been deleted and
            # written again since it was.
            if self._layout.ring is not None or index not in self._verified:
                verify_shard(path)
                self._verified.add(index)
            if len(self._shards) >= self.OPEN:
                # A dictionary keeps the order of insertion: the first key was used least recently.
                self._shards.pop(next(iter(self._shards)))
            self._shards[index] = Shard(path)
        # Move it to the end, which is closed last.
        self._shards[index] = self._shards.pop(index)
        return self._shards[index]

    def _await(self, path: Path) -> None:
        """Wait until a ring's shard is complete, with a warning now and then.

        Raises `UserError` if the run is asked to stop meanwhile: the extractor may never come.
        """
        since = time.monotonic()
        while not shard_done(path):
            time.sleep(0.01)
            if self._asked():
                raise UserError(
                    "asked to stop while waiting for the extractor; the same command continues "
                    "from the last checkpoint"
                )
            if time.monotonic() - since > PATIENCE_S:
                log.warning(
                    "waiting for %s; is draftsmith data extract running for this store?", path
                )
                since = time.monotonic()

    def _release(self, number: int) -> None:
        """Note that the rows before the step of row `number` are no longer needed.

        Every rank is done with them, since a step ends with a sum over ranks. Rows of the same step
        may still be read by another rank.
        """
        first = number // self._batches.rows_per_step * self._batches.rows_per_step
        index = first // self._layout.rows_per_shard
        if index != self._announced:
            # While a file is mapped its disk space is not freed.
            self._shards = {i: shard for i, shard in self._shards.items() if i >= index}
            if self._main:
                announce(self._store, first)
            self._announced = index

    def finish(self) -> None:
        """End a ring's extractor."""
        if self._layout.ring is not None and self._main:
            announce(self._store, 0, done=True)


def announce(store: Path, first: int, done: bool = False) -> None:
    """Write to `wanted.json` which row is the first that is still needed, or that none is."""
    with whole_file(store / WANTED) as aside:
        write_json(aside, {"first": first, "done": done})


def wanted(store: Path) -> tuple[int, bool]:
    """Return the first row that is still needed and whether training is done, from `wanted.json`.

    Without a file training is at its beginning. Raises `UserError` for a broken one.
    """
    if not (store / WANTED).is_file():
        return 0, False
    facts = read_document(store / WANTED, Wanted, "delete it; its trainer writes it again")[0]
    return facts.first, facts.done


def missing_shards(store: Path, shards: int) -> list[int]:
    """Return the numbers of the shards that a whole store of `shards` shards lacks."""
    return [index for index in range(shards) if not shard_done(shard_path(store, index))]


def shards_of_ring(store: Path, layout: StoreLayout, rank: int, ranks: int) -> Iterator[int]:
    """Yield the numbers of the shards of a ring that worker `rank` of `ranks` writes, in order.

    The next missing one comes as soon as the trainer no longer needs an older one, until the
    trainer is done. The first worker also deletes what the trainer no longer needs.
    """
    assert layout.ring is not None, "a whole store has no ring"
    while True:
        first, done = wanted(store)
        if done:
            return
        lowest = first // layout.rows_per_shard
        if rank == 0:
            for note in (store / "shards").glob("shard-*.json"):
                index = int(note.stem.removeprefix("shard-"))
                # Shards ahead of the ring are from before the trainer was set back by a resume.
                if not lowest <= index < lowest + layout.ring:
                    note.unlink(missing_ok=True)  # first, since the shard counts by it
                    note.with_suffix(".safetensors").unlink(missing_ok=True)
        for index in range(lowest, lowest + layout.ring):
            # Each number belongs to one worker, so that no two write the same shard.
            if index % ranks == rank and not shard_done(shard_path(store, index)):
                yield index
                break
        else:
            time.sleep(0.02)
