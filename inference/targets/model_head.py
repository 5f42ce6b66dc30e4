"""Embedding, final norm and head of a causal language model, and the facts that its config states.

Shapes: H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.errors import UserError
from ...heads.pretrained import end_ids
from .packed import PackedLinear, is_plain, packable

UNLIMITED = 1 << 20  # positions of a model that names no limit
TRIAL_POSITIONS = 8  # length of the longest text of a trial on loading
BEFORE_BORDER = 5  # positions of a trial before a border: it begins after all of a short document
KINDS_OF_ATTENTION = {"full_attention", "sliding_attention", "global"}
RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "mamba"}
"""Kinds of layers with a recurrent state; a hybrid one has attention too."""
STATELESS_KINDS = {"mlp", "moe"}
"""Kinds of layers that keep nothing: Nemotron-H counts its perceptrons as layers."""
KINDS_OF_LAYERS = KINDS_OF_ATTENTION | RECURRENT_KINDS | STATELESS_KINDS

BORDERS = ("position", "window", "chunk", "floor", "context", "seq_len", "length")
"""Words in the names of settings that are numbers of positions."""


def borders_of(config: Any) -> set[int]:
    """Return the numbers of positions that a config, or a table in it, names."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found |= borders_of(value)
        elif isinstance(value, list):
            found = found.union(*(borders_of(table) for table in value if isinstance(table, dict)))
        elif type(value) is int and any(word in name for word in BORDERS) and "layers" not in name:
            found.add(value)
    return found


FINAL_NORMS = (
    "norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "embedding_norm"
)  # fmt: skip
"""Names of the norm before the head; the last is LFM2's."""


class ConfigFacts:
    """Facts that the config of a language model states."""

    config: Any

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
        """Positions that a text can have here, which may be fewer than the config names."""
        named = getattr(self.config, "max_position_embeddings", None) or UNLIMITED
        return min(named, self.longrope_border or named)

    @property
    def longrope_border(self) -> int | None:
        """Positions at which longrope changes the rotary factors of the whole text, or None.

        A forward pass takes short or long factors by its last position. Text ends at the border:
        past it, keys in the cache would keep the short factors, and rows of a batch would change
        each other's.
        """
        tables = getattr(self.config, "rope_parameters", None) or {}
        # Where the kinds of layers differ, there is a table for each kind.
        nested = [table for table in tables.values() if isinstance(table, dict)]
        found = []
        for table in nested or [tables]:
            if table.get("rope_type") == "longrope":
                found.append(table.get("original_max_position_embeddings"))
        own = getattr(self.config, "original_max_position_embeddings", None)
        return min(filter(None, [*found, own]), default=None) if found else None


class ModelHead(ConfigFacts):
    """Model without a forward pass of its layers: embedding, head and facts.

    The layers may be shapes without numbers (`StoredTarget`); `CausalModel` can run them.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        frozen: bool = True,
        spread: str = "whole",
    ) -> None:
        """Find the parts of `model`; its weights stop needing gradients if `frozen`. Raises
        `UserError` for a model without a head, or with layers that cannot be rolled back."""
        self.model: Any = model.eval()
        if frozen:
            self.model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.spread = spread
        """Distribution over ranks and devices, see `TargetConfig`."""
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        output = self.model.get_output_embeddings()
        if output is None:
            raise UserError(f"target {name} has no output head; name a causal language model")
        self._output = output
        self._multiply: nn.Module = output
        """Computes what the output layer does; a packed copy of it in decoding on a CPU."""
        # Other kinds need other masks, or states that no cache here has.
        if unknown := self.kinds_of_layers - KINDS_OF_LAYERS:
            names = ", ".join(sorted(unknown))
            raise UserError(
                f"target {name} ({self.config.model_type}) has layers of kind {names}, which "
                "cannot be rolled back here"
            )
        self._softcap = getattr(self.config, "final_logit_softcapping", None)
        names = ("logit_scale", "lm_head_multiplier")  # Cohere's name, and Falcon-H1's
        scales = [getattr(self.config, name, None) for name in names]
        self._scale = next((scale for scale in scales if scale not in (None, 1.0)), None)
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            self._scale = 1.0 / divisor

    @property
    def kinds_of_layers(self) -> set[str]:
        """Kinds that the config names, such as full_attention; empty where it names none."""
        named = getattr(self.config, "layer_types", None)
        # GPT-Neo's name. Its local layers count slots of the cache, which are not positions in a
        # tree and in rows of different lengths.
        return set(named or getattr(self.config, "attention_layers", None) or ())

    @property
    def device(self) -> torch.device:
        return self._output.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def trial_starts(self) -> list[int]:
        """First positions of trials on loading: 0, and just before each border of the config.

        Some models compute otherwise from a position on, such as past the length of their first
        training. A trial's text crosses the border, or ends with the last position.
        """
        last = self.max_positions - TRIAL_POSITIONS
        starts = {0}
        for border in {self.max_positions, *borders_of(self.config.to_dict())}:
            starts.add(min(border - BEFORE_BORDER, last))
        return sorted(start for start in starts if 0 <= start < UNLIMITED - TRIAL_POSITIONS)

    @property
    def head_weight(self) -> Tensor:
        """Output matrix `[V, H]`, multiplied by the target's own scale of its logits."""
        # Drafters that copy the matrix apply no scale afterwards, so it is put into the matrix.
        return self._output.weight if self._scale is None else self._output.weight * self._scale

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters that `head` reads."""
        return list(self._output.parameters())

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, as `generate` sees them. Raises `UserError` for no ids."""
        ids = self.model.generation_config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return frozenset(end_ids(ids))

    @property
    def repetition_penalty(self) -> float:
        """Penalty that `generate` applies by default; 1 for no penalty."""
        return getattr(self.model.generation_config, "repetition_penalty", None) or 1.0

    @property
    def together(self) -> bool:
        """True if a forward pass is a collective operation: all ranks make equally many."""
        return self.spread == "fsdp"

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[..., H]` of token ids `[...]`, on the device of the ids."""
        table = self.model.get_input_embeddings()
        # A target over several devices has its embedding on the first, and its head on the last,
        # where drafters lie. An untrained drafter, and its ids, are on the CPU wherever the target
        # is. Weights without a device are offloaded, and their hook moves what it is given.
        there = ids if table.weight.is_meta else ids.to(table.weight.device)
        return table(there).to(ids.device)

    def final_norm(self) -> nn.Module | None:
        """Return the norm before the head, by any of its usual names, or None."""
        for name in FINAL_NORMS:
            norm = getattr(self.decoder, name, None)
            # OLMo's norm has no weight, so there is nothing that a drafter could take over.
            if getattr(norm, "weight", None) is not None:
                return norm
        return None

    @torch.no_grad()
    def final_norm_weight(self) -> Tensor | None:
        """Return `w` `[H]` if the final norm computes x / rms(x) * w, else None.

        It is the norm's weight, or 1 + weight in float32.
        """
        norm = self.final_norm()
        weight: Any = getattr(norm, "weight", None)
        if norm is None or weight.shape != (self.hidden_size,):
            return None
        # Tried on numbers: some norms have a bias, or multiply by 1 + w, under the same names.
        # The numbers have a mean other than 0, so that a norm which subtracts the mean differs.
        x = torch.linspace(-3, 4, self.hidden_size, device=weight.device, dtype=weight.dtype)[None]
        for factor in (weight, 1 + weight.float()):
            by_formula = torch.nn.functional.rms_norm(x.float(), weight.shape, factor.float(), 1e-6)
            # In float32, and with tolerances that bfloat16 keeps: it has 8 bits.
            if torch.allclose(norm(x).float(), by_formula, rtol=2e-2, atol=1e-2):
                return factor
        return None

    def head(self, last: Tensor) -> Tensor:
        """Return the logits `[..., V]`, scaled or capped, of last hidden states `[..., H]`."""
        # A drafter's states may have another dtype than the target's head.
        return self._finished(self._multiply(last.to(self._output.weight.dtype)))

    def head_of(self, ids: Tensor, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the logits `[..., Vd]` of the tokens `ids` `[Vd]` alone.

        It holds a copy of their rows of the output matrix, in `dtype` if given, packed if the
        target's own is. Where that is spread or no plain matrix, the whole head is computed.
        """
        whole, own = self._output, self._multiply
        packed = isinstance(own, PackedLinear)
        if self.spread != "whole" or not (packed or is_plain(whole)):
            return lambda last: self.head(last)[..., ids]
        rows = nn.Linear(self.hidden_size, len(ids), whole.bias is not None, device="meta")
        dtype = dtype or whole.weight.dtype
        rows.weight = nn.Parameter(whole.weight.detach()[ids].to(dtype), requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids].to(dtype), requires_grad=False)
        multiply = PackedLinear(rows) if packed and packable(dtype) else rows
        return lambda last: self._finished(multiply(last.to(dtype)))

    def _finished(self, logits: Tensor) -> Tensor:
        """Return the output matrix's products scaled or capped."""
        if self._scale is not None:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
