"""Fingerprints by which a target is recognised, so that no drafter is silently used with another.

A fingerprint has the target's sizes and hashes of its tokenizer, its chat template and a sample of
its weights (docs/checkpoint-formats.md#artifact).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .files import JsonObject

SAMPLES_PER_TENSOR = 32
LARGEST_EXACT = 1 << 24  # float32 represents all integers up to here


@dataclass(frozen=True)
class Fingerprint:
    """Facts about a target that its drafters and feature stores note."""

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_hash: str
    """Hash of every (token, id) pair; empty for a target without a tokenizer."""
    template_hash: str
    """Hash of the chat template; empty for a target without a tokenizer."""
    weights_hash: str
    """Hash of a sample of every parameter, see `weights_hash`."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        weights: str | None = None,
    ) -> Fingerprint:
        """Return the fingerprint of a target.

        `weights` is the hash of its weights, for a model of which this process does not hold all.
        """
        config: Any = model.config
        # A model of text and images keeps the sizes of its text part in a config of its own.
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        template_hash = ""
        if tokenizer is not None:
            template_hash = _digest(str(getattr(tokenizer, "chat_template", None)))
        return cls(
            name=name,
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            tokenizer_hash=tokenizer_hash(tokenizer),
            template_hash=template_hash,
            weights_hash=weights or weights_hash(model),
        )

    def as_dict(self) -> JsonObject:
        return asdict(self)

    def errors_against(self, target: Fingerprint, fields: tuple[str, ...]) -> list[str]:
        """Return a sentence for each of `fields` in which `target` differs.

        A drafter that was trained for `self` cannot be used with such a target.
        """
        errors = []
        for field in fields:
            trained, given = getattr(self, field), getattr(target, field)
            if trained != given:
                errors.append(f"{field} is {trained} in the drafter and {given} in the target")
        return errors

    def warnings_against(self, target: Fingerprint) -> list[str]:
        """Return a sentence about hashes in which `target` differs, in a list; none if none does.

        Decoding stays lossless with such a target, but fewer drafts are probably accepted.
        """
        descriptions = {
            "tokenizer_hash": "tokenizer",
            "template_hash": "chat template",
            "weights_hash": "weights",
        }
        different = []
        for field, text in descriptions.items():
            if getattr(self, field) != getattr(target, field):
                different.append(text)
        if not different:
            return []
        return [
            f"drafter was trained for {self.name!r}; {target.name!r} differs in "
            f"{' and '.join(different)}"
        ]


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hash of every (token, id) pair, added and special tokens included.

    It is empty for a target without a tokenizer.
    """
    if tokenizer is None:
        return ""
    # Ordered by id, then by token: the order of the dictionary is not the same in every process.
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return _digest(json.dumps(pairs))


def weights_hash(model: nn.Module) -> str:
    """Return the hash of some elements of every parameter of a model.

    They are rounded to bfloat16, so that the type in which the model was loaded does not matter.
    """
    parameters = dict(model.named_parameters())
    return hash_of(parameters, parameters.get)


def hash_of(names: Iterable[str], read: Callable[[str], torch.Tensor | None]) -> str:
    """Return `weights_hash` of the parameters `names`, which `read` gives, for example from files.

    Parameters for which `read` gives None (they are quantised in the files, or are fused when a
    model is loaded) are left out, and the hash is then not the loaded model's.
    """
    digest = hashlib.sha256()
    # Sorted, because the order of a model's modules may change with the version of transformers.
    for name in sorted(names):
        tensor = read(name)
        for plain in [] if tensor is None else _plain(tensor):
            if plain.numel():
                # `reshape` and not `view`: a parameter may be a transposed view.
                flat = plain.detach().reshape(-1)
                index = torch.tensor(sampled_places(flat.numel()), device=flat.device)
                # numpy has no bfloat16, so the same bits are read as int16.
                sample = (
                    flat[index].to("cpu", torch.bfloat16).view(torch.int16)
                    if flat.is_floating_point()
                    else flat[index].cpu()
                )
                digest.update(name.encode())
                digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def sampled_places(size: int) -> list[int]:
    """Return the indices of the elements that stand for a tensor of `size` elements.

    They are at most `SAMPLES_PER_TENSOR`, ascending and evenly spread. Beyond 2^24 elements they
    are exact integers. Up to there they are what float32 arithmetic gives (each index computed from
    the nearer end and rounded once), because every fingerprint stored so far was made so. The
    arithmetic is written out here, in doubles: `torch.linspace` gives other numbers on other
    processors, and indices outside of the tensor beyond 2^24.
    """
    count, last = min(SAMPLES_PER_TENSOR, size), size - 1
    if size > LARGEST_EXACT:
        # Python's integers: exact at any size.
        return [i * last // (count - 1) for i in range(count)]
    step = float(np.float32(last) / np.float32(max(count - 1, 1)))
    indices = []
    for i in range(count):
        from_start, from_end = step * i, last - step * (count - 1 - i)
        index = from_start if i < count // 2 else from_end
        indices.append(int(np.float32(index)))
    return indices


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of, at any depth.

    A quantised weight is a tensor made of tensors, such as codes and scales, and cannot be indexed
    itself. Any other tensor consists of itself.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    composite: Any = tensor
    inner_names = composite.__tensor_flatten__()[0]
    plain_tensors = []
    for name in inner_names:
        plain_tensors += _plain(getattr(composite, name))
    return plain_tensors


def _digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
