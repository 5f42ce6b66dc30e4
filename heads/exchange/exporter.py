"""Export of an artifact: an engine's files are written aside, checked, then renamed into place.

Engines load a wrong export without a message. Where `fc.weight` or a norm is missing, two of them
raise nothing, and the drafter loses most of its acceptance; the text stays correct, so nobody
notices. An export is therefore read back from its files alone, and compared with the drafter,
before it is renamed to the place where a user finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..artifact import OWN_FILE, Artifact, drafter_class, read_own_file
from ..draft_model import DraftModel
from ..embedding_and_head import EmbeddingAndHead
from ..errors import UserError
from ..files import checksum, read_json, whole_directory, write_json
from ..fingerprint import Fingerprint, tokenizer_hash
from ..layout import dtype_name, place, stored_as
from ..pretrained import clear_errors, read_tokenizer
from .card import CardFigures, card
from .engines import ENGINES
from .engines.engine import ExportRequest, FileLayout, Files, NativeFiles
from .exports import facts_of, recipe_for
from .foreign import Answers, TargetParts
from .public import read_public

CARD = "README.md"
LENGTH = 12  # positions of the forward pass of a draft model that is compared


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


def check_export(
    folder: Path,
    artifact: Artifact,
    layout: FileLayout,
    dtype: torch.dtype,
    head: Tensor | None = None,
) -> None:
    """Read `folder` back and raise `UserError` unless it holds the drafter of `artifact`.

    Every tensor has to be equal, bit for bit. `layout` and `dtype` are those of the files. `head`
    `[V, H]` is the target's output matrix, which one layout stores; the artifact of an EAGLE-3 has
    its own rows of it by now.
    """
    live = artifact.drafter
    if isinstance(live, DraftModel):
        stand_in = stand_in_for(artifact.fingerprint).embedding_and_head
        target = replace(stand_in, tokenizer=live.tokenizer)
        loaded: Any = DraftModel.load(folder, dtype, target)
    else:
        loaded = load_back(folder, artifact, layout, head)
    live_state, loaded_state = live.state_dict(), loaded.state_dict()
    if live_state.keys() != loaded_state.keys():
        _fail(f"{sorted(live_state.keys() ^ loaded_state.keys())[0]} is missing or surplus")
    for name, tensor in live_state.items():
        if tensor.cpu().to(stored_as(tensor, dtype)).ne(loaded_state[name]).any():
            _fail(f"{name} reads back as other numbers")
    # Two drafters of one class with equal facts and tensors compute the same. The facts of a draft
    # model are transformers' config, so its logits are compared.
    if isinstance(live, DraftModel):
        as_stored = deepcopy(live)
        place(as_stored, torch.device("cpu"), dtype)
        for module in (as_stored, loaded):
            place(module, torch.device("cpu"), torch.float32)
        if not torch.equal(outputs(as_stored), outputs(loaded)):
            _fail("the drafter and what reads back compute different logits")


def load_back(folder: Path, artifact: Artifact, layout: FileLayout, head: Tensor | None) -> Any:
    """Return the drafter that is built from the files in `folder` alone.

    Raises `UserError` if they are recognised as another layout, leave anything open, or give other
    sizes or flags than the drafter of `artifact` has.
    """
    target = replace(stand_in_for(artifact.fingerprint), head=head)
    loaded = read_public(folder, target, Answers(ours=True))
    kind = artifact.drafter.kind
    # The reader's name of the layout begins with this; native layouts are called after the kind.
    family = layout.read_as or kind
    if not loaded.layout.startswith(family) or loaded.drafter.kind != kind:
        _fail(f"it is taken for {loaded.layout}, not for {family}")
    if loaded.notes:
        _fail(loaded.notes[0])
    loaded_facts, facts = loaded.drafter.facts(), artifact.drafter.facts()
    if loaded_facts != facts:
        # There is one: both have the same keys, being of one class.
        name = next(name for name in facts if loaded_facts[name] != facts[name])
        _fail(f"{name} is {facts[name]} in the drafter and reads as {loaded_facts[name]}")
    return loaded.drafter


def stand_in_for(target: Fingerprint) -> TargetParts:
    """Return the sizes of a target that is not loaded, with stand-ins for its embedding and head.

    Nothing is computed with these.
    """
    lender = EmbeddingAndHead(
        lambda ids: ids, lambda last: last, target.vocab_size, part=lambda ids: lambda last: last
    )
    return TargetParts(target.num_layers, target.hidden_size, target.vocab_size, lender)


@torch.no_grad()
def outputs(drafter: DraftModel) -> Tensor:
    """Return a draft model's logits of `LENGTH` random inputs, the same in every call."""
    # A generator of its own leaves the caller's random state as it is.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, drafter.vocab_size, (1, LENGTH), generator=generator)
    # A cut may have recurrent layers alone, and a cache of transformers takes no such model.
    return drafter.model(ids, use_cache=False).logits


def _fail(reason: str) -> None:
    raise UserError(
        f"the export does not read back as the drafter, so nothing was written: {reason}; please "
        "report this"
    )


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
