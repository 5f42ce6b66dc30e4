"""Inputs of a training run: a target with the run's own data, or a feature store that has both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..heads.fingerprint import Fingerprint, changed_numbers, hash_of
from ..heads.pretrained import clear_errors, make_causal_lm, read_config, read_tokenizer
from ..inference.targets.spread import on_first
from ..inference.targets.stored import (
    HeldOutText,
    StoredTarget,
    embedding_and_head_in,
    load_stored,
    load_texts,
    manifest_of,
    tensors_in,
)
from ..inference.targets.target import Target, TargetSource, load_target, resolve_device
from .config import RunConfig, TargetConfig
from .data import tables as data_module
from .data.batches import Batches
from .data.config import Data
from .data.features import FeatureSource, LiveTarget
from .data.served import Client, ServedFeatures, ServedTarget, served_texts
from .data.store import StoredFeatures
from .evaluation import held_out_prompts
from .objectives import Objective

log = logging.getLogger(__name__)

HELD_OUT_REPLIES = "held-out-replies.json"  # file in a run's output, of a server's replies


@dataclass
class Inputs:
    """A target, whole or only its embedding and head, with the texts and their features."""

    target: TargetSource
    tables: data_module.Tables
    identity: JsonObject
    """Hashes of the target's weights and of the data, and the numbers of its configuration."""
    make_source: Callable[[Objective, Batches, Callable[[], bool]], FeatureSource]
    """Function that makes the source of features. Its last argument returns true once the run was
    asked to stop."""
    make_texts: Callable[[tuple[int, ...]], list[HeldOutText]] | None = None
    """Function that returns the held-out texts of all ranks with the features of the given taps;
    None if the target in this process has to write them."""


Check = Callable[[JsonObject], None]
"""Function that raises `UserError` for a resume whose identity, or a part of it, has changed. It is
called before anything is written: such a resume must leave the folder as it is."""


def inputs_of(run: RunConfig, accelerator: Accelerator, folder: Path, check: Check) -> Inputs:
    """Load the target, data and features that the run's config names; `folder` is its output.

    Raises `UserError` for data that cannot be used.
    """
    if (store := run.features.store) is not None:
        return stored_inputs(run, store, accelerator, check)
    if run.features.server is not None:
        target: Target | ServedTarget = served_target(run, accelerator)
    else:
        target = load_target(on_rank(run.target, accelerator))
    known = identity_of(target.fingerprint())
    check(known)
    data, seed = folder / "data", run.seed
    tables = prepared_tables(
        run.data, target, data, seed, lambda identity: check({"data": identity})
    )
    identity = known | {"data": data_module.noted(data).identity}
    if isinstance(target, Target):
        return Inputs(
            target, tables, identity, lambda objective, *_: LiveTarget(target, objective.taps)
        )
    prompts = held_out_prompts(tables, run.evaluation.limit, target.max_positions - 2)
    replies = folder / HELD_OUT_REPLIES
    return Inputs(
        target,
        tables,
        identity,
        lambda objective, *_: ServedFeatures(target, objective.taps),
        lambda taps: on_first(lambda: served_texts(target, prompts, taps, run.evaluation, replies)),
    )


def identity_of(fingerprint: Fingerprint) -> JsonObject:
    """Return the part of a run's identity that the target has."""
    return {"target": fingerprint.weights_hash, "numbers": fingerprint.numbers}


def prepared_tables(
    data: Data,
    target: TargetSource,
    folder: Path,
    seed: int,
    check: Callable[[str], None],
) -> data_module.Tables:
    """Return the tables in `folder`, which the first rank builds if they are not there.

    `check` is called there with their identity before they are written. Raises `UserError` on every
    rank if the data cannot be used; see `tables.prepare`.
    """

    def prepare() -> None:
        # What it returned would be sent to every rank, and each reads the files.
        data_module.prepare(data, target, folder, seed, check)

    on_first(prepare)
    return data_module.load(folder)


def served_target(run: RunConfig, accelerator: Accelerator) -> ServedTarget:
    """Load the target's embedding, final norm and head, with a client of the server for the rest.

    The tensors are on this rank's device.
    """
    options = run.features
    assert options.server is not None, "the run reads features from a server"
    device = resolve_device(str(accelerator.device))
    target = embedding_and_head_in(run.target.path, ServedTarget, device, run.target.dtype)
    target.allow_added_tokens = run.target.allow_added_tokens
    if target.final_norm() is None:
        raise UserError(
            f"the final norm of {run.target.path} was not found, through which a server's states "
            "have to go; leave out features.server"
        )
    target.client = Client(
        options.server,
        options.server_model,
        options.server_layers,
        hidden_size=target.hidden_size,
    )
    return target


def stored_inputs(run: RunConfig, store: str, accelerator: Accelerator, check: Check) -> Inputs:
    """Return the inputs of a run that reads a feature store.

    The store has the data and the target's embedding and head too. Raises `UserError` if packed
    rows or seed of the store are others than the run's.
    """
    manifest = manifest_of(store)
    # Both decide which documents a packed row holds, hence what a stored row belongs to.
    for name, wanted in (("max_length", run.data.max_length), ("seed", run.seed)):
        if (stored := getattr(manifest, name)) != wanted:
            raise UserError(
                f"{store} was extracted with {name} {stored}, this run has {wanted}; use the same, "
                "or extract again"
            )
    target = load_stored(store, str(accelerator.device))
    target.allow_added_tokens = run.target.allow_added_tokens
    on_first(lambda: check_named_target(run.target, target, store))
    identity = {**identity_of(manifest.target), "data": manifest.tables}
    check(identity)
    said = "features of %s from %s, and its data: data.sources of this config are not read"
    log.info(said, target.name, store)
    wanted = asdict(run.evaluation)
    for name, stored in manifest.held_out.items():
        if name in wanted and wanted[name] != stored:
            said = "evaluation.%s is %g in the store, which is used, not %g"
            log.info(said, name, stored, wanted[name])

    main = accelerator.is_main_process
    return Inputs(
        target,
        data_module.load(Path(store, "data")),
        identity,
        lambda objective, batches, asked: StoredFeatures(
            store, batches, target, objective.taps, objective.all_last, main, asked
        ),
        lambda taps: load_texts(store, taps),
    )


def check_named_target(named: TargetConfig, stored: StoredTarget, store: str) -> None:
    """Raise `UserError` if the target that a run names is not the one of its feature store.

    Weights are compared by the sample that a fingerprint has, where the files hold them as they are
    loaded: not quantised, and without an adapter. A target that is not in a folder here is not
    compared, which the log says: a run from a store does not need it.
    """
    folder = Path(named.path)
    if not (folder / "config.json").is_file():
        log.info("no config.json in %s: it was not compared with the target of %s", folder, store)
        return
    with clear_errors(folder):
        config = read_config(folder, named.trust_remote_code)
        with torch.device("meta"):
            model = make_causal_lm(config, named.trust_remote_code)
        tokenizer = read_tokenizer(folder, named.trust_remote_code)
    model.tie_weights()
    weights = [name for name, _ in model.named_parameters()]
    _, read = tensors_in(folder)
    known = stored.fingerprint()
    comparable = (
        named.adapter is None
        and getattr(config, "quantization_config", None) is None
        # Rounded to float16 and then to bfloat16, a weight may become another one.
        and stored.dtype != torch.float16
        and all(read(name) is not None for name in weights)
    )
    digest = hash_of(weights, read) if comparable else known.weights_hash
    found = Fingerprint.of(model, tokenizer, named.path, digest)
    said = {"tokenizer_hash": "tokenizer", "weights_hash": "weights"}
    names = ("model_type", "hidden_size", "num_layers", "vocab_size", *said)
    different = [said.get(n, n) for n in names if getattr(found, n) != getattr(known, n)]
    if changes := changed_numbers(known.numbers, found.numbers):
        different.append(f"configuration ({changes})")
    if different:
        raise UserError(
            f"{store} holds features of {known.name}, and target {named.path} differs in "
            f"{' and '.join(different)}; name that target, or extract again"
        )


def on_rank(target: TargetConfig, accelerator: Accelerator) -> TargetConfig:
    """Return the target's config with the device of this rank, unless the user named one.

    Raises `UserError` for a device of another type than accelerate trains on.
    """
    if target.device == "auto":
        return replace(target, device=str(accelerator.device))
    if torch.device(target.device).type != accelerator.device.type:
        raise UserError(
            f"target.device is {target.device}, but accelerate trains on {accelerator.device}; "
            "leave target.device at auto"
        )
    return target
