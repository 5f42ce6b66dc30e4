"""The target of a feature store: embedding, final norm and head, but no decoder layers.

STORE/manifest.json         target, data and layout of the features in shards/, which
                            train/data/store.py reads
STORE/target/               config and tokenizer; ends.safetensors: embedding, head and final norm
STORE/held_out.safetensors  prompts with the target's own greedy replies, and their features
STORE/sample.safetensors    taps of a sample of the data, and the sample's tokens

All keys are in docs/checkpoint-formats.md#feature-store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from ...heads.documents import Document, FileFacts, Tap, demand, read_document
from ...heads.errors import UserError
from ...heads.files import JsonObject, differs
from ...heads.fingerprint import Fingerprint, hash_of
from ...heads.pretrained import as_user_errors, make_causal_lm, read_config, read_tokenizer
from ..rounds.outcome import Hidden
from .model_head import ModelHead
from .target import TargetSource, resolve_device, resolve_dtype
from .target_files import check_target_exists

MANIFEST = "manifest.json"
EMBEDDING_AND_HEAD_FILE = "ends.safetensors"
TEXTS_FILE = "held_out.safetensors"
SAMPLE_FILE = "sample.safetensors"
S = TypeVar("S", bound="StoredTarget")

CPU = torch.device("cpu")


class StoreLayout(Struct):
    """Layout of the features in the shards of a feature store, see `train/data/store.py`."""

    taps: list[Tap]
    all_last: bool
    dtype: Literal["float32", "bfloat16", "fp8"]
    rows_per_shard: Annotated[int, Meta(ge=1, le=1 << 30)]
    ring: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None


class Manifest(Document):
    """The file `manifest.json` of a feature store (docs/checkpoint-formats.md#feature-store)."""

    what: ClassVar[str] = "the manifest of a feature store"

    target: Fingerprint
    layout: StoreLayout
    taps: list[Tap]
    max_length: Annotated[int, Meta(ge=2)]
    seed: int
    tables: str
    """Key of the store's data, see `train/data/tables.py`."""
    tap_sizes: dict[str, Annotated[float, Meta(ge=0)]]
    """Root mean square of each tap, by its index."""
    files: dict[str, FileFacts]
    """Size and SHA-256 of the store's files by name. Shards and data have notes of their own."""
    held_out: dict[str, float] = msgspec.field(default_factory=dict)
    """`evaluation.prompts` and `evaluation.max_new_tokens` of the extraction."""
    schema: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        layers = self.target.num_layers
        demand(self.taps == self.layout.taps, "taps and layout.taps differ")
        demand(
            set(self.tap_sizes) == set(map(str, self.taps)),
            f"tap_sizes is of {sorted(self.tap_sizes)}, taps {self.taps}",
        )
        demand(
            all(tap <= layers for tap in self.taps),
            f"a tap of {self.taps} is beyond the target's {layers} layers",
        )


@dataclass
class HeldOutPrompt:
    """Prompt that a drafter is judged by."""

    token_ids: list[int]
    unit: int
    """Number of its conversation or prompt, the observation of an interval."""


@dataclass
class HeldOutText:
    """Prompt with the target's greedy reply, and its features."""

    ids: list[int]
    """Tokens of the prompt, then of the reply."""
    start: int
    """Position at which the reply begins."""
    hidden: Hidden
    """Features of all positions `[S, H]`, on the CPU."""
    unit: int
    """That of the prompt."""


class StoredTarget(TargetSource):
    """Target with embedding, final norm and head; its decoder layers have shapes only."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        fingerprint: Fingerprint,
        sizes: dict[int, float],
        sample: dict[str, Tensor] | None = None,
    ) -> None:
        """Wrap `model`, of which only embedding, final norm and head hold numbers.

        `sizes` are the root mean squares of the stored taps. `sample` holds a text under "ids", and
        its taps `[S, H]` under their numbers, for `tap_sample`.
        """
        super().__init__(model, tokenizer, fingerprint.name)
        self._fingerprint, self._sizes, self._sample = fingerprint, sizes, sample

    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        if missing := sorted(set(taps) - set(self._sizes)):
            raise UserError(
                f"the feature store has taps {sorted(self._sizes)}, not {missing}; extract again "
                "with this run's config"
            )
        return tuple(self._sizes[tap] for tap in taps)

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        self.tap_sizes(taps)
        if self._sample is None or self._sample["ids"].tolist() != ids:
            raise UserError(
                "the feature store has no sample of this run's data; extract again, into another "
                "folder"
            )
        return tuple(self._sample[str(tap)].to(self.device) for tap in taps)


def save_embedding_and_head(target: TargetSource, folder: Path) -> None:
    """Write config, tokenizer, embedding, final norm and head of `target`, for `load_stored`."""
    folder.mkdir(parents=True, exist_ok=True)
    target.model.config.save_pretrained(folder)
    target.model.generation_config.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    names, parameters = _names_in(target), dict(target.model.named_parameters())
    tensors = {name: parameters[name].detach().cpu().contiguous() for name in names}
    save_file(tensors, folder / EMBEDDING_AND_HEAD_FILE)


def _names_in(target: ModelHead) -> list[str]:
    """Return the names of the parameters of embedding, final norm and head."""
    # By identity: names differ between architectures, and a tied head has no name of its own.
    parts = (target.model.get_input_embeddings(), target.final_norm() or nn.Identity())
    wanted = {id(parameter) for part in parts for parameter in part.parameters()}
    wanted |= {id(parameter) for parameter in target.head_parameters}
    return [name for name, p in target.model.named_parameters() if id(p) in wanted]


def manifest_of(store: str | Path) -> Manifest:
    """Return the manifest of a store. Raises `UserError` if it is missing or damaged."""
    return read_manifest(store)[0]


def read_manifest(store: str | Path) -> tuple[Manifest, JsonObject]:
    """Return the manifest of a store, and its JSON with all keys. Raises `UserError`."""
    if not Path(store, MANIFEST).is_file():
        raise UserError(
            f"{store} is not a feature store: it has no {MANIFEST}; write one with draftsmith "
            "data extract"
        )
    return read_document(Path(store, MANIFEST), Manifest, "extract again, into another folder")


def load_stored(store: str | Path, device: str = "auto") -> StoredTarget:
    """Return the target of a store. Raises `UserError` if files are missing or have changed."""
    manifest, folder = manifest_of(store), Path(store, "target")
    for name in manifest.files:
        if name != TEXTS_FILE:  # `load_texts` checks that one
            verify_noted(Path(store), manifest, name)
    tensors = tensors_of(folder / EMBEDDING_AND_HEAD_FILE)
    model = model_of_embedding_and_head(
        folder, resolve_device(device), next(iter(tensors.values())).dtype, tensors.get
    )
    sizes = {int(tap): size for tap, size in manifest.tap_sizes.items()}
    sample = tensors_of(Path(store, SAMPLE_FILE))
    return StoredTarget(model, read_tokenizer(folder), manifest.target, sizes, sample)


def model_of_embedding_and_head(
    folder: Path, device: torch.device, dtype: torch.dtype, read: Callable[[str], Tensor | None]
) -> Any:
    """Return the model of a folder with only its embedding, final norm and head loaded.

    `read` returns a parameter by name, None if it is missing. All other parameters stay on the meta
    device. Raises `UserError` if the embedding or the head is missing.
    """
    with torch.device("meta"):
        model: Any = make_causal_lm(read_config(folder), dtype=dtype)
    wanted = _names_in(ModelHead(model, None, str(folder)))
    embedding = model.get_input_embeddings()
    # Buffers are in no file: Gemma's embedding has one, the factor of its rows. They are computed
    # when the model is initialised.
    if buffers := dict(embedding.named_buffers()):
        for name, buffer in buffers.items():
            setattr(embedding, name, torch.empty_like(buffer, device=device))
        model.init_weights()
    for name in wanted:
        if (tensor := read(name)) is not None:
            owner, _, attribute = name.rpartition(".")
            weight = tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            parameter = nn.Parameter(weight, requires_grad=False)
            setattr(model.get_submodule(owner), attribute, parameter)
    # A tied head has no tensor of its own in the files.
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    # What no file held is still on the meta device.
    if any(weight.is_meta for end in ends for weight in end.parameters()):
        raise UserError(
            f"{folder} lacks the embedding or the head, or has them in a form that is not read here"
        )
    return model


def embedding_and_head_in(
    path: str, kind: type[S], device: torch.device = CPU, dtype: str = "auto"
) -> S:
    """Load embedding, final norm and head of the model in a folder, or of that name on the hub.

    `kind` is the class of what is returned. `dtype` "auto" takes the stored one on a GPU. Raises
    `UserError` for a model without safetensors files.
    """
    check_target_exists(path)
    folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path))
    names, read = tensors_in(folder)
    if not names:
        raise UserError(
            f"{folder} holds no safetensors files to take the embedding and the head from"
        )
    weights_dtype = resolve_dtype(dtype, device)
    if not isinstance(weights_dtype, torch.dtype):  # "auto"
        stored = (tensor for tensor in map(read, names) if tensor is not None)
        weights_dtype = next(tensor.dtype for tensor in stored if tensor.is_floating_point())
    with as_user_errors(path):
        model = model_of_embedding_and_head(folder, device, weights_dtype, read)
        tokenizer = read_tokenizer(folder)
    digest = hash_of([name for name, _ in model.named_parameters()], read)
    return kind(model, tokenizer, Fingerprint.of(model, tokenizer, path, digest), {})


def tensors_in(folder: Path) -> tuple[list[str], Callable[[str], Tensor | None]]:
    """Return the names of the tensors in a folder's safetensors files, and what reads one by name.

    It gives None for a name that no file has. Files are mapped: only what is looked at is read.
    Raises `UserError` for a damaged file.
    """
    file_with: dict[str, Any] = {}  # the opened file of each tensor
    for file in sorted(folder.glob("*.safetensors")):
        try:
            opened: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {file}: {error}; copy or download it again") from error
        file_with |= dict.fromkeys(opened.keys(), opened)

    def read(name: str) -> Tensor | None:
        # In checkpoints of multimodal models the language model's names have another prefix, whose
        # parts are in the older order in some.
        newer = re.sub(r"^model\.(?!language_model\.)", "model.language_model.", name)
        older = newer.replace("model.language_model.", "language_model.model.", 1)
        for stored in (name, newer, older):
            if stored in file_with:
                return file_with[stored].get_tensor(stored)
        return None

    return list(file_with), read


def verify_noted(store: Path, manifest: Manifest, name: str) -> None:
    """Raise `UserError` unless a file is what the manifest notes of it."""
    facts = manifest.files.get(name)
    if facts is None:
        raise UserError(f"{store / MANIFEST} names no {name}; extract again, into another folder")
    if (reason := differs(store, name, MANIFEST, facts.bytes, facts.sha256)) is not None:
        raise UserError(
            f"{store}: {reason}; run the same draftsmith data extract again, which writes it again"
        )


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of a store, by name. Raises `UserError`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); extract again, into another folder"
        ) from error


def save_texts(
    texts: Sequence[HeldOutText], taps: tuple[int, ...], dtype: torch.dtype, path: Path
) -> None:
    """Write held-out texts and the taps `taps` of their features, end to end in each tensor."""
    tensors: dict[str, Tensor] = {
        "lengths": torch.tensor([len(text.ids) for text in texts]),
        "starts": torch.tensor([text.start for text in texts]),
        "units": torch.tensor([text.unit for text in texts]),
        "ids": torch.tensor([i for text in texts for i in text.ids]),
        "last": torch.cat([text.hidden.last for text in texts]).to(dtype),
    }
    for index, tap in enumerate(taps):
        tensors[f"tap{tap}"] = torch.cat([text.hidden.taps[index] for text in texts]).to(dtype)
    save_file(tensors, path)


def load_texts(store: str | Path, wanted: tuple[int, ...] | None = None) -> list[HeldOutText]:
    """Return a store's held-out texts, with the taps `wanted` or all. Raises `UserError`."""
    manifest, path = manifest_of(store), Path(store, TEXTS_FILE)
    verify_noted(Path(store), manifest, TEXTS_FILE)
    tensors = tensors_of(path)
    try:
        lengths = tensors["lengths"].tolist()
        whole = {"lengths", "starts", "units"}
        split = {name: tensors[name].split(lengths) for name in tensors.keys() - whole}
        starts, units = tensors["starts"].tolist(), tensors["units"].tolist()
        taps = [split[f"tap{tap}"] for tap in (manifest.taps if wanted is None else wanted)]
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{path} does not hold the texts that {MANIFEST} tells of ({error}); extract again"
        ) from error
    texts = []
    for i, (start, unit) in enumerate(zip(starts, units, strict=True)):
        hidden = Hidden(split["last"][i], tuple(tap[i] for tap in taps))
        texts.append(HeldOutText(split["ids"][i].tolist(), start, hidden, unit))
    return texts
