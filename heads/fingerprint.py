"""Fingerprints by which a target is recognised, so that no drafter is silently used with another.

A fingerprint has the target's sizes, hashes of its tokenizer, its chat template and a sample of its
weights, and the values of its configuration that change what the same weights compute
(docs/checkpoint-formats.md#artifact).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLES_PER_TENSOR = 32
LARGEST_EXACT = 1 << 24  # float32 represents all integers up to here
# Keys of a text configuration that change the output of the same weights: rotary positions, eps of
# norms, soft caps, scales and multipliers, windows, activations, and how experts are chosen.
NUMBERS = re.compile(
    r"rope|rotary|(^|_)eps(_|$)|epsilon|soft_?cap|logits?_cap|scal(e|ing|ar)(_|$)|multipliers?$"
    r"|window|sliding|attention_chunk_size|layer_types|no_rope|(^|_)act(_|$)|activation(_function)?$|clip_qkv"
    r"|qk_norm|swiglu|temperature_tuning|experts_per_tok|top_?k_experts|moe_top_?k|norm_topk|topk_method"
    r"|(^|_)n_group$|topk_group|scoring_func"
)
TRAINING_ONLY = re.compile(r"init|dropout|loss|jitter|noise|mtp|summary|vision|audio")
# Rotary parameters that some versions of transformers write at their default values.
OPTIONAL_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
SHOWN = 3  # values that a message names
PARTIAL = "part:"
"""Beginning of the hash of weights some of which could not be read, see `hash_of`."""


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
    numbers: dict[str, Any] = field(default_factory=dict)
    """Values of the text configuration that change the output, see `output_settings`."""

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer: Any, name: str, weights: str | None = None
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
            numbers=output_settings(config),
        )

    def as_dict(self) -> JsonObject:
        return asdict(self)

    def errors_against(self, target: Fingerprint, fields: tuple[str, ...]) -> list[str]:
        """Return a sentence for each of `fields` that differs: such a target is refused."""
        return [
            f"{name} is {trained} in the drafter and {given} in the target"
            for name in fields
            if (trained := getattr(self, name)) != (given := getattr(target, name))
        ]

    def other_weights(self, target: Fingerprint) -> bool:
        """Return true if the weights are not those of `target`, as far as their hashes tell.

        Hashes of all weights and of a part of them cannot be compared.
        """
        one, other = self.weights_hash, target.weights_hash
        return one != other and one.startswith(PARTIAL) == other.startswith(PARTIAL)

    def warnings_against(self, target: Fingerprint) -> list[str]:
        """Return a list of one sentence about hashes and numbers that differ, or an empty list.

        Decoding stays lossless with such a target, but fewer drafts are probably accepted.
        """
        descriptions = {
            "tokenizer_hash": "tokenizer",
            "template_hash": "chat template",
            "weights_hash": "weights",
        }
        different = [
            text
            for name, text in descriptions.items()
            if getattr(self, name) != getattr(target, name)
            and (name != "weights_hash" or self.other_weights(target))
        ]
        if changes := changed_numbers(self.numbers, target.numbers):
            different.append(f"its configuration ({changes})")
        if not different:
            return []
        return [
            f"drafter was trained for {self.name!r}; {target.name!r} differs in "
            f"{' and '.join(different)}"
        ]


def without_name(facts: JsonObject) -> JsonObject:
    """Return the keys of a target by which it is compared, where its weights are known.

    `facts` are a fingerprint's, or those of rows and runs that note its hash next to a name or
    path. The same target is named in several ways: by a relative path, an absolute one, or its name
    on the hub. Without a hash of the weights nothing is left out.
    """
    if facts.get("weights_hash") is None:
        return facts
    return {name: value for name, value in facts.items() if name not in ("name", "target")}


def output_settings(config: Any) -> dict[str, Any]:
    """Return the values of a text configuration that change the output of the same weights.

    Names are flat, such as `rope_parameters.rope_theta`; values are as JSON holds them. `config` is
    one of transformers'.
    """
    values = {name: value for name, value in config.to_dict().items() if name[:1] != "_"}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if NUMBERS.search(name) and not TRAINING_ONLY.search(name):
            found |= _flat(name, value)
    # Positions that are scaled in these ways depend on the length that is promised.
    kinds = {value for name, value in found.items() if name.endswith("rope_type")}
    if kinds & {"dynamic", "longrope"}:
        found |= _flat("max_position_embeddings", values.get("max_position_embeddings"))
    return dict(sorted(found.items()))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a table under flat names, in the form that JSON gives back."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        yield name, [item if isinstance(item, str | int | float) else str(item) for item in value]
    elif isinstance(value, float) and not math.isfinite(value):
        yield name, str(value)
    elif value is None or isinstance(value, str | int | float):
        yield name, value


def changed_numbers(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a phrase that names the values that differ, old and new; empty if all are equal.

    Names that only one table has are compared where they are rotary parameters that a user adds or
    takes away; another version of transformers may know more of the others.
    Example: `rms_norm_eps was 1e-06, is 0.01`.
    """
    both, changes = before | now, []
    tables = [{name for name in t if name.startswith("rope_parameters.")} for t in (before, now)]
    added = {
        name
        for name in tables[0] ^ tables[1]
        # A table without any was noted without them.
        if all(tables)
        and name.rpartition(".")[2] not in OPTIONAL_ROPE_KEYS
        and both[name] != "default"
    }
    for name in sorted(before.keys() & now.keys() | added):
        was, found = before.get(name), now.get(name)
        # Numbers are compared as numbers: one version writes 10000, another one 10000.0.
        if was != found:
            changes.append(f"{name} was {_shortened(was)}, is {_shortened(found)}")
    more = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    return "; ".join([*changes[:SHOWN], *more])


def _shortened(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hash of every (token, id) pair; empty for a target without a tokenizer."""
    if tokenizer is None:
        return ""
    # Ordered by id, then by token: the order of the dictionary is not the same in every process.
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return _digest(json.dumps(pairs))


ADDED_TOKENS_OPTION = "--allow-added-tokens"


def added_ids(tokenizer: Any, digest: str) -> list[int] | None:
    """Return the ids of the tokens that a target has in addition to those of a `tokenizer_hash`.

    They come after all others; an empty list means the same tokens. Returns None if the others are
    not the same, or if either has no tokenizer.
    """
    if tokenizer is None or not digest:
        return None
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    # The hash of each beginning is found on the way to that of the whole list.
    begun = hashlib.sha256(b"[")
    for count, pair in enumerate(pairs, 1):
        begun.update((", " if count > 1 else "").encode() + json.dumps(pair).encode())
        ended = begun.copy()
        ended.update(b"]")
        if ended.hexdigest()[:16] == digest:
            return [number for _, number in pairs[count:]]
    return None


def unknown_tokens(ids: Sequence[int], before: int, now: int) -> str:
    """Return a clause about the tokens of a target that a drafter does not know.

    `ids` are those of the added tokens; `before` and `now` are the sizes of the vocabularies that
    the drafter was trained for and that the target has.
    """
    if not ids:
        return f"the target has {now:,} rows for tokens, the drafter {before:,}"
    listed = ", ".join(map(str, ids)) if len(ids) <= 3 else f"{ids[0]} to {ids[-1]}"
    return f"the target has {len(ids):,} tokens that the drafter does not know (ids {listed})"


def effect_of_unknown_tokens(ids: Sequence[int], before: int, now: int) -> str:
    """Return a sentence about their effect on decoding; see `unknown_tokens`."""
    never = "they are never drafted, and after one of them fewer drafts may be accepted"
    clause = unknown_tokens(ids, before, now)
    return f"{clause}: {never}; the text is the target's own" if ids else clause


def weights_hash(model: nn.Module) -> str:
    """Return the hash of some elements of every parameter of a model.

    They are rounded to bfloat16, so that the type in which the model was loaded does not matter.
    """
    parameters = dict(model.named_parameters())
    return hash_of(parameters, parameters.get)


def hash_of(names: Iterable[str], read: Callable[[str], Tensor | None]) -> str:
    """Return `weights_hash` of the parameters `names`, which `read` gives, for example from files.

    Parameters for which `read` gives None (they are quantised in the files, or are joined when a
    model is loaded, as single experts are) are left out. The hash is then not the loaded model's,
    and begins with `PARTIAL`.
    """
    import torch  # a command's help page imports this module

    digest, whole = hashlib.sha256(), True
    # Sorted, because the order of a model's modules may change with the version of transformers.
    for name in sorted(names):
        tensor = read(name)
        whole = whole and tensor is not None
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
    return ("" if whole else PARTIAL) + digest.hexdigest()[:16]


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


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of, at any depth.

    A quantised weight is a tensor made of tensors, such as codes and scales, and cannot be indexed
    itself. Any other tensor consists of itself.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    composite: Any = tensor
    inner_names = composite.__tensor_flatten__()[0]
    return [plain for name in inner_names for plain in _plain(getattr(composite, name))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
