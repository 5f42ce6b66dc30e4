"""Loading of a run's target, token tables and features, or of a feature store that has them all."""

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
from ..heads.pretrained import as_user_errors, make_causal_lm, read_config, read_tokenizer
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
from .data.batches import Batches
from .data.config import Data
from .data.features import FeatureSource, LiveTarget
from .data.served import Client, ServedFeatures, ServedTarget, served_texts
from .data.store import StoredFeatures
from .data.tables import Tables, load, prepare, table_counts
from .evaluation import held_out_prompts
from .objectives import Objective

log = logging.getLogger(__name__)

HELD_OUT_REPLIES = "held-out-replies.json"  # file in the run's folder for a server's replies


@dataclass
class Inputs:
    """Target (whole, or its embedding and head only), token tables, and sources of features."""

    target: TargetSource
    tables: Tables
    identity: JsonObject
    """Facts by which a resume recognises target and data, see `TrainerState.identity`."""
    make_source: Callable[[Objective, Batches, Callable[[], bool]], FeatureSource]
    """Function that makes the source of features. Its last argument returns true once the run was
    asked to stop."""
    make_texts: Callable[[tuple[int, ...]], list[HeldOutText]] | None = None
    """Function from taps to the held-out texts of all ranks with their features; None if the target
    in this process has to write the texts."""


Check = Callable[[JsonObject], None]
"""Function that raises `UserError` for a resume whose identity, or a part of it, has changed. It is
called before anything is written, so that the folder stays as it is."""


def load_inputs(run: RunConfig, accelerator: Accelerator, folder: Path, check: Check) -> Inputs:
    """Load the target, data and features of the run's config; `folder` is the run's output.

    Raises `UserError` for data that cannot be used.
    """
    if (store := run.features.store) is not None:
        return load_stored_inputs(run, store, accelerator, check)
    if run.features.server is not None:
        target: Target | ServedTarget = load_served_target(run, accelerator)
    else:
        target = load_target(with_rank_device(run.target, accelerator))
    known = target_identity(target.fingerprint())
    check(known)
    data, seed = folder / "data", run.seed
    tables = load_tables(run.data, target, data, seed, lambda identity: check({"data": identity}))
    identity = known | {"data": table_counts(data).identity}
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


def target_identity(fingerprint: Fingerprint) -> JsonObject:
    """Return the target's part of a run's identity."""
    return {"target": fingerprint.weights_hash, "numbers": fingerprint.numbers}


def load_tables(
    data: Data,
    target: TargetSource,
    folder: Path,
    seed: int,
    check: Callable[[str], None],
) -> Tables:
    """Return the tables in `folder`, which the first rank builds if needed; see `tables.prepare`.

    Raises `UserError` on every rank if the data cannot be used.
    """

    def build() -> None:  # without a result, which would be sent to every rank
        prepare(data, target, folder, seed, check)

    on_first(build)
    return load(folder)


def load_served_target(run: RunConfig, accelerator: Accelerator) -> ServedTarget:
    """Load the target's embedding, final norm and head, with a client of the run's server."""
    options = run.features
    assert options.server is not None, "the run reads features from a server"
    device = resolve_device(str(accelerator.device))
    target = embedding_and_head_in(run.target.path, ServedTarget, device, run.target.dtype)
    target.allow_added_tokens = run.target.allow_added_tokens
    if target.final_norm() is None:
        raise UserError(
            f"the final norm of {run.target.path} was not found, and a server's states need it; "
            "leave out features.server"
        )
    target.client = Client(
        options.server,
        options.server_model,
        options.server_layers,
        hidden_size=target.hidden_size,
    )
    return target


def load_stored_inputs(
    run: RunConfig, store: str, accelerator: Accelerator, check: Check
) -> Inputs:
    """Return the inputs of a run that reads a feature store.

    The store also has the data and the target's embedding and head. Raises `UserError` if packed
    rows or seed of the store differ from the run's.
    """
    manifest = manifest_of(store)
    # Both determine the documents of each packed row.
    for name, wanted in (("max_length", run.data.max_length), ("seed", run.seed)):
        if (stored := getattr(manifest, name)) != wanted:
            raise UserError(
                f"{store} was extracted with {name} {stored}, this run has {wanted}; use the same, "
                "or extract again"
            )
    target = load_stored(store, str(accelerator.device))
    target.allow_added_tokens = run.target.allow_added_tokens
    on_first(lambda: check_named_target(run.target, target, store))
    identity = {**target_identity(manifest.target), "data": manifest.tables}
    check(identity)
    log.info(
        "features of %s and data from %s: data.sources of this config are not read",
        target.name, store,
    )  # fmt: skip
    evaluation = asdict(run.evaluation)
    for name, stored in manifest.held_out.items():
        if name in evaluation and evaluation[name] != stored:
            log.info("evaluation.%s is %g, as in the store, not %g", name, stored, evaluation[name])
    main = accelerator.is_main_process
    return Inputs(
        target,
        load(Path(store, "data")),
        identity,
        lambda objective, batches, asked: StoredFeatures(
            store, batches, target, objective.taps, objective.all_last, main, asked
        ),
        lambda taps: load_texts(store, taps),
    )


def check_named_target(named: TargetConfig, stored: StoredTarget, store: str) -> None:
    """Raise `UserError` if the target that a run names is not the one of its feature store.

    Weights are compared by the sample of a fingerprint, if the files hold them as they are loaded:
    not quantised, and without an adapter. A target that is not in a local folder is not compared,
    which is logged: a run from a store does not need it.
    """
    folder = Path(named.path)
    if not (folder / "config.json").is_file():
        log.info("no config.json in %s: it was not compared with the target of %s", folder, store)
        return
    with as_user_errors(folder):
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
        # A weight that is rounded to float16 and then to bfloat16 may differ from one that is
        # rounded to bfloat16 at once.
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


def with_rank_device(target: TargetConfig, accelerator: Accelerator) -> TargetConfig:
    """Return the target's config with the device of this rank, unless the user named one.

    Raises `UserError` for a device of another type than accelerate's.
    """
    if target.device == "auto":
        return replace(target, device=str(accelerator.device))
    if torch.device(target.device).type != accelerator.device.type:
        raise UserError(
            f"target.device is {target.device}, but accelerate trains on {accelerator.device}; "
            "leave target.device at auto"
        )
    return target
