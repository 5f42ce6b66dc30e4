"""Causal language model that is run over prompts and draft trees: a target, or a draft model.

Shapes: B rows of a batch, N positions of one forward pass, S prompt positions, U undecided slots of
the cache, H hidden size, V vocabulary. A tap is an index into Hugging Face `hidden_states`: 0 is
the embeddings, i the residual stream after layer i - 1. The last hidden state is the one after the
final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.errors import UserError, first_line
from ...heads.layout import dtype_name
from ..cache import TreeCache
from ..masks import packed_mask, tree_mask
from ..tree import TreeShape
from .model_head import ModelHead

PREFILL_CHUNK = 2048


@dataclass
class Hidden:
    """Hidden states of one forward pass: after the final norm, and of each tap.

    They are `[B, N, H]`, or `[S, H]` of one text, in the dtype of the model that made them.
    """

    last: Tensor
    taps: tuple[Tensor, ...] = ()


class CausalModel(ModelHead):
    """Causal language model, split into decoder and head."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str, frozen: bool = True) -> None:
        """Split `model`, as `ModelHead` does. Raises `UserError`."""
        super().__init__(model, tokenizer, name, frozen)
        # Draft models are named by their role, and targets by their path.
        self._called = f"target {name}" if frozen else name
        kinds = self.kinds_of_layers
        # A config that does not name the kind of each layer gives its window to all of them.
        has_window = getattr(self.config, "sliding_window", None) is not None and getattr(
            self.config, "use_sliding_window", True
        )
        self._sliding = "sliding_attention" in kinds or (not kinds and has_window)
        self._mixed = len(kinds) > 1
        self._compiled: Any = None
        self.masks_packed_rows = False
        """True for models that keep documents of a row apart only by `packed_mask`: GPT-OSS."""

    @property
    def window(self) -> int | None:
        """Positions that a layer with a sliding window sees; None if no layer has one."""
        return self.config.sliding_window if self._sliding else None

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
            mask = packed_mask(positions, self.dtype, self.window, self._mixed)
        # Only these passes have shapes that recur, so that a compiled decoder is used again.
        run = (
            self._compiled
            if self._compiled is not None
            and cache is not None
            and cache.static
            and mask is not None
            else run_decoder
        )
        # All states are kept only if some are tapped, because they hold the memory of every layer.
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
            # All rows together, padding too, so that the next piece begins at the same slot in all
            # of them.
            cache.commit([piece.shape[1]] * len(ids))
        cache.lengths = list(lengths)  # padding was committed too
        if len(outputs) == 1:
            return outputs[0]
        tapped = []
        for i in range(len(taps)):
            pieces = [output.taps[i] for output in outputs]
            tapped.append(torch.cat(pieces, dim=1))
        return Hidden(torch.cat([output.last for output in outputs], dim=1), tuple(tapped))

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
        # A single row's length is known on the host, where adding a number needs no tensor.
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
        """Return the mask of `masks.tree_mask` in this model's dtype, with its windows."""
        return tree_mask(
            visible,
            positions,
            slot_depths,
            cache,
            count,
            dtype=self.dtype,
            window=self.window,
            mixed=self._mixed,
        )

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
        # Three tokens of a prompt, then the nodes. Different tokens, so that a node that sees a
        # wrong one differs.
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
        # Each node once more, at the end of the prompt and its own path, without cache and mask.
        last_states = []
        for node in range(shape.nodes):
            path = torch.tensor(shape.path_to(node))
            text = torch.cat([ids[:3], ids[3:][path]])
            last_states.append(self.forward(text[None]).last[0, -1])
        alone = torch.stack(last_states)
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        error = ((in_tree - alone).float().norm() / alone.float().norm().clamp(min=1e-6)).item()
        if not error <= tolerance:  # `error > tolerance` would let NaN pass
            raise UserError(
                f"{self._cannot()}: nodes differ from their own paths (relative difference "
                f"{error:.1e})"
            )

    def _cannot(self) -> str:
        return (
            f"{self._called} ({self.config.model_type}) cannot verify draft trees and roll "
            "back; try --target.attention sdpa or eager, or another target"
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `UserError` unless `head` gives the model's own logits, which drafters learn."""
        ids = (torch.arange(8, device=self.device) % self.vocab_size)[None]
        # The model's own forward pass, with whatever it does behind its head.
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        logits = self.head(self.forward(ids).last).float()
        if not bool(expected.isfinite().all()):
            raise UserError(
                f"{self._called} gives logits that are not finite: its weights are damaged "
                f"(download them again), or they overflow in {dtype_name(self.dtype)} (give "
                "--target.dtype float32 or bfloat16)"
            )
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        error = (expected - logits).abs().max().item() / max(expected.abs().max().item(), 1e-6)
        if not error <= tolerance:
            raise UserError(
                f"{self._called} ({self.config.model_type}) changes its logits after the head "
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
    # A function of its own, without any state of the model's wrapper, so that it compiles.
    output = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
        output_hidden_states=all_states,
    )
    return output.last_hidden_state, output.hidden_states if all_states else ()
