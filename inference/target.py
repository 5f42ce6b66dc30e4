"""The frozen target: a decoder-only causal language model, by transformers' public API alone.

Shapes: B rows of a batch, N positions of one forward pass, S prompt positions, U undecided slots of
the cache, H hidden size, V vocabulary. A tap is an index into Hugging Face `hidden_states`: 0 is
the embeddings, i the residual stream after layer i - 1. The last hidden state is the one after the
final norm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.embedding_and_head import EmbeddingAndHead
from ..heads.errors import UserError, first_line
from ..heads.fingerprint import Fingerprint
from ..heads.pretrained import clear_errors
from ..heads.vocabulary import spread_ids
from .cache import TreeCache, visible_slots
from .masks import packed_mask
from .settings import TargetConfig
from .spread import load_spread
from .target_files import (
    base_and_adapter,
    check_config,
    check_fits,
    merge_adapter,
    read_model,
    read_tokenizer,
)
from .tree import TreeShape

log = logging.getLogger(__name__)

UNLIMITED = 1 << 20  # positions of a target that names no limit
PREFILL_CHUNK = 2048

# Settings of a generation_config that `generate` applies and decoding here does not, each with the
# values that leave the scores as they are.
PROCESSORS: dict[str, tuple[Any, ...]] = {
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
class Hidden:
    """Hidden states of one forward pass: after the final norm, and of each tap; `[B, N, H]`."""

    last: Tensor
    taps: tuple[Tensor, ...] = ()


class Target:
    """Causal language model, split into decoder and head: the frozen target, or a draft model."""

    whole = True
    """False for a target of which only embedding, final norm and head are loaded."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str, frozen: bool = True) -> None:
        """Split `model`; its weights stop needing gradients if `frozen`. Raises `UserError`."""
        self.model: Any = model.eval()
        if frozen:
            self.model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.spread = "whole"
        """Distribution over ranks and devices, see `TargetConfig`."""
        self._digest: str | None = None
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        output = self.model.get_output_embeddings()
        if output is None:
            raise UserError(f"target {name} has no output head; name a causal language model")
        self._output = output
        kinds = set(getattr(self.config, "layer_types", None) or ())
        # A recurrent state cannot give refused drafts up again; other kinds need other masks.
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            names = ", ".join(sorted(unknown))
            raise UserError(
                f"target {name} ({self.config.model_type}) has layers of kind {names}, which "
                "cannot be rolled back here"
            )
        # A config that does not name the kind of each layer gives its window to all of them.
        has_window = getattr(self.config, "sliding_window", None) is not None and getattr(
            self.config, "use_sliding_window", True
        )
        self._sliding = "sliding_attention" in kinds or (not kinds and has_window)
        self._mixed = len(kinds) > 1
        self._compiled: Any = None
        self.masks_packed_rows = False
        """True for models that keep documents of a row apart only by `packed_mask`: GPT-OSS."""
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
        """Output matrix `[V, H]`, multiplied by the target's own scale of its logits."""
        return self._output.weight if self._scale is None else self._output.weight * self._scale

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters that `head` reads."""
        return list(self._output.parameters())

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, as `generate` sees them."""
        ids = self.model.generation_config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @property
    def processors(self) -> dict[str, Any]:
        """Settings of generation_config that `generate` applies and decoding here does not."""
        settings = {name: getattr(self.model.generation_config, name, None) for name in PROCESSORS}
        return {name: value for name, value in settings.items() if value not in PROCESSORS[name]}

    @property
    def repetition_penalty(self) -> float:
        """Penalty that `generate` applies by default; 1 is none."""
        return getattr(self.model.generation_config, "repetition_penalty", None) or 1.0

    @property
    def together(self) -> bool:
        """True if a forward pass is a collective operation: all ranks make equally many."""
        return self.spread in ("fsdp", "tensor")

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.model, self.tokenizer, self.name, self._digest)

    @property
    def embedding_and_head(self) -> EmbeddingAndHead:
        """Embedding and head that drafters borrow."""
        embedding = self.model.get_input_embeddings()
        # Gemma's embedding rounds its factor to the dtype of its weights before it multiplies.
        scale = torch.as_tensor(getattr(embedding, "embed_scale", 1.0)).to(embedding.weight.dtype)
        return EmbeddingAndHead(
            self.embed, self.head, self.vocab_size, self.tokenizer, float(scale)
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[..., H]` of token ids `[...]`."""
        return self.model.get_input_embeddings()(ids)

    def final_norm(self) -> nn.Module | None:
        """Return the norm before the head, by any of its usual names, or None."""
        norms = (
            getattr(self.decoder, name, None)
            for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm")
        )
        return next((norm for norm in norms if getattr(norm, "weight", None) is not None), None)

    @torch.no_grad()
    def final_norm_weight(self) -> Tensor | None:
        """Return the weight `w` `[H]` if the final norm computes x / rms(x) * w, else None."""
        norm = self.final_norm()
        weight: Any = getattr(norm, "weight", None)
        if norm is None or weight.shape != (self.hidden_size,):
            return None
        # Tried on numbers: some norms have a bias, or multiply by 1 + w, under the same names.
        x = torch.linspace(-3, 4, self.hidden_size, device=weight.device, dtype=weight.dtype)[None]
        by_formula = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-6)
        return weight if torch.allclose(norm(x).float(), by_formula, rtol=2e-2, atol=1e-2) else None

    @torch.no_grad()
    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        """Return the root mean square of each tap, the median over sample positions."""
        if not taps:
            return ()
        # The median, because the states of a text's first token may be ten times as large.
        ids = spread_ids(self.vocab_size, min(128, self.max_positions)).to(self.device)[None]
        return tuple(
            float(tap.float().square().mean(-1).sqrt().median())
            for tap in self.forward(ids, taps=taps).taps
        )

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return each tap `[S, H]` of a text, to which a drafter's first weights are fitted."""
        return tuple(
            tap[0].float()
            for tap in self.forward(torch.tensor([ids], device=self.device), taps=taps).taps
        )

    def head(self, last: Tensor) -> Tensor:
        """Return the logits `[..., V]`, scaled or capped, of last hidden states `[..., H]`."""
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
        cache: TreeCache | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Run the decoder over `ids` `[B, N]`, and return its last hidden states and `taps`.

        Without a cache and a mask, `positions` `[B, N]` that restart mark the documents of a packed
        row, and no document sees another. `mask` `[1 | B, 1, N, slots]` is additive (0 = visible),
        or a dict with a mask for each kind of layer.
        """
        if cache is not None:
            cache.open(ids.shape[1], masked=mask is not None)
        elif mask is None and positions is not None and self.masks_packed_rows:
            mask = packed_mask(
                positions,
                self.dtype,
                self.config.sliding_window if self._sliding else None,
                self._mixed,
            )
        # Only these passes have shapes that recur, so that a compiled decoder is used again.
        run = (
            self._compiled
            if self._compiled is not None
            and cache is not None
            and cache.static
            and mask is not None
            else run_decoder
        )
        last, states = run(self.decoder, ids, positions, mask, cache, bool(taps))
        tapped = tuple(states[tap] for tap in taps)
        if self.spread == "devices":  # each layer's states lie where the layer does
            last, tapped = last.to(self.device), tuple(tap.to(self.device) for tap in tapped)
        return Hidden(last, tapped)

    def prefill(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        cache: TreeCache,
        taps: tuple[int, ...] = (),
        chunk: int = PREFILL_CHUNK,
    ) -> Hidden:
        """Run prompts `[B, S]`, padded on the right, and return the states of all positions.

        The cache then holds `lengths` positions of each row. Prompts run `chunk` positions at a
        time, so that the memory of attention stays bounded. Padding stands behind every real token,
        so that no token sees it, and its slots are overwritten later.
        """
        outputs = []
        for start in range(0, ids.shape[1], chunk):
            piece = ids[:, start : start + chunk]
            end = start + piece.shape[1]
            positions = None
            # Past a draft model's own last position its drafts are bad, but the text stays right.
            if end > self.max_positions:
                positions = (
                    torch.arange(start, end, device=ids.device)
                    .clamp(max=self.max_positions - 1)
                    .expand(len(ids), -1)
                )
            outputs.append(self.forward(piece, positions, cache=cache, taps=taps))
            cache.commit([piece.shape[1]] * len(ids))
        cache.lengths = list(lengths)  # padding was committed too
        if len(outputs) == 1:
            return outputs[0]
        tapped = [torch.cat([piece.taps[i] for piece in outputs], dim=1) for i in range(len(taps))]
        return Hidden(torch.cat([piece.last for piece in outputs], dim=1), tuple(tapped))

    def forward_tree(
        self,
        tokens: Tensor,
        visible: Tensor | None,
        depths: Tensor,
        slot_depths: Tensor,
        cache: TreeCache,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Run tree nodes `[B, N]` over the positions in `cache`, and return their states.

        Committed positions are followed by U undecided slots, of which these N nodes are the last.
        `visible` `[1 | B, N, U]` bool is true for the undecided slots that a node sees; None: all.
        `depths` `[1 | B, N]` are the nodes', `slot_depths` `[1 | B, U]` the slots'; depth 0 stands
        at the position after the committed ones. NO_NODE runs as token 0, unknown ones as the last.
        """
        count, slots = tokens.shape[1], slot_depths.shape[1]
        # A mask over a static cache is as wide as its buffer, which has to grow before.
        cache.reserve(cache.longest + cache.staged + count)
        starts = cache.lengths[0] if len(cache.lengths) == 1 else cache.starts()[:, None]
        # A node past the last position is never emitted (the reply ends before); clamping keeps
        # learned positions in range.
        positions = depths + starts
        if cache.longest + slots > self.max_positions:
            positions = positions.clamp(max=self.max_positions - 1)
        # A single node that sees all slots needs no mask: without one it sees what the cache gives.
        # That is all it may see only if rows are equally long and no slot given is out of use.
        alone = (
            count == 1 and (visible is None or slots == 1) and cache.uniform and not cache.static
        )
        mask = None if alone else self.tree_mask(visible, positions, slot_depths, cache, count)
        positions = positions.expand(tokens.shape[0], -1)
        return self.forward(tokens.clamp(0, self.vocab_size - 1), positions, mask, cache, taps)

    def tree_mask(
        self,
        visible: Tensor | None,
        positions: Tensor,
        slot_depths: Tensor,
        cache: TreeCache,
        count: int,
    ) -> Any:
        """Return the mask `[1 | B, 1, N, slots]` of `count` tree nodes, as `forward` takes it.

        Arguments as in `forward_tree`, `positions` `[1 | B, N]`. The mask is additive, since every
        attention implementation that takes a 4D mask takes an additive one. Layers with a sliding
        window see only keys less than a window back; models that mix both kinds of layers take one
        mask for each.
        """
        width, undecided = cache.seen(count), slot_depths.shape[1]
        lowest = torch.finfo(self.dtype).min
        if visible is None:
            visible = torch.ones(1, count, undecided, dtype=torch.bool, device=positions.device)
        if cache.uniform and not self._sliding:
            # Equally long rows have the tree in the same columns. All before it is committed, hence
            # visible (0); what a static cache has behind it is out of use.
            tree = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(
                ~visible, lowest
            )[:, None]
            padded = torch.nn.functional.pad(tree, (cache.longest, 0))
            return (
                torch.nn.functional.pad(padded, (0, width - padded.shape[-1]), value=lowest)
                if cache.static
                else padded
            )
        see = visible_slots(visible, cache, width)
        full = torch.zeros(see.shape, dtype=self.dtype, device=see.device).masked_fill_(
            ~see, lowest
        )[:, None]
        if not self._sliding:
            return full
        starts = cache.starts()[:1] if cache.uniform else cache.starts()
        slots = torch.arange(width, device=visible.device)[None]
        undecided_index = slots - starts[:, None]  # negative: the slot is committed
        clamped = undecided_index.clamp(0, undecided - 1)
        batch = len(see)
        depths = slot_depths.expand(batch, -1).gather(1, clamped.expand(batch, -1))
        # A window counts positions: a committed slot's number is its position, while an undecided
        # one stands at its depth, which siblings share.
        key_positions = torch.where(undecided_index < 0, slots, starts[:, None] + depths)
        near = positions[..., None] - key_positions[:, None] < self.config.sliding_window
        sliding = full.masked_fill(~near[:, None], lowest)
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed else sliding

    def compile(self) -> None:
        """Compile forward passes over trees in static caches; on CUDA they become graphs.

        A size of tree or batch that differs from the first is compiled once more, and then for all
        sizes; capacities are powers of two.
        """
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        self._compiled = torch.compile(run_decoder, mode=mode)

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    @torch.no_grad()
    def check_tree(self) -> None:
        """Raise `UserError` unless a pass over a tree gives nodes what their paths give alone.

        The trial finds whatever cannot be verified as a tree: recurrent state (Mamba and hybrids),
        attention that ignores a 4D mask, position biases that are derived from the mask.
        """
        shape = TreeShape((-1, 0, 0, 2, 1))  # the last node's parent is not the node before it
        ids = (torch.arange(3 + shape.nodes, device=self.device) * 7 + 3) % self.vocab_size
        tables = shape.tables(self.device)
        try:
            cache = TreeCache(1, 8, self.device)
            self.forward(ids[None, :3], cache=cache)
            assert len(cache) == self.num_layers, "some layers keep no keys and values"
            cache.commit([3])
            in_tree = self.forward_tree(
                ids[None, 3:], tables.ancestors, tables.depths, tables.depths, cache
            ).last[0]
        except (
            AssertionError,
            AttributeError,
            IndexError,
            TypeError,
            ValueError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            reason = first_line(error)
            raise UserError(f"{self._cannot()}: {reason}") from error
        paths = [
            torch.cat([ids[:3], ids[3:][torch.tensor(shape.path_to(node))]])
            for node in range(shape.nodes)
        ]
        alone = torch.stack([self.forward(path[None]).last[0, -1] for path in paths])
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        error = ((in_tree - alone).float().norm() / alone.float().norm().clamp(min=1e-6)).item()
        if not error <= tolerance:  # `error > tolerance` would let NaN pass
            raise UserError(
                f"{self._cannot()}: nodes differ from their own paths (relative difference "
                f"{error:.1e})"
            )

    def _cannot(self) -> str:
        return (
            f"target {self.name} ({self.config.model_type}) cannot verify draft trees and roll "
            "back; try --target.attention sdpa or eager, or another target"
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `UserError` unless `head` gives the model's own logits, which drafters learn."""
        ids = (torch.arange(8, device=self.device) % self.vocab_size)[None]
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        logits = self.head(self.forward(ids).last).float()
        if not bool(expected.isfinite().all()):
            raise UserError(
                f"target {self.name} gives logits that are not finite: its weights are damaged "
                "(download them again), or they overflow in "
                f"{str(self.dtype).removeprefix('torch.')} (give --target.dtype float32 or "
                "bfloat16)"
            )
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        error = (expected - logits).abs().max().item() / max(expected.abs().max().item(), 1e-6)
        if not error <= tolerance:
            raise UserError(
                f"target {self.name} ({self.config.model_type}) changes its logits after the head "
                f"in an unknown way (relative difference {error:.1e}); please report this "
                "model type"
            )


def run_decoder(
    decoder: Any,
    ids: Tensor,
    positions: Tensor | None,
    mask: Any,
    cache: TreeCache | None,
    all_states: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the last hidden state, and with `all_states` those of all layers, else ()."""
    # A function of its own, without any state of `Target`, so that it compiles.
    output = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
        output_hidden_states=all_states,
    )
    return output.last_hidden_state, output.hidden_states if all_states else ()


def load_target(config: TargetConfig) -> Target:
    """Return the loaded and checked target, its adapter merged. Raises `UserError`."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    path, adapter = base_and_adapter(config)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.spread == "whole" and device.type == "cuda":
        options["device_map"] = {"": device}  # straight to its place, quantised or not
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    if adapter is not None and config.spread != "whole":
        raise UserError(
            "an adapter is merged into a whole model; merge and save it first, or leave out "
            "target.spread"
        )
    if config.spread == "whole":
        check_fits(path, dtype, device)
    check_config(path, config.trust_remote_code)
    tokenizer = read_tokenizer(path, config.trust_remote_code)
    digest = None
    if config.spread == "whole":
        model: Any = read_model(path, options)
    else:
        with clear_errors(path):
            model, digest = load_spread(config.spread, path, device, options)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    # a quantised model was placed as it was loaded
    if config.spread == "whole" and not getattr(model, "is_quantized", False):
        model = model.to(device)
    target = Target(model, tokenizer, config.path)
    target.spread, target._digest = config.spread, digest
    return checked(target)


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
    return checked(target)


def checked(target: Target) -> Target:
    """Try the target's head and trees, warn of what is odd, and return it. Raises `UserError`."""
    target.check_head()
    target.check_tree()
    for message in vocabulary_warnings(target):
        log.warning("target %s: %s", target.name, message)
    if target.processors:
        listed = ", ".join(f"{name}={value}" for name, value in target.processors.items())
        log.warning(
            "target %s asks generate for %s; decoding here does not apply it", target.name, listed
        )
    return target


def vocabulary_warnings(target: Target) -> list[str]:
    """Return a warning for each kind of token that is not in the model's vocabulary."""
    warnings, rows = [], target.vocab_size
    if (tokens := len(target.tokenizer)) > rows:
        warnings.append(
            f"its tokenizer has {tokens} tokens, its embedding {rows} rows; a text with one of "
            "the others cannot be read"
        )
    if outside := sorted(token for token in target.eos_ids if token >= rows):
        warnings.append(
            f"its end token {outside[0]} is none of its {rows} tokens; mend eos_token_id in "
            "generation_config.json"
        )
    return warnings


def resolve_device(name: str) -> torch.device:
    """Return the device that a `TargetConfig` names. Raises `UserError`."""
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
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
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise UserError(f"unknown dtype {name!r}; use auto, float32, bfloat16 or float16")
    return getattr(torch, name)
