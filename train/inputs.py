"""What a run learns from: the live target with the run's own data, or a feature store that has both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..heads.errors import UserError
from ..inference.stored import HeldOutText, load_stored, load_texts, manifest_of
from ..inference.target import Target, load_target
from . import data as data_module
from .batches import Batches
from .features import FeatureSource, LiveTarget
from .objectives import Objective
from .parallel import on_main
from .store import StoredFeatures


@dataclass
class Inputs:
    """A target, or what is left of one, and what it says about which texts."""

    target: Target
    tables: data_module.Tables
    identity: dict[str, str]
    """Hashes of the target's weights and of the data."""
    make_source: Callable[[Objective, Batches], FeatureSource]
    texts: list[HeldOutText] | None = None
    """Held-out texts, where they have been written before."""


def inputs_of(run: Any, accelerator: Accelerator, folder: Path, check: Callable[[dict[str, str]], None]) -> Inputs:
    """Load what the run's config names. `check` is given the identity before anything is written."""
    find = stored_inputs if run.features.store is not None else live_inputs
    return find(run, accelerator, folder, check)


def live_inputs(run: Any, accelerator: Accelerator, folder: Path, check: Callable[[dict[str, str]], None]) -> Inputs:
    target = load_target(on_rank(run.target, accelerator))
    if run.data.max_length > target.max_positions:
        raise UserError(
            f"data.max_length is {run.data.max_length}, but the target has {target.max_positions} positions; lower it"
        )
    identity = {"target": target.fingerprint().weights_hash, "data": data_module.tables_key(run.data, target, run.seed)}
    check(identity)
    on_main(accelerator, lambda: data_module.prepare(run.data, target, folder / "data", run.seed) and None)
    return Inputs(
        target, data_module.load(folder / "data"), identity, lambda objective, batches: LiveTarget(target, objective.taps)
    )


def stored_inputs(run: Any, accelerator: Accelerator, folder: Path, check: Callable[[dict[str, str]], None]) -> Inputs:
    store = run.features.store
    manifest = manifest_of(store)
    for name, ours in (("max_length", run.data.max_length), ("seed", run.seed)):
        if manifest[name] != ours:
            raise UserError(
                f"{store} was extracted with {name} {manifest[name]}, this run has {ours}; use the same, or extract again"
            )
    target = load_stored(store, str(accelerator.device))
    identity = {"target": manifest["target"]["weights_hash"], "data": manifest["tables"]}
    check(identity)
    main = accelerator.is_main_process

    def make_source(objective: Objective, batches: Batches) -> FeatureSource:
        return StoredFeatures(store, batches, target, objective.taps, objective.all_last, main)

    return Inputs(target, data_module.load(Path(store, "data")), identity, make_source, load_texts(store))


def on_rank(target: Any, accelerator: Accelerator) -> Any:
    """The target's config with this rank's device, unless the user named one."""
    if target.device == "auto":
        target.device = str(accelerator.device)
    elif torch.device(target.device).type != accelerator.device.type:
        raise UserError(
            f"target.device is {target.device}, but accelerate trains on {accelerator.device}; leave target.device at auto"
        )
    return target
