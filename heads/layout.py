"""Drafter modules, and saving and loading of those that consist of a `config.json` and one file.

Keys and tensors have the names that engines read. Loading demands exactly the expected tensors,
each with its name, shape and dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .documents import convert
from .errors import UserError
from .files import JsonObject, read_json, write_json
from .stored_tensors import header


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: bfloat16."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def place(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a drafter to a device and cast its parameters; buffers keep their dtype.

    In bfloat16 a draft model's rotary frequencies, which are buffers, would be other positions.
    """
    module.to(device)
    for parameter in module.parameters():
        # Not `module.to(dtype)`, which casts floating buffers too.
        parameter.data = parameter.data.to(dtype)


Head = Callable[[Tensor], Tensor]
"""Function from states `[..., Ht]` after the final norm to logits."""


@dataclass(frozen=True)
class EmbeddingAndHead:
    """The frozen target's embedding and head, with its vocabulary.

    They are not parameters of the drafter that borrows them and are not stored with it.
    """

    embed: Callable[[Tensor], Tensor]
    """Function from token ids `[...]` to the target's embeddings `[..., Ht]`."""
    head: Head
    """The target's head, whose logits are `[..., V]`."""
    vocab_size: int = 0
    """Number of tokens in the target's vocabulary, V."""
    tokenizer: Any = None
    """The target's tokenizer; None for a target without one."""
    scale: float = 1.0
    """Factor by which `embed` multiplies the rows of the embedding matrix."""
    part: Callable[[Tensor], Head] | None = None
    """Function from token ids `[Vd]` to a head that computes their logits alone; None: the whole
    head is computed, and the rest left out."""

    allow_added_tokens: bool = False
    """True if drafters may lack tokens at the end of the vocabulary (`VocabularyMaps.resized`)."""

    def head_of(self, ids: Tensor) -> Head:
        """Return a function from states `[..., Ht]` to the logits `[..., Vd]` of `ids` `[Vd]`."""
        if self.part is not None:
            return self.part(ids)
        return lambda last: self.head(last)[..., ids]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the unscaled rows `[..., Ht]` of the embedding matrix for token ids `[...]`.

        Serving engines pass these rows to block drafters, so that training has to use them too.
        """
        embedded = self.embed(ids)
        return embedded if self.scale == 1 else embedded / self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same object: a copy of a drafter borrows from the same target."""
        return self


def usual_scale(model_type: str, hidden_size: int) -> float:
    """Return the factor of a target's embedding by its family, where it cannot be measured.

    That is for targets that are not loaded. Of transformers' causal language models, those of
    Gemma's families have an embedding that multiplies; others multiply afterwards or not at all.
    """
    return float(hidden_size) ** 0.5 if model_type.startswith("gemma") else 1.0


class DrafterModule(ABC):
    """Base of drafters' modules: facts about the drafter, and its files."""

    method: str
    """Module of its method in `heads`; of a drafter of another package, its `Method` as
    `module:Class`."""
    taps: tuple[int, ...] = ()
    kind: str
    """Kind of drafter by the names of engines: the method, or a version of it."""
    whole_model = False
    """True if its folder is a Hugging Face model, which may be a target itself."""
    drafts_by_level = False
    """True if each level of drafts takes a pass of the drafter, false if it makes all at once."""
    drafts_in_turn = False
    """True if its drafts of one pass are chosen in turn, each by the one before."""
    rows_of_pass = 1
    """Rows of a pass that makes all drafts at once."""
    borrows_head: bool = False
    """True if the target's head makes the logits of drafts."""
    head_in_exports: bool = False
    """True if engines need a copy of the head that it borrows in its files."""
    importable: bool = False
    """True if `exchange.public` reads its files, so that an export is read back from them alone."""
    not_exported: str | None = None
    """Why no engine takes it as a folder, with a remedy; None if engines do."""
    most_drafts: int | None = None
    """Levels of drafts that the drafter has; None: any number."""
    bound_to: tuple[str, ...] = ("hidden_size", "vocab_size", "num_layers")
    """Fields of the fingerprint in which a target has to equal the one of the training."""
    resizable: bool = False
    """True if it can draft for a target with more tokens at the end (`VocabularyMaps.resized`)."""
    other_remedy = "train the drafter again for this target"
    """Remedy for such a target, if the drafter cannot be widened."""

    weights_file: str = "model.safetensors"
    """Name of the safetensors file."""
    document: type = dict
    """Type in `documents` that `config.json` has to fit."""

    def bytes_read(self, levels: int) -> tuple[float, float]:
        """Return the bytes of its own matrices that are read to draft `levels` levels.

        The second number is how often the head that it borrows is read.
        """
        passes = levels if self.drafts_by_level else 1
        return passes * linear_bytes(self), passes * self.borrows_head

    @abstractmethod
    def facts(self) -> JsonObject:
        """Return, as JSON, all that decides what the module computes, except for the tensors."""

    # Saving and loading by a description of the files. A drafter that no engine reads has only
    # `facts`: the arguments of its class after the target's `embedding_and_head`, which are its
    # `config.json` too.

    def serving_state(self) -> dict[str, Tensor]:
        """Return this module's tensors under their names on disk.

        They are views of its parameters and buffers, so that loading can fill them.
        """
        assert isinstance(self, nn.Module)
        return self.state_dict()

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        """Return the content of `config.json`; `dtype` is the floating type of the tensors."""
        return self.facts()

    @classmethod
    def from_serving_config(
        cls, config: JsonObject, embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        """Return an untrained module of the sizes in the content of a `config.json`.

        Raises `UserError` if the module needs `embedding_and_head` and they are None, `KeyError`
        if a key is missing.
        """
        make: Any = cls
        return make(embedding_and_head, **config)

    def for_export(self, vocab_size: int) -> Self:
        """Return this drafter as engines need it for a target with `vocab_size` rows of embedding.

        Raises `UserError` if this is impossible.
        """
        return self

    def check(self) -> None:  # noqa: B027  # most have nothing to check
        """Raise `UserError` if the loaded tensors contradict each other."""

    def save(self, directory: Path, target_name: str, dtype: torch.dtype) -> None:
        """Write the files that engines read; floating tensors are cast to `dtype`."""
        write_json(directory / "config.json", self.serving_config(target_name, dtype_name(dtype)))
        save_file(
            self.stored_state(dtype), directory / self.weights_file, metadata={"format": "pt"}
        )

    def stored_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return copies of the tensors under their names on disk, floating ones as `dtype`.

        safetensors refuses tensors that share memory, as the views of one matrix do.
        """
        tensors = {}
        for name, tensor in self.serving_state().items():
            stored = tensor.detach().to("cpu", stored_as(tensor, dtype))
            tensors[name] = stored.contiguous().clone()
        return tensors

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        """Return the drafter in a directory, with its tensors, which have to be of type `dtype`.

        Raises `UserError`, or an error of `artifact.CONFIG_ERRORS` for a config that does not
        describe a drafter.
        """
        path = directory / cls.weights_file
        config = read_json(directory / "config.json")
        convert(config, cls.document)
        shapes = {name: tuple(facts.shape) for name, facts in header(path).items()}
        drafter = cls.of_shapes(config, embedding_and_head, shapes, path)
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot read {path}: {error}; the drafter is incomplete, copy or save it again"
            ) from error
        fill_from(stored, drafter.serving_state(), path, dtype)
        drafter.check()
        return drafter

    @classmethod
    def of_shapes(
        cls,
        config: JsonObject,
        embedding_and_head: EmbeddingAndHead | None,
        shapes: Mapping[str, tuple[int, ...]],
        path: Path,
    ) -> Self:
        """Return an untrained drafter whose tensors on disk have the `shapes` in the file `path`.

        Raises as `from_serving_config`, and `UserError` where the config describes other tensors.
        """
        # A damaged size must not be allocated: the shapes are compared while the module takes no
        # memory, and the module is then built once more.
        with torch.device("meta"):
            expected = cls.from_serving_config(config, embedding_and_head).serving_state()
        check_same(expected, shapes, path)
        return cls.from_serving_config(config, embedding_and_head)


def linear_bytes(module: Any) -> int:
    return sum(part.weight.nbytes for part in module.modules() if isinstance(part, nn.Linear))


def stored_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is stored: `dtype`, or its own for a vocabulary map."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def check_same(
    expected: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Raise `UserError` unless the `shapes` in the file `path` are those of `expected`, by name."""
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of this drafter" for name in shapes if name not in expected]
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != tuple(expected[name].shape):
            problems.append(
                f"{name} has shape {list(shapes[name])}, expected {list(expected[name].shape)}"
            )
    refuse(problems, path)


def refuse(problems: list[str], path: Path) -> None:
    """Raise `UserError` with the first three problems of the file `path`, if there are any."""
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"{path} does not fit its config: {'; '.join(sorted(problems)[:3])}{more}")


@torch.no_grad()
def fill_from(
    stored: Mapping[str, Tensor], expected: dict[str, Tensor], path: Path, dtype: torch.dtype
) -> None:
    """Copy the tensors `stored`, read from `path`, into `expected`; `check_same` has compared them.

    Raises `UserError` if floating tensors are not of type `dtype`, which need not be that of
    `expected`, or others not of their own.
    """
    problems = []
    for name, tensor in expected.items():
        wanted = stored_as(tensor, dtype)
        if stored[name].dtype != wanted:
            problems.append(f"{name} is {stored[name].dtype}, expected {wanted}")
    refuse(problems, path)
    for name, tensor in expected.items():
        # In place: `expected` are views of the module's weights, which are filled by it.
        tensor.copy_(stored[name])
