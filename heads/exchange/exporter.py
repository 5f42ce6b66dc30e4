"""An artifact becomes what an engine serves: written aside, read back, compared, and only then put
in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..artifact import OWN_FILE, Artifact, not_a_drafter
from ..documents import OwnFile, read_document
from ..eagle import EagleDrafter
from ..errors import UserError
from ..files import checksum, read_json, whole_directory, write_json
from ..fingerprint import Fingerprint, tokenizer_hash
from ..layout import place
from ..pretrained import clear_errors, read_tokenizer
from ..vocabulary import offsets
from .card import CardFigures, card
from .exports import ExportRequest, Recipe, files_for, kind_of, recipe_for
from .selfcheck import check_export, check_name, side_of

CARD = "README.md"


def export(
    artifact: Artifact,
    order: ExportRequest,
    licence: str = "other",
    measured: Sequence[CardFigures] = (),
    head: Tensor | None = None,
) -> Recipe:
    """Write `order.out` whole or not at all. `head` `[V, H]`: the target's, which one layout holds.

    Raises `UserError` for what the engine cannot express, for a folder that holds something else,
    or a check that fails.
    """
    recipe = recipe_for(order.engine, artifact)
    check_name(order.out, artifact)
    check_free(order.out)
    check_vocabulary(artifact)
    check_numbers(artifact, order.dtype)
    drafter = artifact.drafter
    with whole_directory(order.out) as aside:
        if artifact.method == "draft_model":
            drafter.save(aside, order.target, order.dtype)
        else:
            config, tensors = files_for(recipe.layout, drafter, order, artifact.fingerprint, head)
            write_json(aside / "config.json", config)
            save_file(tensors, aside / drafter.weights_file, metadata={"format": "pt"})
        check_export(aside, artifact, order, recipe, head)
        facts = artifact.own_facts(order.dtype)
        facts["export"] = {
            "engine": order.engine,
            "layout": recipe.layout,
            "serve": recipe.serve(order, drafter),
            "measured": [vars(row) for row in measured],
            "sha256": {path.name: checksum(path) for path in sorted(aside.iterdir())},
        }
        write_json(aside / OWN_FILE, facts)
        (aside / CARD).write_text(card(artifact, order, recipe, licence, measured))
    return recipe


def check_free(out: str | Path) -> None:
    """Demand a folder that is not there yet, or is empty, or an earlier export. Raises
    `UserError`."""
    path = Path(out)
    if path.is_symlink() or (path.exists() and not path.is_dir()) or path.resolve() == Path.cwd():
        raise UserError(
            f"{out} is a file, a link or the folder that you are in; name a new folder with --out"
        )
    if not path.is_dir() or not any(path.iterdir()):
        return
    own = read_json(path / OWN_FILE) if (path / OWN_FILE).is_file() else None
    if not isinstance(own, dict) or "export" not in own:
        what = "a drafter, not an export" if own is not None else "something else than an export"
        raise UserError(f"{out} holds {what}; name another --out, or remove it")


def check_numbers(artifact: Artifact, dtype: torch.dtype) -> None:
    """Demand weights that are numbers, in the type that they are stored in too. Raises
    `UserError`."""
    for name, weight in artifact.drafter.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{name} of the drafter holds NaN or infinity; export an earlier checkpoint"
            )
        if not weight.to(dtype).isfinite().all():
            raise UserError(
                f"{name} does not fit into {str(dtype).removeprefix('torch.')}; use --dtype "
                "bfloat16"
            )


def check_vocabulary(artifact: Artifact) -> None:
    """Demand a draft model whose logits are as many as the target's: engines compare the sizes, not
    the tokenizers."""
    if artifact.method != "draft_model":
        return
    ours, theirs = (
        artifact.drafter.model.config.get_text_config().vocab_size,
        artifact.fingerprint.vocab_size,
    )
    if ours != theirs:
        raise UserError(
            f"the draft model has a vocabulary of {ours}, the target of {theirs}, and engines "
            "want them equal; cut the student "
            "from the target, or pad its embedding with model.resize_token_embeddings and distil "
            "once more"
        )


def load_alone(directory: str | Path) -> Artifact:
    """An artifact without its target: its ends are made up, so it can be looked at and stored, not
    used. Raises `UserError`."""
    directory = Path(directory)
    if not (directory / OWN_FILE).is_file():
        if (directory / "config.json").is_file():
            raise UserError(
                f"{directory} was not made here: read it with draftsmith import; a plain model is "
                "served as it is"
            )
        raise not_a_drafter(directory)
    own, _ = read_document(directory / OWN_FILE, OwnFile, "save or copy the drafter again")
    trained_for = own.target
    embedding_and_head = side_of(trained_for).embedding_and_head
    if own.method == "draft_model":
        embedding_and_head = replace(
            embedding_and_head,
            vocab_size=trained_for.vocab_size,
            tokenizer=_own_tokenizer(directory, trained_for),
        )
    artifact = Artifact.load(directory, trained_for, embedding_and_head)
    place(artifact.drafter, torch.device("cpu"), getattr(torch, own.dtype))
    return artifact


def _own_tokenizer(directory: Path, target: Fingerprint) -> Any:
    """The one beside a draft model, which has to be the target's, though the target is not here."""
    with clear_errors(directory, "the tokenizer of draft model", "save the drafter again"):
        tokenizer = read_tokenizer(directory)
    if tokenizer_hash(tokenizer) != target.tokenizer_hash:
        raise UserError(
            f"the tokenizer in {directory} is not the target's that it was trained for; save the "
            "drafter again"
        )
    return tokenizer


@torch.no_grad()
def with_vocabulary(artifact: Artifact, ids: Tensor, counts: Tensor) -> Artifact:
    """An EAGLE-3 drafter that proposes tokens `ids` `[N]`, ascending, only. `counts` `[V]`: how
    often the target wrote each.

    Raises `UserError` where the drafter has no head of its own, or never had some of these tokens.
    """
    drafter: EagleDrafter = artifact.drafter
    if kind_of(drafter) != "eagle3":
        raise UserError(
            f"only EAGLE-3 has a vocabulary of its own to make smaller, not {kind_of(drafter)}"
        )
    kept = (
        drafter.draft_vocab_ids
        if drafter.draft_vocab_ids is not None
        else torch.arange(drafter.shape.vocab_size)
    )
    columns = torch.searchsorted(kept, ids.clamp(max=int(kept[-1])))
    if not torch.equal(kept[columns], ids):
        raise UserError(
            "the drafter's vocabulary is smaller already, and lacks some of these tokens; ask for "
            "fewer"
        )
    if len(ids) == len(kept):
        return artifact
    smaller = EagleDrafter(
        replace(drafter.shape, draft_vocab_size=len(ids)), drafter.embedding_and_head
    )
    state = {
        name: tensor for name, tensor in drafter.state_dict().items() if name not in ("d2t", "t2d")
    }
    state["lm_head.weight"] = state["lm_head.weight"][columns]
    state["d2t"], state["t2d"] = (
        offsets(ids),
        torch.zeros(drafter.shape.vocab_size, dtype=torch.bool).scatter(0, ids, True),
    )
    smaller.to(drafter.fc.weight.dtype).load_state_dict(state)
    coverage = float(counts[ids].sum() / counts.sum())
    smaller.check()
    pruned = {"draft_vocab_size": len(ids), "coverage": coverage}
    return Artifact(
        smaller.eval().requires_grad_(False),
        artifact.fingerprint,
        artifact.calibration,
        artifact.provenance | {"pruned": pruned},
    )
