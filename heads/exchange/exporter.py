"""Export of an artifact: an engine's files are written aside, checked, then renamed into place.

Engines load a wrong export without a message. Where `fc.weight` or a norm is missing, two of them
raise nothing, and the drafter loses most of its acceptance; the text stays correct, so nobody
notices. An export is therefore read back from its files alone, and compared with the drafter,
before it is renamed to the place where a user finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from safetensors.torch import save_file
from torch import Tensor

from ..artifact import OWN_FILE, Artifact, drafter_class, read_own_file
from ..errors import UserError
from ..files import file_facts, read_json, whole_directory, write_json
from ..fingerprint import Fingerprint, tokenizer_hash
from ..layout import EmbeddingAndHead, dtype_name, place, stored_as
from ..pretrained import as_user_errors, read_tokenizer
from .engines import ENGINES, TITLES, drafter_facts, recipe_for
from .engines.engine import ExportRequest, FileLayout, Files, NativeFiles
from .foreign import Answers, TargetParts
from .public import read_public

CARD = "README.md"


@dataclass(frozen=True)
class ExportResult:
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
    head: Tensor | None = None,
) -> ExportResult:
    """Write the export that is requested, whole or not at all.

    `licence` is for the model card. `head` `[V, H]` is the target's output matrix, of which engines
    get the rows that an EAGLE-3 shares. Raises `UserError` for a drafter that the engine cannot
    express, for a folder that holds something else, and for an export that fails its check.
    """
    recipe, facts = recipe_for(request.engine, artifact), drafter_facts(artifact)
    replaced = check_out_folder(request.out)
    drafter = artifact.drafter.for_export(artifact.fingerprint.vocab_size)
    if needs_target_head(request.engine, artifact):
        if head is None:
            raise UserError(
                f"{request.engine} wants the target's output matrix next to a drafter that shares "
                "it; name the target with --target"
            )
        drafter = drafter.with_own_head(head)
    artifact = replace(artifact, drafter=drafter)
    check_numbers(artifact, request.dtype)
    layout = recipe.layout
    written = ExportResult(recipe.serve(request, drafter), recipe.notes_for(facts), replaced)
    with whole_directory(request.out) as folder:
        if drafter.whole_model:
            drafter.save(folder, request.target, request.dtype)
        else:
            config, tensors = files_for(layout, artifact, request)
            write_json(folder / "config.json", config)
            save_file(tensors, folder / drafter.weights_file, metadata={"format": "pt"})
        # While the files still lie aside: a failed check leaves nothing where a user looks.
        check_export(folder, artifact, layout, request.dtype)
        ENGINES[request.engine].add_files(folder)
        # The checksums are taken before the card is written, so the card may be edited later. Code
        # in a folder of its own is not a drafter's file, and is not downloaded with one.
        files = {path.name: file_facts(path) for path in folder.iterdir() if path.is_file()}
        noted = {"engine": request.engine, "layout": layout.name, "serve": written.serve}
        document = artifact.own_facts(request.dtype) | {"files": files, "export": noted}
        write_json(folder / OWN_FILE, document)
        (folder / CARD).write_text(card(artifact, request, written, licence))
    return written


def needs_target_head(engine: str, artifact: Artifact) -> bool:
    """Return true if the files for `engine` hold rows of the target's output matrix."""
    layout = recipe_for(engine, artifact).layout
    return artifact.drafter.head_in_exports and not layout.has_target_head


def files_for(layout: FileLayout, artifact: Artifact, request: ExportRequest) -> Files:
    """Return `config.json` and the tensors of the artifact's drafter in `layout`."""
    drafter = artifact.drafter
    config = drafter.serving_config(request.target, dtype_name(request.dtype))
    tensors = drafter.stored_state(request.dtype)
    return layout.write(NativeFiles(config, tensors, drafter_facts(artifact), request.drafts))


def check_export(folder: Path, artifact: Artifact, layout: FileLayout, dtype: torch.dtype) -> None:
    """Read `folder` back and raise `UserError` unless it holds the drafter of `artifact`.

    Sizes and flags have to be equal, and every tensor bit for bit: two drafters of one class with
    equal facts and tensors compute the same. `layout` and `dtype` are those of the files.
    """
    live, target = artifact.drafter, placeholder_parts(artifact.fingerprint)
    if live.importable:
        found = read_public(folder, target, Answers(ours=True))
        loaded: Any = found.drafter
        # The reader's name of the layout begins with this; native ones are called after the kind.
        family = layout.read_as or live.kind
        if not found.layout.startswith(family) or loaded.kind != live.kind:
            _fail(f"it is taken for {found.layout}, not for {family}")
        if found.notes:
            _fail(found.notes[0])
    else:
        tokenizer = getattr(live, "tokenizer", None)
        lender = replace(target.embedding_and_head, tokenizer=tokenizer)
        loaded = type(live).load(folder, dtype, lender)
    if loaded.facts() != (facts := live.facts()):
        # Both have the same keys, being of one class.
        name = next(name for name in facts if loaded.facts()[name] != facts[name])
        _fail(f"{name} is {facts[name]} in the drafter and reads as {loaded.facts()[name]}")
    live_state, loaded_state = live.state_dict(), loaded.state_dict()
    if live_state.keys() != loaded_state.keys():
        _fail(f"{sorted(live_state.keys() ^ loaded_state.keys())[0]} is missing or surplus")
    for name, tensor in live_state.items():
        if tensor.cpu().to(stored_as(tensor, dtype)).ne(loaded_state[name]).any():
            _fail(f"{name} reads back as other numbers")


def placeholder_parts(target: Fingerprint) -> TargetParts:
    """Return the sizes of a target that is not loaded, with stand-ins for its embedding and head.

    Nothing is computed with these.
    """
    lender = EmbeddingAndHead(
        lambda ids: ids, lambda last: last, target.vocab_size, part=lambda ids: lambda last: last
    )
    return TargetParts(target.num_layers, target.hidden_size, target.vocab_size, lender)


def _fail(reason: str) -> None:
    raise UserError(
        f"the export does not read back as the drafter, so nothing was written: {reason}; please "
        "report this"
    )


def check_out_folder(out: str | Path) -> bool:
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
        raise UserError(f"{out} holds something else than an export; name another --out")
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


def load_without_target(directory: str | Path) -> Artifact:
    """Load an artifact without its target, for export only: its embedding and head are stand-ins.

    Raises `UserError` for a folder that is not an artifact, or a damaged one.
    """
    directory = Path(directory)
    if not (directory / OWN_FILE).is_file() and (directory / "config.json").is_file():
        raise UserError(
            f"{directory} was not made here: read it with draftsmith import; a plain model is "
            "served as it is"
        )
    document = read_own_file(directory)
    trained_for = document.target
    stand_in = placeholder_parts(trained_for).embedding_and_head
    embedding_and_head = replace(stand_in, scale=document.embedding_scale or 1.0)
    if drafter_class(document.method).whole_model:
        # Its `load` compares the tokenizer next to it with the target's. The target's is not there,
        # so the same one is given twice after its hash was found to be the target's.
        with as_user_errors(directory, "the tokenizer of draft model", "save the drafter again"):
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


def card(
    artifact: Artifact, request: ExportRequest, written: ExportResult, licence: str | None
) -> str:
    """Return the text of the model card, with the header that the Hugging Face hub reads.

    `licence` is the hub's name of one; None leaves it out, since nobody has said which it is.
    """
    drafter, engine = artifact.drafter, ENGINES[request.engine]
    # The hub links `base_model` to a repository, so a local folder is not named there.
    on_hub = request.target.count("/") == 1 and not Path(request.target).exists()
    in_transformers = engine.in_process or drafter.whole_model
    header = ModelCardData(
        license=licence,
        base_model=request.target if on_hub else None,
        datasets=artifact.provenance.get("data", {}).get("datasets") or None,
        library_name="transformers" if in_transformers else "draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", drafter.kind.replace("_", "-"), *engine.card_tags],
    )
    title = TITLES[drafter.kind]
    limits = [
        f"Trained for the weights of `{artifact.fingerprint.name}` named above; with a fine-tuned "
        "version fewer drafts are accepted, which no engine reports.",
        "Acceptance depends on the text: measure on your own prompts (`draftsmith evaluate`).",
        *written.notes,
    ]
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# {title[0].upper()}{title[1:]} for {request.target}",
        "A drafter for speculative decoding: it guesses tokens that the target checks, so that "
        "the text stays the target's own.",
        f"## {'Decode' if engine.in_process else 'Serve'} with {engine.title}",
        f"```bash\n{written.serve}\n```",
        f"## What it is\n\n{_facts_table(artifact, request)}",
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits),
    ]
    return "\n\n".join(sections) + "\n"


def _facts_table(artifact: Artifact, request: ExportRequest) -> str:
    """Return the table of facts about the drafter, in Markdown.

    Imported drafters lack parts of the provenance: their rows are left out.
    """
    target, drafter, provenance = artifact.fingerprint, artifact.drafter, artifact.provenance
    size = sum(parameter.numel() for parameter in drafter.parameters())
    rows = {
        "parameters": f"{size:,}, stored as {dtype_name(request.dtype)}",
        "target": f"`{target.name}`, {target.num_layers} layers of width {target.hidden_size}, "
        f"vocabulary {target.vocab_size:,}",
        "target's weights": f"hash {target.weights_hash}; tokenizer {target.tokenizer_hash}, "
        f"template {target.template_hash}",
    }
    if drafter.taps:
        rows["taps"] = f"hidden states {list(drafter.taps)} (0: embeddings)"
    if data := provenance.get("data"):
        texts, tokens, sha = (data.get(key, "?") for key in ("documents", "tokens", "sha256"))
        rows["training data"] = f"{texts} texts, {tokens} tokens, SHA-256 {str(sha)[:16]}"
    if (source := provenance.get("imported_from")) is not None:
        rows["imported from"] = f"`{source}`"
    lines = (f"| {name} | {text} |" for name, text in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])
