"""Feature store: the target's features on disk, for training without the target in memory.

A shard holds the features of n = `rows_per_shard` packed rows end to end, without padding. Shard i
of a whole store has the packs i * n .. i * n + n - 1 of the data. A ring has the rows of the
training stream in order, and only the shard that the trainer reads and some after it: the extractor
waits for the trainer, and the trainer for the extractor.

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
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...heads.documents import Count, Document, read_document
from ...heads.errors import UserError
from ...heads.files import checksum, differs, whole_file, write_json
from ...inference.rounds.device import send
from ...inference.targets.stored import StoreLayout, manifest_of
from ...inference.targets.target import TargetSource
from .batches import PADDING, Batch, Batches
from .config import StoreType
from .features import Features

log = logging.getLogger(__name__)

FP8_LARGEST = 448.0  # largest finite value of float8_e4m3fn
WANTED = "wanted.json"
AGAIN = "run the same draftsmith data extract again"
WARNING_S = 30.0  # seconds of waiting for the extractor between two warnings


class ShardNote(Document):
    """`shard-N.json` of a feature store, written when the shard is complete."""

    what: ClassVar[str] = "the note of a shard"

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Count
    positions: Count = 0


class RingState(Document):
    """`wanted.json` of a ring: the message of a trainer to its extractor."""

    what: ClassVar[str] = "a trainer's message to its extractor"

    first: Count
    """First packed row that the trainer still needs."""
    done: bool
    """True when the training is over and needs no more rows."""


def shard_path(store: Path, index: int) -> Path:
    return store / "shards" / f"shard-{index:06d}.safetensors"


def shard_done(path: Path) -> bool:
    """Return whether a shard is complete: its checksum is written last."""
    return path.with_suffix(".json").is_file()


def verify_shard(path: Path) -> None:
    """Raise `UserError` unless size and checksum of a shard are as written."""
    note, _ = read_document(path.with_suffix(".json"), ShardNote, f"delete it and {AGAIN}")
    reason = differs(path.parent, path.name, f"{path.stem}.json", note.bytes, note.sha256)
    if reason is not None:
        raise UserError(
            f"{path.parent}: {reason}; delete {path.stem}.* and {AGAIN}, which fills it in"
        )


def last_states(batch: Batch, layout: StoreLayout) -> Tensor:
    """Return the positions `[B, S]` whose last states a store holds, bool."""
    # Only there a drafter learns the target's distribution of the next token, except EAGLE-1.
    return batch.documents != PADDING if layout.all_last else batch.reply_run(1, 1)


class ShardWriter:
    """Writer of one shard, which collects the rows and writes them together."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        names = ["last", *(f"tap{tap}" for tap in layout.taps)]
        self._rows: dict[str, list[Tensor]] = {name: [] for name in names}
        self._lengths: dict[str, list[int]] = {"last": [], "tap": []}

    def add(self, features: Features) -> None:
        """Append every row of a batch."""
        batch = features.batch
        real = batch.documents != PADDING
        has_last = last_states(batch, self._layout)
        for r, length in enumerate(real.sum(-1).tolist()):
            last = features.last[r][has_last[r].to(features.last.device)]
            self._rows["last"].append(last.cpu())
            # Padding is at the end of a row, so a slice leaves it out.
            for tap, states in zip(self._layout.taps, features.taps, strict=True):
                self._rows[f"tap{tap}"].append(states[r, :length].cpu())
            self._lengths["last"].append(len(last))
            self._lengths["tap"].append(length)

    def write(self, path: Path) -> None:
        """Write the shard to `path`, then its checksum, which makes it complete."""
        tensors: dict[str, Tensor] = {}
        for name, rows in self._rows.items():
            tensors |= encoded(name, torch.cat(rows), self._layout.dtype)
        for name, lengths in self._lengths.items():
            # Rows of 3, 2 and 4 positions begin at 0, 3 and 5, and the last one ends at 9.
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
    """Return the stored tensors of `states` `[S, Ht]`, by name.

    With fp8 each position has a scale `[S]`, by which its largest element becomes 448.
    """
    if dtype != "fp8":
        return {name: states.to(getattr(torch, dtype)).contiguous()}
    # float8_e4m3fn reaches from 2^-9 to 448 only: with one scale for all positions, small states
    # would be near 0 and lose digits. The lower bound is for positions of zeros.
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
        # Only this span of the mapped file is read.
        states = self._file.get_slice(name)[span]
        if not self._scaled:
            return states
        return states.float() * self._file.get_slice(f"{name}_scale")[span][:, None]


class StoredFeatures:
    """Source of features from a store, whole or a ring."""

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

        `main`: this rank writes the state of a ring for its extractor. `asked` returns true once
        the run was asked to stop. Raises `UserError` if the store lacks what the run reads, or is a
        ring too small for one step.
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
        self._shards: dict[int, Shard] = {}  # the least recently used one first
        self._verified: set[int] = set()
        self._announced = -1
        """First shard that is still needed, as the extractor knows it."""
        # A step may begin at the last row of a shard, and needs all its rows at once: with 7 rows a
        # step and 4 rows a shard, the step of the rows 7 .. 13 reads shards 1 .. 3.
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
        # Positions without a stored state stay 0: no loss reads them.
        states = {name: torch.zeros(shape, dtype=dtype) for name in names}
        has_last = last_states(batch, self._layout)
        if self._layout.ring is not None:
            self._release(min(batch.numbers))
        for r, number in enumerate(batch.numbers):
            # A ring is numbered by rows of the stream, a whole store by packs of the data.
            unit = number if self._layout.ring is not None else self._batches.pack_of(number)
            index, row_in_shard = divmod(unit, self._layout.rows_per_shard)
            shard = self._shard(index)
            for name in names:
                row = shard.row(name, row_in_shard).to(dtype)
                stored = has_last[r] if name == "last" else batch.documents[r] != PADDING
                if len(row) != stored.sum():
                    raise UserError(
                        f"{shard_path(self._store, index)} holds {len(row)} states of a row of "
                        f"which {int(stored.sum())} are needed: manifest and shards are not of one "
                        f"store; {AGAIN}"
                    )
                states[name][r, stored] = row
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
            # A shard of a whole store is verified once; one of a ring may have been replaced.
            if self._layout.ring is not None or index not in self._verified:
                verify_shard(path)
                self._verified.add(index)
            if len(self._shards) >= self.OPEN:
                self._shards.pop(next(iter(self._shards)))
            self._shards[index] = Shard(path)
        # Move it to the end of the dictionary, where the most recently used one is.
        self._shards[index] = self._shards.pop(index)
        return self._shards[index]

    def _await(self, path: Path) -> None:
        """Wait until a ring's shard is complete, with a warning from time to time.

        Raises `UserError` if the run is asked to stop, since the extractor may not be running.
        """
        since = time.monotonic()
        while not shard_done(path):
            time.sleep(0.01)
            if self._asked():
                raise UserError(
                    "asked to stop while waiting for the extractor; the same command continues "
                    "from the last checkpoint"
                )
            if time.monotonic() - since > WARNING_S:
                log.warning(
                    "waiting for %s; is draftsmith data extract running for this store?", path
                )
                since = time.monotonic()

    def _release(self, number: int) -> None:
        """Release the shards before the step of row `number`, which no rank reads any more.

        A step ends with a sum over ranks; other ranks may still read rows of the same step.
        """
        first = number // self._batches.rows_per_step * self._batches.rows_per_step
        index = first // self._layout.rows_per_shard
        if index != self._announced:
            # The disk space of a mapped file is not freed.
            self._shards = {i: shard for i, shard in self._shards.items() if i >= index}
            if self._main:
                write_ring_state(self._store, first)
            self._announced = index

    def finish(self) -> None:
        """End a ring's extractor."""
        if self._layout.ring is not None and self._main:
            write_ring_state(self._store, 0, done=True)


def write_ring_state(store: Path, first: int, done: bool = False) -> None:
    """Write `wanted.json` with the first row that is still needed, or that training is done."""
    with whole_file(store / WANTED) as aside:
        write_json(aside, {"first": first, "done": done})


def ring_state(store: Path) -> RingState:
    """Return the contents of `wanted.json`, or the beginning of a training without that file.

    Raises `UserError` for a damaged file.
    """
    if not (store / WANTED).is_file():
        return RingState(0, False)
    return read_document(store / WANTED, RingState, "delete it; its trainer writes it again")[0]


def missing_shards(store: Path, shards: int) -> list[int]:
    """Return the missing ones of the `shards` shards of a whole store."""
    return [index for index in range(shards) if not shard_done(shard_path(store, index))]


def shards_of_ring(store: Path, layout: StoreLayout, rank: int, ranks: int) -> Iterator[int]:
    """Yield the numbers of a ring's shards that worker `rank` of `ranks` has to write, in order.

    Waits until the trainer no longer needs an older shard, and returns when the trainer is done.
    The first worker also deletes the shards that the trainer no longer needs.
    """
    assert layout.ring is not None, "a whole store has no ring"
    while True:
        state = ring_state(store)
        if state.done:
            return
        lowest = state.first // layout.rows_per_shard
        if rank == 0:
            for note in (store / "shards").glob("shard-*.json"):
                index = int(note.stem.removeprefix("shard-"))
                # Shards ahead of the ring are from before a resume at an earlier step.
                if not lowest <= index < lowest + layout.ring:
                    note.unlink(missing_ok=True)  # first, since it marks the shard as complete
                    note.with_suffix(".safetensors").unlink(missing_ok=True)
        for index in range(lowest, lowest + layout.ring):
            if index % ranks == rank and not shard_done(shard_path(store, index)):
                yield index
                break
        else:
            time.sleep(0.02)
