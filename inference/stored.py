"""What a feature store knows of its target without holding it: both ends, tokenizer, fingerprint,
and held-out texts.

STORE/manifest.json         what the features are of, and how they lie in shards/
                            (train/data/store.py)
STORE/target/               config and tokenizer; ends.safetensors: embedding, head and final norm
STORE/held_out.safetensors  prompts with the target's own greedy replies, and their features
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from ..heads.documents import FileFacts, read_document
from ..heads.errors import UserError
from ..heads.files import differs
from ..heads.fingerprint import Fingerprint
from ..heads.pretrained import make_causal_lm, read_config, read_tokenizer
from .documents import Manifest
from .target import Hidden, Target, resolve_device

MANIFEST = "manifest.json"
EMBEDDING_AND_HEAD_FILE = "ends.safetensors"
TEXTS_FILE = "held_out.safetensors"
SAMPLE_FILE = "sample.safetensors"


@dataclass
class HeldOutText:
    """A prompt, the target's greedy reply, and the features of every position `[S, H]` on the
    CPU."""

    ids: list[int]
    start: int
    """Where the reply begins."""
    hidden: Hidden


class StoredTarget(Target):
    """A target of which only embedding, final norm and head are here; its decoder layers are shapes
    without numbers."""

    whole = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        fingerprint: Fingerprint,
        sizes: dict[int, float],
        sample: dict[str, Tensor] | None = None,
    ) -> None:
        """`sizes`: root mean square of the taps that are stored. `sample`: of those, what
        `tap_sample` gives, and its "ids"."""
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

    def forward(self, *arguments: Any, **more: Any) -> Hidden:
        raise UserError(
            f"this needs the whole target {self.name}; here are only its embedding, norm and head"
        )


def save_embedding_and_head(target: Target, folder: Path) -> None:
    """Write what `load_stored` reads: config, tokenizer, and the tensors of both ends."""
    folder.mkdir(parents=True, exist_ok=True)
    target.model.config.save_pretrained(folder)
    target.model.generation_config.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    wanted = [*target.model.get_input_embeddings().parameters(), *target.head_parameters]
    if (norm := target.final_norm()) is not None:
        wanted += norm.parameters()
    ours = {id(parameter) for parameter in wanted}
    tensors = {
        name: p.detach().cpu().contiguous()
        for name, p in target.model.named_parameters()
        if id(p) in ours
    }
    save_file(tensors, folder / EMBEDDING_AND_HEAD_FILE)


def manifest_of(store: str | Path) -> Manifest:
    """What `manifest.json` says; raises `UserError` where there is none."""
    return read_manifest(store)[0]


def read_manifest(store: str | Path) -> tuple[Manifest, dict[str, Any]]:
    """`manifest.json` as its type and as it is. Raises `UserError`."""
    if not Path(store, MANIFEST).is_file():
        raise UserError(
            f"{store} is not a feature store: it has no {MANIFEST}; write one with draftsmith "
            "data extract"
        )
    return read_document(Path(store, MANIFEST), Manifest, "extract again, into another folder")


def load_stored(store: str | Path, device: str = "auto") -> StoredTarget:
    """The ends of the store's target. Raises `UserError` if they are incomplete or have changed."""
    manifest, folder = manifest_of(store), Path(store, "target")
    for name in manifest.files:
        if name != TEXTS_FILE:
            verify_noted(Path(store), manifest, name)
    tensors = tensors_of(folder / EMBEDDING_AND_HEAD_FILE)
    model = model_of_embedding_and_head(
        folder, resolve_device(device), next(iter(tensors.values())).dtype, tensors.get
    )
    sizes = {int(tap): size for tap, size in manifest.tap_sizes.items()}
    sample = None
    if SAMPLE_FILE in manifest.files:  # stores of version 0.1 have none
        sample = tensors_of(Path(store, SAMPLE_FILE))
    return StoredTarget(model, read_tokenizer(folder), manifest.target, sizes, sample)


def model_of_embedding_and_head(
    folder: Path, device: torch.device, dtype: torch.dtype, read: Callable[[str], Tensor | None]
) -> Any:
    """The model of a folder with its embedding, final norm and head, and shapes for all else.
    `read` gives a tensor by name."""
    with torch.device("meta"):
        model: Any = make_causal_lm(read_config(folder), dtype=dtype)
    shell = Target(model, None, str(folder))
    norm = shell.final_norm()
    wanted = {id(p) for p in (*model.get_input_embeddings().parameters(), *shell.head_parameters)}
    wanted |= {id(p) for p in norm.parameters()} if norm is not None else set()
    embedding = model.get_input_embeddings()
    # in no file, such as the number that Gemma multiplies embeddings by
    if buffers := dict(embedding.named_buffers()):
        for name, buffer in buffers.items():
            setattr(embedding, name, torch.empty_like(buffer, device=device))
        model.init_weights()
    for name in [name for name, p in model.named_parameters() if id(p) in wanted]:
        if (tensor := read(name)) is not None:
            owner, _, own = name.rpartition(".")
            there = tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            setattr(model.get_submodule(owner), own, nn.Parameter(there, requires_grad=False))
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if any(
        p.is_meta
        for p in (
            *model.get_input_embeddings().parameters(),
            *model.get_output_embeddings().parameters(),
        )
    ):
        raise UserError(
            f"{folder} lacks the embedding or the head, or has them in a form that is not read here"
        )
    return model


def verify_noted(store: Path, manifest: Manifest, name: str) -> None:
    """Demand that a file that the manifest names is what was written. Raises `UserError`."""
    facts = manifest.files.get(name)
    if facts is None:
        raise UserError(f"{store / MANIFEST} names no {name}; extract again, into another folder")
    size, sha256 = (facts.bytes, facts.sha256) if isinstance(facts, FileFacts) else (None, facts)
    if (reason := differs(store, name, MANIFEST, size, sha256)) is not None:
        raise UserError(
            f"{store}: {reason}; run the same draftsmith data extract again, which writes it anew"
        )


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of a store. Raises `UserError`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); extract again, into another folder"
        ) from error


def save_texts(
    texts: Sequence[HeldOutText], taps: tuple[int, ...], dtype: torch.dtype, path: Path
) -> None:
    """Write held-out texts with their features, in the order given."""
    tensors: dict[str, Tensor] = {
        "lengths": torch.tensor([len(text.ids) for text in texts]),
        "starts": torch.tensor([text.start for text in texts]),
        "ids": torch.tensor([i for text in texts for i in text.ids]),
        "last": torch.cat([text.hidden.last for text in texts]).to(dtype),
    }
    for place, tap in enumerate(taps):
        tensors[f"tap{tap}"] = torch.cat([text.hidden.taps[place] for text in texts]).to(dtype)
    save_file(tensors, path)


def load_texts(store: str | Path, wanted: tuple[int, ...] | None = None) -> list[HeldOutText]:
    """The held-out texts of a store, with the taps `wanted`, or all that there are."""
    manifest, path = manifest_of(store), Path(store, TEXTS_FILE)
    verify_noted(Path(store), manifest, TEXTS_FILE)
    tensors = tensors_of(path)
    try:
        lengths = tensors["lengths"].tolist()
        split = {
            name: tensor.split(lengths)
            for name, tensor in tensors.items()
            if name not in ("lengths", "starts")
        }
        taps = [split[f"tap{tap}"] for tap in (manifest.taps if wanted is None else wanted)]
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{path} does not hold the texts that {MANIFEST} tells of ({error}); extract again"
        ) from error
    return [
        HeldOutText(
            split["ids"][i].tolist(), start, Hidden(split["last"][i], tuple(tap[i] for tap in taps))
        )
        for i, start in enumerate(tensors["starts"].tolist())
    ]
