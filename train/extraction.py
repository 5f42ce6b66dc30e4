"""Extraction of features: the target runs over the data of a training run, and they are stored.

There may be any number of workers: each writes its own shards, and a second call with the same
arguments writes those that are missing. With `--ring N` there are never more than N shards: this
command then runs next to the training, which reads them as they come.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from ..heads.errors import UserError
from ..heads.files import (
    JsonObject,
    file_facts,
    remove_partials,
    whole_directory,
    whole_file,
    write_json,
)
from ..heads.fingerprint import changed_numbers, without_name
from ..heads.layout import dtype_name
from ..inference.base.console import ProgressReporter
from ..inference.metrics import repeats_itself
from ..inference.targets.spread import on_first
from ..inference.targets.stored import (  # fmt: skip
    MANIFEST,
    SAMPLE_FILE,
    TEXTS_FILE,
    HeldOutText,
    StoreLayout,
    manifest_of,
    read_manifest,
    save_embedding_and_head,
    save_texts,
    verify_noted,
)
from ..inference.targets.target import Target, TargetSource
from .config import RunConfig
from .data.batches import Batches, collate
from .data.features import FeatureSource, LiveTarget
from .data.served import ServedFeatures, ServedTarget, served_texts
from .data.store import (  # fmt: skip
    ShardWriter,
    missing_shards,
    ring_state,
    shard_path,
    shards_of_ring,
    write_ring_state,
)
from .data.tables import Tables, table_counts
from .evaluation import held_out_prompts, write_text
from .loading import load_tables
from .provenance import provenance

log = logging.getLogger(__name__)

SCHEMA = 1
HeldOutFeatures = tuple[list[HeldOutText], dict[int, float], dict[str, Tensor]]
"""Held-out texts, sizes of the taps, and the tensors of `sample.safetensors`."""


@dataclass
class Extraction:
    """Extraction of a run's features into a store that no other launch writes."""

    store: Path
    method: str
    config: RunConfig
    target: TargetSource
    layout: StoreLayout
    accelerator: Accelerator

    def run(self) -> None:
        """Write what is missing of the store, or this worker's share of that."""
        store, config, target, layout = self.store, self.config, self.target, self.layout

        def check(identity: str) -> None:
            refuse_another(store, self.facts(identity))

        tables = load_tables(config.data, target, store / "data", config.seed, check)
        # Packs, and their order in the stream, do not depend on ranks and accumulation, so 1 does
        # for both, whatever the training run will have.
        batches = Batches(
            tables.train, config.data.max_length, config.batch_rows, 1, 1, config.seed
        )
        judged = None
        if target.together and not on_first((store / MANIFEST).is_file):
            # All ranks have to take part in the target's forward passes, so its replies are written
            # here and not within `begin`, which only the main process runs.
            judged = self.judge_texts(tables, batches)
        on_first(lambda: self.begin(tables, batches, judged))
        if layout.ring is not None:
            # The note that a former training run is done would end this extractor at once.
            on_first(lambda: write_ring_state(store, 0) if ring_state(store).done else None)
        if isinstance(target, ServedTarget):
            source: FeatureSource = ServedFeatures(target, tuple(layout.taps))
        else:
            assert isinstance(target, Target), "a store is extracted from a target that runs"
            source = LiveTarget(target, tuple(layout.taps))
        self.write_shards(source, batches)
        if self.accelerator.is_main_process:
            log.info("%s: features of %d packed rows", store, batches.packs)

    def judge_texts(self, tables: Tables, batches: Batches) -> HeldOutFeatures:
        """Return the held-out texts with their features, the sizes of the taps, and a sample.

        The sample has the taps of a text by their numbers, and its token ids as "ids"; it is what
        `StoredTarget.tap_sample` gives back.
        """
        target, taps, evaluation = self.target, tuple(self.layout.taps), self.config.evaluation
        prompts = held_out_prompts(tables, evaluation.limit, target.max_positions - 2)
        if isinstance(target, ServedTarget):
            texts = served_texts(target, prompts, taps, evaluation)
        else:
            assert isinstance(target, Target), "only a served target cannot be run here"
            progress = ProgressReporter(prompts, desc="target writes held-out replies")
            texts = [write_text(target, prompt, taps, evaluation) for prompt in progress]
        ids = batches.sample_ids(target.max_positions - 1)
        sample = {"ids": torch.tensor(ids)}
        if taps:
            for tap, states in zip(taps, target.tap_sample(ids, taps), strict=True):
                sample[str(tap)] = states.cpu().contiguous()
        return texts, dict(zip(taps, target.tap_sizes(taps), strict=True)), sample

    def begin(self, tables: Tables, batches: Batches, judged: HeldOutFeatures | None) -> None:
        """Write everything of a store but its shards, the manifest last; the main process does.

        For a store that has been begun, check instead that it is of the same run, and write what is
        missing or damaged next to the shards. The held-out texts are made if they are needed and
        not given as `judged`. Raises `UserError` for a store of another run.
        """
        store, shards = self.store, self.store / "shards"
        facts = self.facts(table_counts(store / "data").identity) | {"packs": batches.packs}
        # Left by workers that were killed.
        for folder in (store, shards):
            remove_partials(folder)
        refuse_another(store, facts)
        if (store / MANIFEST).is_file():
            if intact_without_shards(store):
                return
        elif shards.exists():
            shutil.rmtree(shards)  # of a run that died before there was a manifest
        shards.mkdir(parents=True, exist_ok=True)
        with whole_directory(store / "target") as aside:
            save_embedding_and_head(self.target, aside)
        texts, sizes, sample = judged or self.judge_texts(tables, batches)
        # Held-out texts are few, and drafters are judged by them, so fp8 is not used for them.
        exact = torch.float32 if self.layout.dtype == "float32" else torch.bfloat16
        with whole_file(store / TEXTS_FILE) as aside:
            save_texts(texts, tuple(self.layout.taps), exact, aside)
        with whole_file(store / SAMPLE_FILE) as aside:
            save_file(sample, aside)
        # `shards/` and `data/` have checksums of their own, and `wanted.json` changes.
        files = sorted(path for path in (store / "target").rglob("*") if path.is_file())
        files += [store / TEXTS_FILE, store / SAMPLE_FILE]
        loops = sum(repeats_itself(text.ids[text.start :]) for text in texts)
        more = {
            "tap_sizes": sizes,
            "loop_share": loops / len(texts),
            "target_dtype": dtype_name(self.target.dtype),
            "counts": tables.counts,
            "files": {str(path.relative_to(store)): file_facts(path) for path in files},
            "provenance": provenance(),
        }
        with whole_file(store / MANIFEST) as aside:
            write_json(aside, facts | more)

    def facts(self, identity: str) -> JsonObject:
        """Return what the manifest holds about a run whose tables have this `identity`."""
        config = self.config
        return {
            "schema": SCHEMA,
            "method": self.method,
            "target": self.target.fingerprint().as_dict(),
            "layout": msgspec.to_builtins(self.layout),
            "taps": self.layout.taps,
            "max_length": config.data.max_length,
            "seed": config.seed,
            "tables": identity,
            "held_out": {
                "limit": config.evaluation.limit,
                "max_new_tokens": config.evaluation.max_new_tokens,
                "temperature": config.evaluation.temperature,
            },
        }

    def write_shards(self, source: FeatureSource, batches: Batches) -> None:
        """Write the shards of this worker that are missing.

        Workers of a target whose forward passes they make together go through equally many shards
        in step, and some of them drop the last.
        """
        layout, store, together = self.layout, self.store, self.target.together
        whole, rows = layout.ring is None, self.config.batch_rows
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        shards = -(-batches.packs // layout.rows_per_shard)  # of a whole store, rounded up
        assigned: Iterable[tuple[int, bool]]
        if whole:
            # One list for all: the disk changes as soon as the first worker begins. A second call
            # divides what a lost worker left among all of them.
            missing = on_first(lambda: missing_shards(store, shards))
            assigned = assigned_shards(missing, rank, ranks, together)
        else:
            assigned = ((index, True) for index in shards_of_ring(store, layout, rank, ranks))
        progress = ProgressReporter(
            total=shards if whole else None, desc="extracting", unit=" shards"
        )
        for index, to_write in assigned:
            first = index * layout.rows_per_shard
            end = first + layout.rows_per_shard
            # The last shard of a whole store may have fewer rows; the stream of a ring has no end.
            last = min(end, batches.packs) if whole else end
            writer = ShardWriter(layout)
            # Together, every shard takes as many forward passes as a full one. Those past its end
            # run its last row once more, and their features are not stored.
            for start in range(first, end if together else last, rows):
                numbers = tuple(range(start, min(start + rows, last))) or (last - 1,)
                packs = numbers if whole else [batches.pack_of(number) for number in numbers]
                rows_of_documents = [batches.documents_of_pack(pack) for pack in packs]
                features = source.features(collate(rows_of_documents, numbers))
                if start < last:
                    writer.add(features)
            if to_write:
                writer.write(shard_path(store, index))
            # The total counts the shards of all workers, which advance at about the same pace.
            progress.update(ranks if whole else 1)
            if not whole:
                progress.now(f"row {ring_state(store).first} is wanted next")
        progress.close()


def assigned_shards(
    missing: list[int], rank: int, ranks: int, together: bool
) -> list[tuple[int, bool]]:
    """Return the shards that a rank goes through, and whether it writes each.

    Ranks that work `together` take the `missing` shards in groups. In the last group a rank for
    which none is left goes through another's without writing it.
    """
    # The shards 3 5 8 and two ranks: rank 0 writes 3 and 8, rank 1 writes 5; together, rank 1 then
    # goes through 8 without writing it.
    assigned = [(index, True) for index in missing[rank::ranks]]
    if together and rank >= (len(missing) % ranks or ranks):
        assigned.append((missing[-1], False))
    return assigned


def refuse_another(store: Path, facts: JsonObject) -> None:
    """Raise `UserError` if `store` has a manifest that says otherwise than `facts`."""
    if not (store / MANIFEST).is_file():
        return
    _, before = read_manifest(store)
    for name, value in facts.items():
        was = before.get(name)
        if name == "target" and isinstance(was, dict):
            if changes := changed_numbers(was.get("numbers", {}), value["numbers"]):
                raise UserError(
                    f"{store} holds features of the target before its configuration was changed "
                    f"({changes}); choose another folder"
                )
            was = without_name({**was, "numbers": value["numbers"]})
            value = without_name(value)
        if was != value:
            raise UserError(
                f"{store} holds features of another run ({name} differs); choose another folder"
            )


def intact_without_shards(store: Path) -> bool:
    """Return whether all files that the manifest names are whole; the first other is logged."""
    manifest = manifest_of(store)
    try:
        for name in manifest.files:
            verify_noted(store, manifest, name)
    except UserError as error:
        log.warning("%s", error)
        return False
    return True
