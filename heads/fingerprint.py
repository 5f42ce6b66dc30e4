"""Which target is this? Shapes, tokenizer and sampled weights, so that a drafter is never silently
used on another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

SAMPLES_PER_TENSOR = 32
LARGEST_EXACT = 1 << 24  # float32 counts no further without gaps


@dataclass(frozen=True)
class Fingerprint:
    """What a drafter remembers of the target that it was trained for."""

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_hash: str
    template_hash: str
    weights_hash: str

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer: Any, name: str, weights: str | None = None
    ) -> Fingerprint:
        """`weights`: their hash, where the model no longer has them whole."""
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(
            name=name,
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            tokenizer_hash=tokenizer_hash(tokenizer),
            template_hash=_digest(str(getattr(tokenizer, "chat_template", None)))
            if tokenizer is not None
            else "",
            weights_hash=weights or weights_hash(model),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def errors_against(self, target: Fingerprint, fields: tuple[str, ...]) -> list[str]:
        """Differences in `fields` make a drafter of `self` unusable with `target`."""
        return [
            f"{field} is {getattr(self, field)} in the drafter and {getattr(target, field)} in "
            "the target"
            for field in fields
            if getattr(self, field) != getattr(target, field)
        ]

    def warnings_against(self, target: Fingerprint) -> list[str]:
        """Differences that leave decoding lossless but probably cost acceptance."""
        what = {
            "tokenizer_hash": "tokenizer",
            "template_hash": "chat template",
            "weights_hash": "weights",
        }
        different = [
            text for field, text in what.items() if getattr(self, field) != getattr(target, field)
        ]
        if not different:
            return []
        return [
            f"drafter was trained for {self.name!r}; {target.name!r} differs in "
            f"{' and '.join(different)}"
        ]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of every (token, id) pair, added and special tokens included; empty for a target without
    a tokenizer."""
    if tokenizer is None:
        return ""
    return _digest(
        json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))
    )


def weights_hash(model: nn.Module) -> str:
    """Hash of some elements of every parameter, rounded to bf16 so that the dtype it was loaded in
    does not matter."""
    parameters = dict(model.named_parameters())
    return hash_of(parameters, parameters.get)


def hash_of(names: Iterable[str], read: Callable[[str], torch.Tensor | None]) -> str:
    """`weights_hash` of parameters `names` that `read` gives, such as from files; those that it
    does not have (quantised there, or fused on loading) are left out, which makes it another hash
    than the loaded model's."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = read(name)
        for plain in [] if tensor is None else _plain(tensor):
            if plain.numel():
                flat = plain.detach().reshape(-1)
                index = torch.tensor(sampled_places(flat.numel()), device=flat.device)
                some = (
                    flat[index].to("cpu", torch.bfloat16).view(torch.int16)
                    if flat.is_floating_point()
                    else flat[index].cpu()
                )
                digest.update(name.encode())
                digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


def sampled_places(size: int) -> list[int]:
    """Indices of the elements that stand for a tensor of `size`: at most `SAMPLES_PER_TENSOR`,
    ascending, evenly spread.

    Beyond 2^24 elements they are exact integers. Up to there they are what float32 arithmetic gives
    (each index computed from the nearer end and rounded once), because every fingerprint stored so
    far was made so. The arithmetic is written out here, in doubles: `torch.linspace` gives other
    numbers on other processors, and leaves the tensor beyond 2^24.
    """
    count, last = min(SAMPLES_PER_TENSOR, size), size - 1
    if size > LARGEST_EXACT:
        return [i * last // (count - 1) for i in range(count)]
    step = float(np.float32(last) / np.float32(max(count - 1, 1)))
    places = [step * i if i < count // 2 else last - step * (count - 1 - i) for i in range(count)]
    return [int(np.float32(place)) for place in places]


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A quantised weight is a tensor made of tensors, such as codes and scales, which can be
    sampled though it cannot."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    parts: Any = tensor
    return [
        plain for name in parts.__tensor_flatten__()[0] for plain in _plain(getattr(parts, name))
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
