"""The artifact: a drafter's directory on disk, in the layout that engines read.

    config.json          the drafter's sizes, as engines read them
    *.safetensors        the drafter's tensors, under the names that engines read
    draftsmith.json      facts that only draftsmith needs: method, fingerprint of the target, taps,
                         calibration, provenance

Loading demands exactly the expected tensors, each with its name, shape and dtype
(docs/checkpoint-formats.md#artifact).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .documents import SCHEMA, DocumentError, OwnFile, read_document
from .errors import UserError, first_line
from .files import JsonObject, differs, facts_of, whole_directory, write_json
from .fingerprint import (
    ADDED_TOKENS_OPTION,
    Fingerprint,
    added_ids,
    effect_of_unknown_tokens,
    unknown_tokens,
)
from .layout import EmbeddingAndHead, dtype_name

OWN_FILE = "draftsmith.json"
# A module that is built from a damaged config fails in any of these ways.
CONFIG_ERRORS = (KeyError, TypeError, IndexError, ValueError, RuntimeError, ArithmeticError)


@dataclass
class Artifact:
    """Drafter with the target that it was trained for, its calibration and its provenance."""

    drafter: Any
    """Module with the interface of `DrafterModule`."""
    fingerprint: Fingerprint
    """Fingerprint of the target that the drafter was trained for."""
    calibration: JsonObject = field(default_factory=dict)
    """Measurements on held-out texts, see `documents.Calibration`."""
    provenance: JsonObject = field(default_factory=dict)
    """Facts about the training: command, versions, step, data."""

    @property
    def method(self) -> str:
        return self.drafter.method

    def save(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the directory completely or not at all; floating tensors are cast to `dtype`.

        Raises `UserError` if the disk is full or refuses it.
        """
        with whole_directory(directory) as aside:
            self.drafter.save(aside, self.fingerprint.name, dtype)
            write_json(aside / OWN_FILE, {**self.own_facts(dtype), "files": facts_of(aside)})

    def own_facts(self, dtype: torch.dtype) -> JsonObject:
        """Return the content of `draftsmith.json` without the checksums of the other files."""
        lender: EmbeddingAndHead | None = getattr(self.drafter, "embedding_and_head", None)
        return {
            "schema": SCHEMA,
            "method": self.method,
            "dtype": dtype_name(dtype),
            "taps": list(self.drafter.taps),
            "embedding_scale": None if lender is None else lender.scale,
            "target": self.fingerprint.as_dict(),
            "calibration": self.calibration,
            "provenance": self.provenance,
        }

    @classmethod
    def load(
        cls,
        directory: str | Path,
        target: Fingerprint,
        embedding_and_head: EmbeddingAndHead | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> Artifact:
        """Return the artifact in a directory, checked against the target it is to be used with.

        `embedding_and_head` are the target's; all methods but Medusa with heads of its own need
        them. Raises `UserError` for a missing or broken file, for a missing or surplus tensor or
        one of another shape or dtype, and for a target of other sizes, but for tokens added at the
        end if `embedding_and_head` allows them (`VocabularyMaps.resized`). A target of equal sizes
        but with other weights, tokenizer, template or numbers in its configuration is reported
        through `warn`.
        """
        directory = Path(directory)
        own_file = read_own_file(directory)
        trained_for, dtype = own_file.target, getattr(torch, own_file.dtype)
        if own_file.export is not None and own_file.export.layout != "native":
            raise UserError(
                f"{directory} is an export in the layout of {own_file.export.layout}; "
                f"read it with draftsmith import --from {directory}"
            )
        check_files(directory, own_file)
        drafter_type = drafter_class(own_file.method)
        added = check_target(trained_for, target, drafter_type, directory, warn, embedding_and_head)
        config_path = directory / "config.json"
        try:
            drafter = drafter_type.load(directory, dtype, embedding_and_head)
        except DocumentError as error:
            raise UserError(f"{config_path}: {error}; save or copy the drafter again") from error
        except CONFIG_ERRORS as error:
            if isinstance(error, UserError):  # a ValueError whose message is clear already
                raise
            raise UserError(
                f"{config_path} does not describe a drafter ({type(error).__name__}: "
                f"{first_line(error)}); save or copy the drafter again"
            ) from error
        if "vocab_size" in drafter_type.bound_to and trained_for.vocab_size != target.vocab_size:
            drafter = drafter.resized(target.vocab_size, added)
        drafter.eval().requires_grad_(False)
        return cls(drafter, trained_for, own_file.calibration, own_file.provenance)


def read_own_file(directory: Path) -> OwnFile:
    """Return a drafter's `draftsmith.json`.

    Raises `UserError` if it is missing or broken. For the folder of a training run the message
    names the drafter in it.
    """
    if not (directory / OWN_FILE).is_file():
        folders = (directory / name for name in ("best", "last"))
        drafters = [folder for folder in folders if (folder / OWN_FILE).is_file()]
        remedy = f"did you mean {drafters[0]}?" if drafters else "name the folder of a training run"
        raise UserError(f"{directory} is not a drafter: it has no {OWN_FILE}; {remedy}")
    return read_document(directory / OWN_FILE, OwnFile, "save or copy the drafter again")[0]


def check_files(directory: Path, own: OwnFile) -> None:
    """Raise `UserError` for the first file of a drafter that is not as it was written."""
    if not own.files:
        raise UserError(f"{directory}: {OWN_FILE} has no checksums; copy or save the drafter again")
    for name, facts in own.files.items():
        if (reason := differs(directory, name, OWN_FILE, facts.bytes, facts.sha256)) is not None:
            raise UserError(f"{directory}: {reason}; copy or save the drafter again")
    # An engine would read tensors or sizes from a file that draftsmith did not write.
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("config.json")]):
        if path.name not in own.files:
            raise UserError(
                f"{directory}: {path.name} is not among the files that were written; copy or save "
                "the drafter again"
            )


def check_target(
    trained_for: Fingerprint,
    target: Fingerprint,
    drafter_type: Any,
    directory: Path,
    warn: Callable[[str], None],
    lender: EmbeddingAndHead | None = None,
) -> list[int]:
    """Return the ids of tokens that the target has in addition, at the end of its vocabulary.

    `lender` are the target's embedding and head, which may allow such tokens: they go to `warn`, as
    do other differences. Raises `UserError` for tokens that are not allowed, and if a field that
    the drafter's class is bound to differs otherwise.
    """
    added: list[int] = []
    other_target = f"{directory} was trained for another target ({trained_for.name})"
    fields, sizes = drafter_type.bound_to, (trained_for.vocab_size, target.vocab_size)
    if lender is not None and "vocab_size" in fields and sizes[0] != sizes[1]:
        fields = tuple(name for name in fields if name != "vocab_size")
        ids = added_ids(lender.tokenizer, trained_for.tokenizer_hash)
        if ids is None or trained_for.errors_against(target, fields):
            fields = drafter_type.bound_to
        elif not drafter_type.resizable:
            clause = unknown_tokens(ids, *sizes)
            raise UserError(f"{directory}: {clause}; {drafter_type.other_remedy}")
        elif not lender.allow_added_tokens:
            raise UserError(
                f"{other_target}: {unknown_tokens(ids, *sizes)}; give {ADDED_TOKENS_OPTION} to "
                "draft without them"
            )
        else:
            added = ids
            warn(effect_of_unknown_tokens(ids, *sizes))
            trained_for = replace(trained_for, tokenizer_hash=target.tokenizer_hash)
    if errors := trained_for.errors_against(target, fields):
        raise UserError(
            f"{other_target}: {'; '.join(errors)}; use that target or train a drafter for this one"
        )
    for message in trained_for.warnings_against(target):
        warn(message)
    return added


def own_method(name: str) -> Any:
    """Return the `Method` of another package that `module:Class` names; None if it is not there.

    Only modules that are imported already are looked at: an artifact never chooses what code runs.
    """
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None) if attribute else None
    known = getattr(getattr(found, "drafter_class", None), "method", None) == name
    return found if known else None


def drafter_class(method: str) -> Any:
    """Return the class `Drafter` of the module `method`, or that of a method of another package.

    Raises `UserError` for an unknown method.
    """
    if (own := own_method(method)) is not None:
        return own.drafter_class
    if ":" in method:
        raise UserError(
            f"the drafter is of the method {method[:80]!r} of another package, whose code a folder "
            "does not name; name both, such as --drafter my_package.drafters:Mine:folder=FOLDER"
        )
    # A name with dots, from a damaged file, could import a module from anywhere.
    known = method.isidentifier() and importlib.util.find_spec(f".{method}", __package__)
    module = importlib.import_module(f".{method}", __package__) if known else None
    drafter = getattr(module, "Drafter", None)
    if drafter is None:  # other modules of this package define none
        raise UserError(
            f"unknown drafting method {method!r}; this version may be too old for that drafter"
        )
    return drafter
