"""Export of an artifact: an engine's files are written aside, checked, then renamed into place.

The export also needs to load an artifact without its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..artifact import OWN_FILE, Artifact, drafter_class, read_own_file
from ..draft_model import DraftModel
from ..errors import UserError
from ..files import checksum, read_json, whole_directory, write_json
from ..fingerprint import tokenizer_hash
from ..layout import dtype_name, place
from ..pretrained import clear_errors, read_tokenizer
from .card import CardFigures, card
from .engines import ENGINES
from .engines.engine import ExportRequest, FileLayout, Files, NativeFiles
from .exports import facts_of, recipe_for
from .selfcheck import check_export, check_name, stand_in_for

CARD = "README.md"


@dataclass(frozen=True)
class WrittenExport:
    """Export that was written and checked."""

    serve: str
    """Command that serves it."""
    notes: list[str]
    """Remarks on this drafter in this engine."""
    replaced: bool
    """True if an earlier export was in its place."""


def export(
    artifact: Artifact,
    request: ExportRequest,
    licence: str | None = None,
    measured: Sequence[CardFigures] = (),
    head: Tensor | None = None,
) -> WrittenExport:
    """Write the export that is requested, whole or not at all.

    `licence` and `measured` are for the model card. `head` `[V, H]` is the target's output matrix:
    one layout stores it, and engines get the rows of it that an EAGLE-3 shares. Raises `UserError`
    for a drafter that the engine cannot express, for a folder that holds something else, and for an
    export that fails its check.
    """
    recipe, facts = recipe_for(request.engine, artifact), facts_of(artifact)
    check_name(request.out, facts.kind)
    replaced = check_free(request.out)
    if facts.kind == "draft_model":
        artifact = with_vocabulary_of_target(artifact)
    check_numbers(artifact, request.dtype)
    layout = recipe.layout_for(facts)
    if facts.kind == "eagle3" and needs_target_head(request.engine, artifact):
        artifact = with_own_head(artifact, head, request.engine)
    drafter = artifact.drafter
    written = WrittenExport(recipe.serve(request, drafter), recipe.notes_for(facts), replaced)
    with whole_directory(request.out) as folder:
        if isinstance(drafter, DraftModel):
            drafter.save(folder, request.target, request.dtype)
        else:
            config, tensors = files_for(layout, artifact, request, head)
            write_json(folder / "config.json", config)
            save_file(tensors, folder / drafter.weights_file, metadata={"format": "pt"})
        # While the files still lie aside: a failed check leaves nothing where a user looks.
        check_export(folder, artifact, layout, request.dtype, head)
        ENGINES[request.engine].add_files(folder)
        document = artifact.own_facts(request.dtype)
        # The checksums are taken before the card is written, so the card may be edited later.
        document["export"] = {
            "engine": request.engine,
            "layout": layout.name,
            "serve": written.serve,
            "measured": [asdict(row) for row in measured],
            "sha256": {
                path.name: checksum(path) for path in sorted(folder.iterdir()) if path.is_file()
            },
        }
        write_json(folder / OWN_FILE, document)
        (folder / CARD).write_text(
            card(artifact, request, written.serve, written.notes, licence, measured)
        )
    return written


def needs_target_head(engine: str, artifact: Artifact) -> bool:
    """Return true if the files for `engine` hold rows of the target's output matrix."""
    facts = facts_of(artifact)
    layout = recipe_for(engine, artifact).layout_for(facts)
    shared = facts.kind == "eagle3" and facts.shape.shared_head
    return layout.stores_target_head or (shared and not layout.has_target_head)


def files_for(
    layout: FileLayout, artifact: Artifact, request: ExportRequest, head: Tensor | None = None
) -> Files:
    """Return `config.json` and the tensors of the artifact's drafter in `layout`.

    `head` `[V, H]` is the target's output matrix. Raises `UserError` if it is needed and not given.
    """
    drafter = artifact.drafter
    config = drafter.serving_config(request.target, dtype_name(request.dtype))
    tensors = drafter.stored_state(request.dtype)
    return layout.write(NativeFiles(config, tensors, facts_of(artifact), request.drafts, head))


def check_free(out: str | Path) -> bool:
    """Return true for an earlier export, false for an absent or empty folder; else `UserError`."""
    path = Path(out)
    if path.is_symlink() or (path.exists() and not path.is_dir()) or path.resolve() == Path.cwd():
        raise UserError(
            f"{out} is a file, a link or the folder that you are in; name a new folder with --out"
        )
    if not path.is_dir() or not any(path.iterdir()):
        return False
    # The folder is going to be replaced, and a trained drafter must not be lost that way. Only
    # exports, which can be made again, have the key `export`.
    document = read_json(path / OWN_FILE) if (path / OWN_FILE).is_file() else None
    if not isinstance(document, dict) or "export" not in document:
        what = "something else than" if document is None else "a drafter, not"
        raise UserError(f"{out} holds {what} an export; name another --out, or remove it")
    return True


def check_numbers(artifact: Artifact, dtype: torch.dtype) -> None:
    """Raise `UserError` if a weight is NaN or infinite, or becomes infinite in `dtype`."""
    for name, weight in artifact.drafter.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{name} of the drafter holds NaN or infinity; export an earlier checkpoint"
            )
        # float16 ends at 65504; bfloat16 has the range of float32.
        if not weight.to(dtype).isfinite().all():
            raise UserError(f"{name} does not fit into {dtype_name(dtype)}; use --dtype bfloat16")


@torch.no_grad()
def with_vocabulary_of_target(artifact: Artifact) -> Artifact:
    """Return a draft model whose embedding and head have as many rows as the target has tokens.

    Engines compare these two numbers, not the tokenizers: of one family, some models have a padded
    embedding and some have not. Rows that no token has are cut off; missing ones become the mean of
    the others, whose logit is never above the best one's. Raises `UserError` where the tokenizer
    has ids that are cut off.
    """
    drafter: DraftModel = artifact.drafter
    size, model = artifact.fingerprint.vocab_size, drafter.model
    known = model.config.get_text_config().vocab_size
    if known == size:
        return artifact
    last = max(drafter.tokenizer.get_vocab().values())
    if last >= size:
        raise UserError(
            f"the tokenizer of the draft model has ids up to {last}, and the target has rows for "
            f"{size} tokens; distil a draft model of the target's own tokenizer"
        )
    model = deepcopy(model)
    model.resize_token_embeddings(size, mean_resizing=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for tensor in (embedding.weight, head.weight, getattr(head, "bias", None)):
        if tensor is not None and size > known:
            tensor[known:] = tensor[:known].float().mean(0).to(tensor.dtype)
    same = DraftModel(model, drafter.tokenizer, drafter.vocab_size)
    return replace(artifact, drafter=same.eval().requires_grad_(False))


def load_alone(directory: str | Path) -> Artifact:
    """Load an artifact without its target, for export only: its embedding and head are stand-ins.

    Raises `UserError` for a folder that is no artifact, or a damaged one.
    """
    directory = Path(directory)
    if not (directory / OWN_FILE).is_file() and (directory / "config.json").is_file():
        raise UserError(
            f"{directory} was not made here: read it with draftsmith import; a plain model is "
            "served as it is"
        )
    document = read_own_file(directory)
    trained_for = document.target
    stand_in = stand_in_for(trained_for).embedding_and_head
    embedding_and_head = replace(stand_in, scale=document.embedding_scale or 1.0)
    if drafter_class(document.method) is DraftModel:
        # `DraftModel.load` compares the tokenizer next to it with the target's. The target's is not
        # there, so the same one is given twice after its hash was found to be the target's.
        with clear_errors(directory, "the tokenizer of draft model", "save the drafter again"):
            tokenizer = read_tokenizer(directory)
        if tokenizer_hash(tokenizer) != trained_for.tokenizer_hash:
            raise UserError(
                f"the tokenizer in {directory} is not the target's that it was trained for; save "
                "the drafter again"
            )
        embedding_and_head = replace(embedding_and_head, tokenizer=tokenizer)
    artifact = Artifact.load(directory, trained_for, embedding_and_head)
    place(artifact.drafter, torch.device("cpu"), getattr(torch, document.dtype))
    return artifact


@torch.no_grad()
def with_own_head(artifact: Artifact, head: Tensor | None, engine: str) -> Artifact:
    """Return an EAGLE-3 drafter of a shared head with a copy of the rows that it reads.

    Engines want them with it. `head` `[V, H]` is the target's output matrix. Raises `UserError` if
    it is not given.
    """
    shared = artifact.drafter
    if head is None:
        raise UserError(
            f"{engine} wants the target's output matrix next to a drafter that shares it; name the "
            "target with --target"
        )
    owner = type(shared)(replace(shared.shape, shared_head=False), shared.embedding_and_head)
    ids, weight = shared.draft_vocab_ids, shared.fc.weight
    rows = (head if ids is None else head[ids]).to("cpu", weight.dtype)
    # Cast first, because loading a state dict would cast the tensors to the new module's float32.
    place(owner, weight.device, weight.dtype)
    owner.load_state_dict({**shared.state_dict(), "lm_head.weight": rows})
    return replace(artifact, drafter=owner.eval().requires_grad_(False))
