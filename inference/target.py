"""The frozen target: any decoder-only model that `AutoModelForCausalLM` loads, through transformers' public API.

Shapes: B batch, N positions, H hidden size, V vocabulary, L decoder layers. Taps are indices into Hugging Face
`hidden_states`: 0 = embeddings, i = residual stream after layer i - 1; the last hidden state is the one after the final norm.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache

from ..heads.errors import UserError
from ..heads.files import read_json
from ..heads.fingerprint import Fingerprint

log = logging.getLogger(__name__)

UNLIMITED = 1 << 20  # positions of a target that names no limit

# What `generate` would apply from a target's generation_config and greedy decoding here does not, with the neutral values.
PROCESSORS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
}


@dataclass
class TargetConfig:
    """Where the target is and how it is loaded."""

    path: str
    """Model folder, or its name on the hub. `--target X` is short for `--target.path X`."""
    dtype: str = "auto"
    """auto (as stored, but float32 on a CPU), float32, bfloat16 or float16."""
    device: str = "auto"
    """auto (cuda if there is one, else cpu), cpu, cuda or cuda:N."""
    adapter: str | None = None
    """LoRA adapter folder, merged into the weights on load (needs peft)."""
    attention: str | None = None
    """Attention implementation to ask transformers for; its own choice if not given."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources that you trust."""


@dataclass
class Hidden:
    """What one target forward gives: `last` `[B, N, H]` after the final norm, and one `[B, N, H]` tensor for each tap."""

    last: Tensor
    taps: tuple[Tensor, ...] = ()


class Target:
    """The frozen model with its tokenizer, split into decoder and head."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        output = self.model.get_output_embeddings()
        if output is None:
            raise UserError(f"target {name} has no output head; name a causal language model")
        self._output = output
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise UserError(f"target {name} has layers of kind {', '.join(sorted(unknown))}, which cannot be rolled back here")
        window = getattr(self.config, "sliding_window", None) is not None and getattr(self.config, "use_sliding_window", True)
        self._sliding = "sliding_attention" in kinds or (not kinds and window)
        self._mixed = len(kinds) > 1
        self._softcap = getattr(self.config, "final_logit_softcapping", None)
        self._scale = getattr(self.config, "logit_scale", None)
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            self._scale = 1.0 / divisor

    @property
    def device(self) -> torch.device:
        return self._output.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_positions(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or UNLIMITED

    @property
    def head_weight(self) -> Tensor:
        """The output matrix `[V, H]`, with the target's own scale of the logits."""
        return self._output.weight if self._scale is None else self._output.weight * self._scale

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, as `generate` sees them."""
        ids = self.model.generation_config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @property
    def processors(self) -> dict[str, Any]:
        """What the target's generation_config asks of `generate` beyond plain decoding."""
        settings = {name: getattr(self.model.generation_config, name, None) for name in PROCESSORS}
        return {name: value for name, value in settings.items() if value not in PROCESSORS[name]}

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.model, self.tokenizer, self.name)

    def head(self, last: Tensor) -> Tensor:
        """`[..., H]` after the final norm -> logits `[..., V]`, with the target's own soft cap or scale."""
        logits = self._output(last.to(self._output.weight.dtype))
        if self._scale is not None:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        cache: Cache | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Run the decoder over `ids` `[B, N]`.

        `positions` `[B, N]`; without a cache and a mask, positions that restart mark the documents of a packed row, and no
        document sees another. `mask` `[B, 1, N, length]` is additive (0 = visible).
        """
        output = self.decoder(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=bool(taps),
        )
        states = output.hidden_states if taps else ()
        return Hidden(output.last_hidden_state, tuple(states[tap] for tap in taps))

    def tree_mask(self, visible: Tensor, positions: Tensor, committed: int) -> Any:
        """What `forward` takes as mask for a tree over a cache of `committed` positions.

        `visible` `[N, N]` bool: which nodes each node sees; `positions` `[N]`. Additive, since every attention implementation
        that takes a 4D mask takes an additive one. Layers with a sliding window see only keys less than a window back; models
        that mix both kinds of layers take one mask for each.
        """
        count = positions.shape[0]
        see = torch.cat([visible.new_ones(count, committed), visible], dim=1)
        lowest = torch.finfo(self.dtype).min
        full = torch.zeros(1, 1, *see.shape, dtype=self.dtype, device=see.device).masked_fill_(~see, lowest)
        if not self._sliding:
            return full
        keys = torch.cat([torch.arange(committed, device=see.device), positions])
        near = positions[:, None] - keys < self.config.sliding_window
        sliding = full.masked_fill(~near, lowest)
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed else sliding

    @torch.no_grad()
    def check_head(self) -> None:
        """Demand that `head(features)` gives the model's own logits; drafters would learn from a wrong teacher otherwise."""
        ids = (torch.arange(8, device=self.device) % self.vocab_size)[None]
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.head(self.forward(ids).last).float()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        error = (own - ours).abs().max().item() / max(own.abs().max().item(), 1e-6)
        if not error <= tolerance:
            raise UserError(
                f"target {self.name} ({self.config.model_type}) changes its logits after the head in an unknown way "
                f"(relative difference {error:.1e}); please report this model type"
            )


def load_target(config: TargetConfig) -> Target:
    """Load model and tokenizer, merge an adapter if there is one, and check the head. Raises `UserError`."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    path, adapter = config.path, config.adapter
    check_there(path)
    if adapter is None and Path(path, "adapter_config.json").is_file():
        adapter = path
        path = read_json(Path(path, "adapter_config.json")).get("base_model_name_or_path") or ""
        check_there(path)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load target {path!r}: {first_line}") from error
    if adapter is not None:
        model = merge_adapter(model, adapter)
    target = Target(model.to(device), tokenizer, config.path)
    target.check_head()
    if target.processors:
        asked = ", ".join(f"{name}={value}" for name, value in target.processors.items())
        log.warning("target %s asks generate for %s; decoding here does not apply it", config.path, asked)
    return target


def check_there(path: str) -> None:
    """Demand a model folder, or a name that the hub or its local cache knows; the loaders would retry for a minute first."""
    if Path(path).is_dir():
        return
    if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"target folder {path} does not exist; check the path")
    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            HfApi().model_info(path, timeout=10)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"target {path!r} is no folder here, and the hub cannot give it ({reason}); check the path") from error


def merge_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """`model` with the LoRA adapter in folder `adapter` merged into its weights."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError("a LoRA adapter needs peft; install it with: pip install 'draftsmith[lora]'") from error
    try:
        return cast(Any, PeftModel.from_pretrained(cast(Any, model), adapter)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot merge adapter {adapter!r}: {str(error).strip().splitlines()[0]}") from error


def resolve_device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} asked for, but this machine has no CUDA device; use cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise UserError(f"unknown dtype {name!r}; use auto, float32, bfloat16 or float16")
    return getattr(torch, name)
