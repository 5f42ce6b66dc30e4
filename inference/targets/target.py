"""The frozen target: a decoder-only causal language model, by transformers' public API alone."""

from __future__ import annotations

import logging
import os
import reprlib
import shutil
import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.errors import UserError
from ...heads.fingerprint import Fingerprint, weights_hash
from ...heads.layout import EmbeddingAndHead
from ...heads.pretrained import as_user_errors
from ...heads.vocabulary import spread_ids
from ..base.settings import TargetConfig, check_dtype
from ..rounds.device import prepare
from .adapter import merge_adapter
from .causal_model import CausalModel
from .model_head import ModelHead
from .spread import load_spread
from .target_files import (
    base_and_adapter,
    check_config,
    check_fits,
    not_applied,
    read_model,
    read_tokenizer,
)

log = logging.getLogger(__name__)


class TargetSource(ModelHead, ABC):
    """Target as training knows it: one that can be run (`Target`), or one of which only embedding,
    final norm and head are loaded, because its features are stored or served (`StoredTarget`)."""

    allow_added_tokens = False
    """True if drafters may lack its last tokens, see `TargetConfig`."""

    @property
    def embedding_and_head(self) -> EmbeddingAndHead:
        """Embedding and head that drafters borrow."""
        embedding = self.model.get_input_embeddings()
        # Gemma's embedding rounds its factor to the dtype of its weights before it multiplies.
        scale = torch.as_tensor(getattr(embedding, "embed_scale", 1.0), device="cpu")
        factor = float(scale.to(embedding.weight.dtype))
        return EmbeddingAndHead(
            self.embed, self.head, self.vocab_size, self.tokenizer, factor, self.head_of,
            self.allow_added_tokens,
        )  # fmt: skip

    def embedding_and_head_in(self, dtype: torch.dtype) -> EmbeddingAndHead:
        """Return `embedding_and_head` for a drafter in `dtype`, as are parts of the head."""
        return replace(self.embedding_and_head, part=lambda ids: self.head_of(ids, dtype))

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Return the identity of the target's weights and tokenizer."""

    @abstractmethod
    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        """Return the root mean square of each tap, the median over sample positions."""

    @abstractmethod
    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return each tap `[S, H]` of a text, to which a drafter's first weights are fitted."""


class Target(CausalModel, TargetSource):
    """Target that can be run."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        frozen: bool = True,
        spread: str = "whole",
        digest: str | None = None,
        reference: bool = False,
    ) -> None:
        """Split `model`, as `CausalModel` does. Raises `UserError`."""
        super().__init__(model, tokenizer, name, frozen, spread)
        self.digest = digest
        """Hash of the weights, where they cannot be read here: spread over ranks, or packed."""
        self.reference = reference
        """True if it decodes by transformers' own pass over matrices as they are stored, and draft
        models for it do too (`TargetConfig.attention` is given)."""

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.model, self.tokenizer, self.name, self.digest)

    def pack(self) -> None:
        # Of the weights as they are stored, which are gone afterwards.
        self.digest = self.digest or weights_hash(self.model)
        super().pack()

    @torch.no_grad()
    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        if not taps:
            return ()
        # The median, because the states of a text's first token may be ten times as large.
        ids = spread_ids(self.vocab_size, min(128, self.max_positions)).to(self.device)[None]
        states = self.forward(ids, taps=taps).taps
        return tuple(float(tap.float().square().mean(-1).sqrt().median()) for tap in states)

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        states = self.forward(torch.tensor([ids], device=self.device), taps=taps).taps
        return tuple(tap[0].float() for tap in states)


def load_for_decoding(config: TargetConfig) -> Target:
    """Return `load_target`, laid out for decoding, not for training. Raises `UserError`."""
    if config.compile:
        prepare_to_compile(resolve_device(config.device))
    target = load_target(replace(config, compile=False))
    if config.fused:
        target.pack()
    target.static = config.compile
    return target


def load_target(config: TargetConfig) -> Target:
    """Return the loaded and checked target, its adapter merged. Raises `UserError`."""
    if config.compile:
        log.warning(
            "target.compile is for decoding, and this command does not decode; leave it out"
        )
    device = resolve_device(config.device)
    dtype, whole = resolve_dtype(config.dtype, device), config.spread == "whole"
    path, adapter = base_and_adapter(config)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if whole and device.type == "cuda":
        options["device_map"] = {"": device}  # straight to its place, quantised or not
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    if adapter is not None and not whole:
        raise UserError(
            "an adapter is merged into a whole model; merge and save it first, or leave out "
            "target.spread"
        )
    if whole:
        check_fits(path, dtype, device)
    check_config(path, config.trust_remote_code)
    tokenizer = read_tokenizer(path, config.trust_remote_code)
    digest = None
    if whole:
        model: Any = read_model(path, options)
    else:
        with as_user_errors(path):
            model, digest = load_spread(config.spread, path, device, options)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    # a quantised model was placed as it was loaded
    if whole and not getattr(model, "is_quantized", False):
        model = model.to(device)
    target = Target(
        model,
        tokenizer,
        config.path,
        spread=config.spread,
        digest=digest,
        reference=not config.fused,
    )
    if config.spread == "devices" and target.mixers:
        raise UserError(
            f"target.spread=devices does not run recurrent layers, which target {config.path} has; "
            "use spread=fsdp"
        )
    target.allow_added_tokens = config.allow_added_tokens
    return checked(target, fused=config.fused, move=True)


def target_of(model: Any, tokenizer: Any = None) -> Target:
    """Return a loaded model as a target; its weights are not frozen. Raises `UserError`."""
    source = str(getattr(model.config, "_name_or_path", "") or "")
    if tokenizer is None:
        if not source:
            raise UserError(
                "this model does not say where it came from; give its tokenizer too: load(model, "
                "tokenizer=...)"
            )
        tokenizer = read_tokenizer(source, False)
    target = Target(model, tokenizer, source or type(model).__name__, frozen=False)
    if target.mixers and len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UserError(
            "this model lies on several devices, over which recurrent layers do not run; load it "
            "on one"
        )
    return checked(target, fused=True, move=False)


def checked(target: Target, fused: bool, move: bool) -> Target:
    """Try the target's head and trees, warn of what is odd, and return it. Raises `UserError`.

    `fused`: decode by a forward pass with fewer operators, where there is one. `move`: its matrices
    may be moved, see `CausalModel.fuse`.
    """
    prepare(target.device)
    target.check_head()
    target.check_tree()
    if fused:
        target.fuse(move)
    tokens, rows = len(target.tokenizer), target.vocab_size
    if tokens > rows:
        log.warning(
            "target %s: its tokenizer has %d tokens, its embedding %d rows; a text with one of the "
            "others cannot be read",
            target.name, tokens, rows,
        )  # fmt: skip
    if outside := sorted(token for token in target.eos_ids if token >= rows):
        log.warning(
            "target %s: its end token %d is none of its %d tokens; fix eos_token_id in "
            "generation_config.json",
            target.name, outside[0], rows,
        )  # fmt: skip
    if (border := target.longrope_border) is not None and border == target.max_positions:
        log.warning(
            "target %s: text ends after %d positions here, of %s that its config names: beyond "
            "them its longrope factors change for the whole text",
            target.name, border, target.config.max_position_embeddings,
        )  # fmt: skip
    if settings := not_applied(target.model.generation_config):
        listed = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in settings.items())
        log.warning(
            "target %s asks generate for %s; decoding here does not apply it", target.name, listed
        )
    return target


def resolve_device(name: str) -> torch.device:
    """Return the device that a `TargetConfig` names. Raises `UserError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} asked for, but this machine has no CUDA device; use cpu")
    return device


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Return the dtype that a `TargetConfig` names; "auto" is the files'. Raises `UserError`."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, check_dtype(name))


def prepare_to_compile(device: torch.device) -> None:
    """Say what compilation will take. Raises `UserError` on a CPU without a C++ compiler."""
    if device.type == "cuda":
        return  # rounds are recorded there, in about a second
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(wanted) is None:
        raise UserError(
            f"--compile needs a C++ compiler, and there is no {wanted}; install it, name "
            "another one in CXX, or leave out --compile"
        )
    log.info(
        "the first rounds with each kind of sampling are compiled, which takes one or two minutes, "
        "or seconds where the cache on disk has them; batches of several rows are not compiled"
    )
