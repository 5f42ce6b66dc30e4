"""Features on disk: shards of packed rows, read without the target in memory.

A shard holds the features of `rows_per_shard` packed rows end to end, without padding. In a whole
store shard s has the packs s * n .. of the data, each once; training shuffles over all of them. A
ring has the rows of the training stream in its order, and only those between the trainer and some
shards ahead of it: the extractor waits for the trainer, and the other way round.

    shards/shard-000017.safetensors   starts [rows + 1]; last [T, H]; tapN [T, H]; with fp8 a scale
                                      for each position
    shards/shard-000017.json          its checksum: a shard counts once this is there
    wanted.json                       ring: the first row that the trainer still needs

Shapes: T positions of a shard, H hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...heads.documents import read_document
from ...heads.errors import UserError
from ...heads.files import checksum, differs, whole_file, write_json
from ...inference.documents import Manifest
from ...inference.stored import manifest_of
from ...inference.target import Target
from ..documents import ShardNote, Wanted
from ..features import Features
from ..options import StoreType
from .batches import PADDING, Batch, Batches

log = logging.getLogger(__name__)

FP8_LARGEST = 448.0  # of float8_e4m3fn
WANTED = "wanted.json"
AGAIN = "run the same draftsmith data extract again"
PATIENCE_S = 30.0  # before somebody who waits says so


@dataclass(frozen=True)
class Layout:
    """How features lie in the shards of a store."""

    taps: tuple[int, ...]
    all_last: bool
    """Whether the last state is there at every position, or only where a reply token comes next."""
    dtype: StoreType
    rows_per_shard: int
    ring: int | None = None
    """Shards that may be there at a time; None: all of them."""


def shard_path(store: Path, index: int) -> Path:
    return store / "shards" / f"shard-{index:06d}.safetensors"


def shard_done(path: Path) -> bool:
    """Whether a shard is whole: the note of its checksum is written last."""
    return path.with_suffix(".json").is_file()


def remove_shard(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def taught(batch: Batch) -> Tensor:
    """`[B, S]` bool: positions whose next token is a reply token of the same document. No other's
    distribution is ever learned."""
    return batch.reply_run(1, 1)


def verify_shard(path: Path) -> None:
    """Demand that a shard is what was written. Raises `UserError`."""
    note, _ = read_document(path.with_suffix(".json"), ShardNote, f"delete it and {AGAIN}")
    if (
        reason := differs(path.parent, path.name, f"{path.stem}.json", note.bytes, note.sha256)
    ) is not None:
        raise UserError(
            f"{path.parent}: {reason}; delete {path.stem}.* and {AGAIN}, which fills it in"
        )


class ShardWriter:
    """Collects rows for one shard and writes it whole."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: dict[str, list[Tensor]] = {
            "last": [],
            **{f"tap{tap}": [] for tap in layout.taps},
        }
        self._lengths: dict[str, list[int]] = {"last": [], "tap": []}

    def add(self, features: Features) -> None:
        """Append every row of a batch."""
        batch, every = features.batch, features.batch.documents != PADDING
        kept = every if self._layout.all_last else taught(batch)
        for r in range(len(batch.ids)):
            parts = {"last": features.last[r][kept[r].to(features.last.device)]}
            for tap, states in zip(self._layout.taps, features.taps, strict=True):
                parts[f"tap{tap}"] = states[r, : int(every[r].sum())]
            for name, states in parts.items():
                self._rows[name].append(states.cpu())
            self._lengths["last"].append(int(kept[r].sum()))
            self._lengths["tap"].append(int(every[r].sum()))

    def write(self, path: Path) -> None:
        """The shard, then the note that it is whole."""
        tensors: dict[str, Tensor] = {}
        for name, rows in self._rows.items():
            tensors |= encoded(name, torch.cat(rows), self._layout.dtype)
        for name, lengths in self._lengths.items():
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
    """`[T, H]` as it is stored; fp8 has one scale a position, which makes its largest element
    448."""
    if dtype != "fp8":
        return {name: states.to(getattr(torch, dtype)).contiguous()}
    scale = states.float().abs().amax(-1).clamp(min=1e-12) / FP8_LARGEST
    return {
        name: (states.float() / scale[:, None]).to(torch.float8_e4m3fn).contiguous(),
        f"{name}_scale": scale,
    }


class Shard:
    """One shard, memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
            names = set(self._file.keys())
            self._starts = {
                name: self._file.get_tensor(f"{name}_starts").tolist() for name in ("last", "tap")
            }
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} is not a shard of features ({error}); delete it and {AGAIN}"
            ) from error
        self._scaled = any(name.endswith("_scale") for name in names)

    def row(self, name: str, place: int) -> Tensor:
        """`[N, H]`: what is stored of tensor `name` for the row at `place` of this shard."""
        starts = self._starts["last" if name == "last" else "tap"]
        part = slice(starts[place], starts[place + 1])
        states = self._file.get_slice(name)[part]
        return (
            states.float() * self._file.get_slice(f"{name}_scale")[part][:, None]
            if self._scaled
            else states
        )


class StoredFeatures:
    """Features from a store, whole or a ring."""

    OPEN = 64

    def __init__(
        self,
        store: str | Path,
        batches: Batches,
        target: Target,
        taps: tuple[int, ...],
        all_last: bool,
        main: bool,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`main`: this rank tells a ring's extractor how far training has come. `asked`: whether
        the run was asked to stop."""
        self._store, manifest = Path(store), manifest_of(store)
        self._layout = layout_of(manifest)
        if missing := sorted(set(taps) - set(self._layout.taps)):
            raise UserError(
                f"{store} has taps {list(self._layout.taps)}, not {missing}; extract again with "
                "this run's config"
            )
        if all_last and not self._layout.all_last:
            raise UserError(
                f"{store} has last states for replies only, EAGLE-1 reads them everywhere; "
                "extract again for it"
            )
        self._batches, self._target, self._taps, self._main = batches, target, taps, main
        self._asked = asked
        self._shards: dict[int, Shard] = {}
        self._verified: set[int] = set()
        self._told = -1
        if (ring := self._layout.ring) is not None and ring * self._layout.rows_per_shard < (
            needed := batches.rows_per_step + self._layout.rows_per_shard - 1
        ):
            raise UserError(
                f"a step of {batches.rows_per_step} rows may need {needed} rows of {store} at a "
                "time, its ring holds "
                f"{ring * self._layout.rows_per_shard}; extract with a larger --ring or "
                "--rows-per-shard"
            )

    def features(self, batch: Batch) -> Features:
        device, dtype = self._target.device, self._target.dtype
        shape = (*batch.ids.shape, self._target.hidden_size)
        names = ["last", *(f"tap{tap}" for tap in self._taps)]
        states = {name: torch.zeros(shape, dtype=dtype) for name in names}
        kept = batch.documents != PADDING if self._layout.all_last else taught(batch)
        if self._layout.ring is not None:
            self._let_go(min(batch.numbers))
        for r, number in enumerate(batch.numbers):
            unit = number if self._layout.ring is not None else self._batches.pack_of(number)
            index, place = divmod(unit, self._layout.rows_per_shard)
            shard = self._shard(index)
            for name in names:
                row = shard.row(name, place).to(dtype)
                if name == "last":
                    states[name][r, kept[r]] = row
                else:
                    states[name][r, : len(row)] = row
        last, *found = (states[name].to(device, non_blocking=True) for name in names)
        return Features(batch, last, tuple(found))

    def _shard(self, index: int) -> Shard:
        if index not in self._shards:
            path = shard_path(self._store, index)
            if self._layout.ring is not None:
                self._await(path)
            elif not shard_done(path):
                raise UserError(
                    f"{path} is missing from the feature store; {AGAIN}, which fills it in"
                )
            # a ring's shard may have been written anew
            if self._layout.ring is not None or index not in self._verified:
                verify_shard(path)
                self._verified.add(index)
            if len(self._shards) >= self.OPEN:
                self._shards.pop(next(iter(self._shards)))
            self._shards[index] = Shard(path)
        self._shards[index] = self._shards.pop(index)  # the last to be closed
        return self._shards[index]

    def _await(self, path: Path) -> None:
        since = time.monotonic()
        while not shard_done(path):
            time.sleep(0.01)
            if self._asked():
                raise UserError(
                    "asked to stop while waiting for the extractor; the same command goes on from "
                    "the last checkpoint"
                )
            if time.monotonic() - since > PATIENCE_S:
                log.warning(
                    "waiting for %s; is draftsmith data extract running for this store?", path
                )
                since = time.monotonic()

    def _let_go(self, number: int) -> None:
        """Rows before the step's first are done with on every rank, since a step ends with a sum
        over ranks; its own are not."""
        first = number // self._batches.rows_per_step * self._batches.rows_per_step
        index = first // self._layout.rows_per_shard
        if index != self._told:
            # a mapped file keeps its place on disk
            self._shards = {i: shard for i, shard in self._shards.items() if i >= index}
            if self._main:
                tell(self._store, first)
            self._told = index

    def finish(self) -> None:
        """Let a ring's extractor go."""
        if self._layout.ring is not None and self._main:
            tell(self._store, 0, done=True)


def layout_of(manifest: Manifest) -> Layout:
    facts = manifest.layout
    return Layout(tuple(facts.taps), facts.all_last, facts.dtype, facts.rows_per_shard, facts.ring)


def tell(store: Path, first: int, done: bool = False) -> None:
    """Say in `wanted.json` which row is the first that is still needed, or that none is."""
    with whole_file(store / WANTED) as aside:
        write_json(aside, {"first": first, "done": done})


def wanted(store: Path) -> tuple[int, bool]:
    """What `tell` said last."""
    if not (store / WANTED).is_file():
        return 0, False
    facts = read_document(store / WANTED, Wanted, "delete it; its trainer writes it again")[0]
    return facts.first, facts.done


def shards_to_write(
    store: Path, layout: Layout, shards: int, rank: int, ranks: int
) -> Iterator[int]:
    """Numbers of the shards that this worker has to write, one after another; of a ring as room
    comes free, until the trainer is done."""
    if layout.ring is None:
        yield from (
            index
            for index in range(rank, shards, ranks)
            if not shard_done(shard_path(store, index))
        )
        return
    while True:
        first, done = wanted(store)
        if done:
            return
        lowest = first // layout.rows_per_shard
        if rank == 0:
            for note in (store / "shards").glob("shard-*.json"):
                if not lowest <= int(note.stem.removeprefix("shard-")) < lowest + layout.ring:
                    remove_shard(note.with_suffix(".safetensors"))
        window = (i for i in range(lowest, lowest + layout.ring) if i % ranks == rank)
        missing = next((i for i in window if not shard_done(shard_path(store, i))), None)
        if missing is None:
            time.sleep(0.02)
        else:
            yield missing
