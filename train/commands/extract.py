"""`draftsmith data extract`: run the target over the data of a training run and store its features.

There may be any number of workers: each writes its own shards, and a second call with the same
arguments writes those that are missing. With `--ring N` there are never more than N shards: this
command then runs next to the training, which reads them as they come.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors.torch import save_file
from torch import Tensor

from ...heads.errors import UserError
from ...heads.files import (
    JsonObject,
    check_output_folder,
    file_facts,
    remove_partials,
    whole_directory,
    whole_file,
    write_json,
)
from ...heads.fingerprint import changed_numbers
from ...heads.layout import dtype_name
from ...inference.console import Progress
from ...inference.metrics import repeats_itself
from ...inference.targets.stored import (
    MANIFEST,
    SAMPLE_FILE,
    TEXTS_FILE,
    HeldOutText,
    manifest_of,
    read_manifest,
    save_embedding_and_head,
    save_texts,
    verify_noted,
)  # fmt: skip
from ...inference.targets.target import Target, TargetSource, load_target
from ..command_line.parse import options_from
from ..config import RunConfig
from ..data import tables as data_module
from ..data.batches import Batches, collate
from ..data.features import FeatureSource, LiveTarget
from ..data.served import ServedFeatures, ServedTarget, served_texts
from ..data.store import (
    AGAIN,
    Layout,
    ShardWriter,
    missing_shards,
    shard_done,
    shard_path,
    shards_of_ring,
    tell,
    wanted,
)  # fmt: skip
from ..evaluation import held_out_prompts, write_text
from ..inputs import on_rank, prepared_tables, served_target
from ..loop import check_before_loading
from ..method import AnyMethod, method_for, method_named
from ..parallel import load_models_whole, on_main, only_launch
from ..provenance import provenance
from .options import ExtractOptions as Options

log = logging.getLogger(__name__)


SCHEMA = 1
LEAST_PATIENCE_S = 60.0
"""Seconds without a new shard, beyond three times the slowest, after which workers are lost."""
Judged = tuple[list[HeldOutText], dict[int, float], dict[str, Tensor]]
"""Held-out texts, sizes of the taps, and the tensors of `sample.safetensors`."""


def run(options: Options) -> None:
    """Run the command. Raises `UserError` before the target is loaded where that is possible."""
    check_output_folder(options.out, "--out")
    options = replace(options, method=method_for(options.config, options.method))
    method = method_named(str(options.method))
    config = options_from(method.run_class, {}, options.config)
    # A run that trains from this store names it in its config, and it is only written here.
    # `features.server` stays: it says where the features come from.
    config.features.store = None
    check_before_loading(config)
    # Workers wait for the one that writes the held-out replies.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[patience])
    load_models_whole(accelerator)
    with only_launch(accelerator, options.out):
        _extract(options, config, method, accelerator)
    accelerator.end_training()


def _extract(
    options: Options, config: RunConfig, method: AnyMethod, accelerator: Accelerator
) -> None:
    """Write the store in a folder that no other launch writes; see `run`."""
    target = target_for(config, options, accelerator)
    taps, all_last = method.features_of(config, target)
    layout = Layout(taps, all_last, options.dtype, options.rows_per_shard, options.ring)
    store = Path(options.out)

    def check(identity: str) -> None:
        refuse_another(store, facts_of_run(options, config, target, layout, identity))

    tables = prepared_tables(accelerator, config.data, target, store / "data", config.seed, check)
    # Packs, and their order in the stream, do not depend on ranks and accumulation, so 1 does for
    # both, whatever the training run will have.
    batches = Batches(tables.train, config.data.max_length, config.batch_rows, 1, 1, config.seed)
    # A function, because a store that was begun before has these texts already.
    held_out = partial(
        judge_texts, config, target, layout, tables, batches.sample_ids(target.max_positions - 1)
    )
    if target.together and not on_main(accelerator, (store / MANIFEST).is_file):
        # All ranks have to take part in the target's forward passes, so its replies are written
        # here and not within `begin`, which only the main process runs.
        judged = held_out()

        def held_out():
            return judged

    on_main(
        accelerator,
        lambda: begin(store, options, config, target, layout, batches, tables, held_out),
    )
    if layout.ring is not None:
        # The note that a former training run is done would end this extractor at once.
        on_main(accelerator, lambda: tell(store, 0) if wanted(store)[1] else None)
    if isinstance(target, ServedTarget):
        source: FeatureSource = ServedFeatures(target, taps)
    else:
        assert isinstance(target, Target), "a store is extracted from a target that runs"
        source = LiveTarget(target, taps)
    slowest = write_shards(
        store, layout, source, batches, config.batch_rows, accelerator, target.together
    )
    if accelerator.is_main_process:
        if layout.ring is None:
            wait_for_others(store, shards_of(layout, batches), 3 * slowest + LEAST_PATIENCE_S)
        size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        log.info("%s: features of %d packed rows, %.2f GB", store, batches.packs, size / 1e9)


def shards_of(layout: Layout, batches: Batches) -> int:
    """Return the number of shards of a whole store."""
    # Rounded up: 10 packs in shards of 4 are 3 shards.
    return -(-batches.packs // layout.rows_per_shard)


def wait_for_others(store: Path, shards: int, patience_s: float) -> None:
    """Wait until the other workers have written their shards.

    The disk is watched, and no worker waits for another's message: one on a lost machine would
    never answer. Raises `UserError` if shards are missing and none came for `patience_s`.
    """
    missing = missing_shards(store, shards)
    since = time.monotonic()
    while missing:
        if time.monotonic() - since > patience_s:
            raise UserError(
                f"{store} lacks {len(missing)} of {shards} shards, and none came for "
                f"{patience_s:.0f} s: a worker was lost; {AGAIN}, with any number of workers"
            )
        time.sleep(min(1.0, patience_s / 10))
        left = [index for index in missing if not shard_done(shard_path(store, index))]
        if len(left) < len(missing):
            missing, since = left, time.monotonic()


def target_for(config: RunConfig, options: Options, accelerator: Accelerator) -> TargetSource:
    """Load the run's target, or the part of it that is needed with a server.

    Raises `UserError` for a ring of a target that all ranks run together.
    """
    if config.features.server is not None:
        return served_target(config, accelerator)
    target = load_target(on_rank(config.target, accelerator))
    if target.together and options.ring is not None:
        raise UserError(
            f"a ring's workers go their own ways, target.spread={target.spread} needs them "
            "together; use devices"
        )
    return target


def judge_texts(
    config: RunConfig,
    target: TargetSource,
    layout: Layout,
    tables: data_module.Tables,
    ids: list[int],
) -> Judged:
    """Return the held-out texts with their features, the sizes of the taps, and a sample of taps.

    The sample has the taps of the text `ids`, by their numbers, and the text itself as "ids"; it is
    what `StoredTarget.tap_sample` gives back.
    """
    prompts = held_out_prompts(tables, config.evaluation.prompts, target.max_positions - 2)
    if isinstance(target, ServedTarget):
        texts = served_texts(target, prompts, layout.taps, config.evaluation.max_new_tokens)
    else:
        assert isinstance(target, Target), "only a served target cannot be run here"
        progress = Progress(prompts, desc="target writes held-out replies")
        texts = [
            write_text(target, prompt, layout.taps, config.evaluation.max_new_tokens)
            for prompt in progress
        ]
    sample = {"ids": torch.tensor(ids)}
    if layout.taps:
        tap_states = target.tap_sample(ids, layout.taps)
        for tap, states in zip(layout.taps, tap_states, strict=True):
            sample[str(tap)] = states.cpu().contiguous()
    return texts, dict(zip(layout.taps, target.tap_sizes(layout.taps), strict=True)), sample


def begin(
    store: Path,
    options: Options,
    config: RunConfig,
    target: TargetSource,
    layout: Layout,
    batches: Batches,
    tables: data_module.Tables,
    held_out: Callable[[], Judged],
) -> None:
    """Write everything of a store but its shards, the manifest last; the main process calls this.

    For a store that has been begun, check instead that it is of the same run, and write what is
    missing or damaged next to the shards. `held_out` makes the texts, if they are needed. Raises
    `UserError` for a store of another run.
    """
    identity = data_module.noted(store / "data").identity
    facts = facts_of_run(options, config, target, layout, identity) | {"packs": batches.packs}
    # Left by workers that were killed.
    for folder in (store, store / "shards"):
        remove_partials(folder)
    refuse_another(store, facts)
    if (store / MANIFEST).is_file():
        if whole_beside_shards(store):
            return
    elif (store / "shards").exists():
        shutil.rmtree(store / "shards")  # of a run that died before there was a manifest
    (store / "shards").mkdir(parents=True, exist_ok=True)
    with whole_directory(store / "target") as aside:
        save_embedding_and_head(target, aside)
    texts, sizes, sample = held_out()
    # Held-out texts are few, and drafters are judged by them, so fp8 is not used for them.
    exact = torch.float32 if options.dtype == "float32" else torch.bfloat16
    with whole_file(store / TEXTS_FILE) as aside:
        save_texts(texts, layout.taps, exact, aside)
    with whole_file(store / SAMPLE_FILE) as aside:
        save_file(sample, aside)
    more = {
        "tap_sizes": sizes,
        "loop_share": sum(repeats_itself(text.ids[text.start :]) for text in texts) / len(texts),
        "target_dtype": dtype_name(target.dtype),
        "counts": tables.counts,
        "files": {str(path.relative_to(store)): file_facts(path) for path in ends_and_texts(store)},
        "provenance": provenance(),
    }
    with whole_file(store / MANIFEST) as aside:
        write_json(aside, facts | more)


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
            was = {**was, "numbers": value["numbers"]}
        if was != value:
            raise UserError(
                f"{store} holds features of another run ({name} differs); choose another folder"
            )


def facts_of_run(
    options: Options, config: RunConfig, target: TargetSource, layout: Layout, identity: str
) -> JsonObject:
    """Return what the manifest holds about the run, by which another run's store is recognised.

    `identity` is that of the tables.
    """
    return {
        "schema": SCHEMA,
        "method": options.method,
        "target": target.fingerprint().as_dict(),
        "layout": {**asdict(layout), "taps": list(layout.taps)},
        "taps": list(layout.taps),
        "max_length": config.data.max_length,
        "seed": config.seed,
        "tables": identity,
        "held_out": {
            "prompts": config.evaluation.prompts,
            "max_new_tokens": config.evaluation.max_new_tokens,
        },
    }


def ends_and_texts(store: Path) -> list[Path]:
    """Return the files of a store whose size and checksum the manifest holds.

    `shards/` and `data/` have checksums of their own, and `wanted.json` changes.
    """
    return [
        *sorted(path for path in (store / "target").rglob("*") if path.is_file()),
        store / TEXTS_FILE,
        store / SAMPLE_FILE,
    ]


def whole_beside_shards(store: Path) -> bool:
    """Return whether all files that the manifest names are as they were written.

    The first one that is not is logged.
    """
    manifest = manifest_of(store)
    try:
        for name in manifest.files:
            verify_noted(store, manifest, name)
    except UserError as error:
        log.warning("%s", error)
        return False
    return True


def write_shards(
    store: Path,
    layout: Layout,
    source: FeatureSource,
    batches: Batches,
    rows: int,
    accelerator: Accelerator,
    together: bool,
) -> float:
    """Write the shards of this worker that are missing, with `rows` packed rows in a forward pass.

    Workers that make every forward pass `together` go through equally many shards in step, and some
    of them drop the last. Returns the seconds that the slowest shard took.
    """
    whole, rank, ranks = layout.ring is None, accelerator.process_index, accelerator.num_processes
    shards = shards_of(layout, batches)
    if whole:
        # One list for all: the disk changes as soon as the first worker begins. A second call
        # divides what a lost worker left among all of them.
        missing = on_main(accelerator, lambda: missing_shards(store, shards))
        assigned = in_step(missing, rank, ranks) if together else apart(missing, rank, ranks)
    else:
        assigned = ((index, True) for index in shards_of_ring(store, layout, rank, ranks))
    progress = Progress(total=shards if whole else None, desc="extracting", unit=" shards")
    slowest = 0.0
    for index, to_write in assigned:
        begun = time.monotonic()
        first = index * layout.rows_per_shard
        end = first + layout.rows_per_shard
        # The last shard of a whole store may have fewer rows; the stream of a ring has no end.
        last = min(end, batches.packs) if whole else end
        writer = ShardWriter(layout)
        # Together, every shard takes as many forward passes as a full one. Those past its end run
        # its last row once more, and their features are not stored.
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
            progress.now(f"row {wanted(store)[0]} is wanted next")
        slowest = max(slowest, time.monotonic() - begun)
    progress.close()
    return slowest


def apart(missing: list[int], rank: int, ranks: int) -> Iterator[tuple[int, bool]]:
    """Yield shards for a rank that goes its own way, all of which it writes."""
    # The shards 3 5 8 and two ranks: rank 0 writes 3 and 8, rank 1 writes 5.
    return ((index, True) for index in missing[rank::ranks])


def in_step(missing: list[int], rank: int, ranks: int) -> Iterator[tuple[int, bool]]:
    """Yield shards for a rank that works in step with the others, and whether it writes each.

    The ranks take the `missing` shards in groups. In the last group a rank for which none is left
    goes through another's without writing it.
    """
    # The shards 3 5 8 and two ranks: rank 0 writes 3 and 8, rank 1 writes 5 and then goes through 8
    # without writing it.
    for start in range(0, len(missing), ranks):
        group = missing[start : start + ranks]
        yield group[min(rank, len(group) - 1)], rank < len(group)
