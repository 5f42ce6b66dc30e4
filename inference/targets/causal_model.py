"""Causal language model that is run over prompts and draft trees: a target, or a draft model.

Shapes: B rows of a batch, N positions of one forward pass, S prompt positions, U undecided slots of
the cache, H hidden size, V vocabulary. A tap is an index into Hugging Face `hidden_states`: 0 is
the embeddings, i the residual stream after layer i - 1. The last hidden state is the one after the
final norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...heads.errors import UserError, first_line
from ...heads.layout import dtype_name
from ...heads.pretrained import UNSUPPORTED, known_reason
from ..rounds.cache import Counts, TreeCache, Window
from ..rounds.device import send
from ..rounds.outcome import Hidden
from ..rounds.recurrent import RecurrentStates
from ..rounds.tree import Pass, TreeShape
from .fused import FusedDecoder, of_llama_form
from .masks import Spans, in_documents, packed_masks, spans_of, tree_masks
from .mixers import install, limit_steps, mixers_of, over, unknown_mixers
from .model_head import KINDS_OF_ATTENTION, RECURRENT_KINDS, STATELESS_KINDS, ModelHead
from .packed import PackedLinear, is_plain, linears_of, pack_linears, pays_to_pack

log = logging.getLogger(__name__)

PREFILL_CHUNK = 2048
TAPS_BY_NUMBER = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""True if transformers keeps single hidden states by their index in `hidden_states`."""
PROMPT = 3  # tokens before the tree of a trial
TRIAL_LENGTHS = (PROMPT - 1, PROMPT)
"""Those of its two rows."""
TRIAL = TreeShape((-1, 0, 0, 2, 1, 3))
"""Tree of a trial; its last node's parent is not the node before it."""
TRIAL_LEAVES = (4, 5)
TRIAL_PATHS = ((0, 2, 3, 5), (0,))
"""Paths that two rows of a trial accept."""


class CausalModel(ModelHead):
    """Causal language model, split into decoder and head."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        frozen: bool = True,
        spread: str = "whole",
    ) -> None:
        """Split `model`, as `ModelHead` does. Raises `UserError`."""
        super().__init__(model, tokenizer, name, frozen, spread)
        # Draft models are named by their role, and targets by their path.
        self._called = f"target {name}" if frozen else name
        kinds = self.kinds_of_layers
        # A config that does not name the kind of each layer gives its window to all of them.
        has_window = getattr(self.config, "sliding_window", None) is not None and getattr(
            self.config, "use_sliding_window", True
        )
        self._sliding = "sliding_attention" in kinds or (not kinds and has_window)
        self._mixed = len(kinds & KINDS_OF_ATTENTION) > 1
        self.mixers = mixers_of(self.decoder)
        """Recurrent layers, which run over trees by functions of their own; empty: none."""
        self._check_mixers()
        install(self.mixers)
        self.fused: FusedDecoder | None = None
        """Forward pass of decoding with fewer operators; None: transformers' own."""
        self.packed_bytes = 0
        """Bytes of matrices that are not parameters of `model` any more (`pack`)."""
        self.static = False
        """True if rounds are static, where that pays: of fixed shapes, compiled or recorded."""
        self.masks_packed_rows = False
        """True for models that keep documents of a row apart only by `packed_masks`: GPT-OSS."""
        self.attends_in_documents = False
        """True for models that attend to each document of a packed row by itself."""

    def _check_mixers(self) -> None:
        """Raise `UserError` for recurrent layers that are not known here."""
        named = getattr(self.config, "layer_types", None) or ()
        recurrent = sum(kind in RECURRENT_KINDS for kind in named)
        unknown = unknown_mixers(self.decoder, self.mixers)
        if unknown or recurrent > len(self.mixers):
            reason = unknown or f"its {recurrent} recurrent layers have a form not known here"
            raise UserError(
                f"{self._called} ({self.config.model_type}) cannot verify draft trees: {reason}; "
                "use another target (docs/decoding.md, Which targets)"
            )

    @property
    def stateful_layers(self) -> int:
        """Number of layers that keep something of the positions before."""
        return self._layers_but(STATELESS_KINDS)

    @property
    def layers_with_keys(self) -> int:
        """Number of layers that keep keys and values, by the names that the config has for them."""
        return self._layers_but(STATELESS_KINDS | RECURRENT_KINDS - {"hybrid"})

    def _layers_but(self, kinds: Collection[str]) -> int:
        named = getattr(self.config, "layer_types", None) or ()
        return self.num_layers - sum(kind in kinds for kind in named)

    @property
    def window(self) -> int | None:
        """Positions that a layer with a sliding window sees; None if no layer has one."""
        return self.config.sliding_window if self._sliding else None

    def forward(
        self,
        ids: Tensor,
        places: Pass | None = None,
        cache: TreeCache | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Run the decoder over `ids` `[B, N]`, and return its last hidden states and `taps`.

        `places` says where they are and what they see; None: as a `Pass` without arguments. A
        node without a token, NO_NODE, runs as token 0, and an unknown token as the last one.
        """
        places = places or Pass()
        positions, masks, spans = places.positions, None, None
        window = None if cache is None else cache.open(ids.shape[1], text=places.depths is None)
        by_kernels = False
        if places.depths is not None:
            assert cache is not None and window is not None, "tree nodes follow a cache's positions"
            ids = ids.clamp(0, self.vocab_size - 1)
            if positions is None:
                slots = places.undecided_depths.shape[1]
                in_tree = cache.positions(places.depths, slots, self.max_positions - 1)
                positions = in_tree.expand(len(ids), -1)
            by_kernels = self.fused is not None and self.fused.takes(ids)
            if not by_kernels:
                masks = tree_masks(places, window, self.dtype, self.window)
        elif places.documents is not None and self.attends_in_documents:
            spans = spans_of(places.documents)
        elif window is None and positions is not None and self.masks_packed_rows:
            masks = packed_masks(positions, self.dtype, self.window)
        # transformers makes the masks of sliding windows for whole texts.
        windowed_text = self._sliding and masks is None and not by_kernels
        with ExitStack() as stack:
            # Without a cache transformers' own layers run, which know neither documents nor which
            # positions were written one by one, in which some do not limit their steps.
            written = places.written is not None and limit_steps(self.mixers)
            apart = places.documents is not None or written
            if self.mixers and (cache is not None or apart):
                states = RecurrentStates() if cache is None else cache.recurrent
                stack.enter_context(over(states, places.complete(ids)))
            if self.fused is not None and window is not None and not windowed_text:
                if positions is None:
                    start = window.get_seq_length()
                    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
                return self.fused(ids, positions, places, masks, window, taps)
            if spans is not None:
                stack.enter_context(in_documents(self.decoder))
            mask = masks and masks.for_transformers(self._mixed)
            hidden = run_decoder(self.decoder, ids, positions, mask, window, taps, spans)
        if self.spread == "devices":  # each layer's states lie where the layer does
            return hidden.map(lambda states: states.to(self.device))
        return hidden

    def fuse(self, move: bool) -> None:
        """Run decoding by a `FusedDecoder` if the model is of Llama's form and both agree.

        Passes without a cache stay transformers' own. With `move` matrices of one input are moved
        into a joint one, of which the model's parameters become views: for a model that nobody else
        changes.
        """
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.num_layers
        if self.spread != "whole" or not of_llama_form(self.decoder, len(kinds)):
            return
        windows = {
            kind: None if self._mixed and kind != "sliding_attention" else self.window
            for kind in kinds
        }
        expected = self._trials()
        self.fused = FusedDecoder(self.decoder, kinds, move, windows)
        fit = self.fused.kernels_fit(self.dtype, self.device)
        for kernels in (True, False) if fit else (False,):
            self.fused.takes_trees = kernels
            reason = self._failed(expected)
            if kernels and not reason:
                reason = self.fused.attention_fault(self.dtype, self.device)
            if not reason:
                return
            what = "kernels for trees are" if kernels else "fused pass is"
            log.info("%s: the %s not used: %s", self._called, what, reason)
        self.fused = None

    def _trials(self) -> list[list[Hidden]]:
        """Return the states of a trial at each of its starts, after every layer."""
        return [self._trial(start, tuple(range(self.num_layers))) for start in self.trial_starts]

    def _failed(self, expected: list[list[Hidden]]) -> str:
        """Return why the fused forward pass does not give the `expected` trials; empty: it does."""
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.05
        try:
            found = self._trials()
        except Exception as error:  # a compiler of kernels may fail in any way
            if self.fused is None or not self.fused.takes(self._trial_ids()[None]):
                raise
            return first_line(error)
        for start, mine, theirs in zip(self.trial_starts, found, expected, strict=True):
            # Each state by itself, since their sizes differ by factors of hundreds.
            pairs = zip(mine, theirs, strict=True)
            states = [zip((a.last, *a.taps), (b.last, *b.taps), strict=True) for a, b in pairs]
            error = max((relative_error(*pair) for pair in chain(*states)), key=nan_last)
            if not error <= tolerance:
                return (
                    f"the fused pass of {self.config.model_type} differs from transformers' by "
                    f"{error:.1e} at positions from {start} on"
                )
            # Rounding is about the same everywhere: low precision must not hide a border.
            if not start:
                tolerance = min(tolerance, 2 * error + 2e-3)
        return ""

    def pack(self) -> None:
        """Pack matrices for a CPU, where that pays.

        The decoder's own matrices are released: it can be run, and not trained. Of the output
        matrix a packed copy is made: the original may be the embedding too, and drafters read it.
        """
        layers = self.fused.layers if self.fused is not None else []
        # Those that decoding multiplies with: joint matrices, where there are any.
        owners = nn.ModuleList(layers) if layers else self.decoder
        linears = [linear for *_, linear in linears_of(owners)]
        head = [self._output] if is_plain(self._output) else []
        if self.spread != "whole" or not pays_to_pack([*linears, *head]):
            return
        if head:
            self._multiply = PackedLinear(self._output)
        before = bytes_of(self.model)
        pack_linears(self.decoder, layers)
        self.packed_bytes = before - bytes_of(self.model)

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
        time, so that the memory of attention stays bounded.
        """
        outputs = []
        for start in range(0, ids.shape[1], chunk):
            piece = ids[:, start : start + chunk]
            end = start + piece.shape[1]
            positions, counts = None, None
            # Past a draft model's own last position its drafts are bad, but the text stays right.
            # Some hybrids begin at position 0 in every pass that names none.
            if end > self.max_positions or self.mixers:
                positions = torch.arange(start, end, device=ids.device)
                positions = positions.clamp(max=self.max_positions - 1).expand(len(ids), -1)
            here = [min(max(length - start, 0), piece.shape[1]) for length in lengths]
            if self.mixers:
                counts = send(here, ids.device)
            places = Pass(positions=positions, counts=counts)
            outputs.append(self.forward(piece, places, cache, taps))
            # Rows that go on have committed all of it, so that the next piece begins at the same
            # slot in all of them.
            cache.commit(here)
        return outputs[0] if len(outputs) == 1 else Hidden.joined(outputs)

    @torch.no_grad()
    def check_tree(self) -> None:
        """Raise `UserError` unless a pass over a tree gives nodes what their paths give alone.

        The trial finds layers that lose their state or take over refused drafts, attention that
        ignores a 4D mask, and position biases that are derived from the mask.
        """
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        for start in self.trial_starts:
            error = self._tree_error(start)
            if not error <= tolerance:  # `error > tolerance` would let NaN pass
                where = f" at positions from {start} on" if start else ""
                raise UserError(
                    f"{self._cannot()}: nodes differ from their own paths{where} (relative "
                    f"difference {error:.1e})"
                )
            # Rounding is about the same everywhere: low precision must not hide a border.
            if not start:
                tolerance = min(tolerance, 3 * error + 1e-2)

    def _tree_error(self, start: int) -> float:
        """Return the relative difference of a trial's nodes from their paths, or `UserError`."""
        try:
            _, tree, after = self._trial(start)
        except UNSUPPORTED as error:
            raise UserError(f"{self._cannot()}: {known_reason(error)}") from error
        # The paths of leaves, and what follows accepted paths, once more without cache and mask.
        prompt, nodes = self._trial_ids().split([PROMPT, TRIAL.nodes])
        found = []
        for path in map(TRIAL.path_to, TRIAL_LEAVES):
            found.append((tree.last[1, path], [*prompt, *nodes[path]]))
        for row, (length, path) in enumerate(zip(TRIAL_LENGTHS, TRIAL_PATHS, strict=True)):
            text = [*prompt[:length], *nodes[list(path)], *prompt[:2]]
            found.append((after.last[row], text))
        errors = []
        for states, tokens in found:
            text = torch.stack(tokens)
            positions = torch.arange(start, start + len(text), device=self.device)[None]
            alone = self.forward(text[None], Pass(positions=positions)).last[0]
            if limit_steps(self.mixers):
                # Prompts alone have limits, see `mixers.Mamba2`: transformers' pass is one of a
                # prompt, and nodes are compared with ours of a reply.
                reply = torch.ones_like(positions, dtype=torch.bool)
                as_prompt, as_reply = (
                    self.forward(text[None], Pass(positions=positions, written=written)).last[0]
                    for written in (~reply, reply)
                )
                errors.append(relative_error(as_prompt, alone))
                alone = as_reply
            errors.append(relative_error(states, alone[-len(states) :]))
        return max(errors, key=nan_last)

    @torch.no_grad()
    def _trial(self, start: int, taps: tuple[int, ...] = ()) -> list[Hidden]:
        """Return the states of two rows over a round: prompts, a tree, and a chain of two after it.

        The rows begin at position `start`, in slot 0 of the cache: masks are those of a short text.
        Their prompts differ in length, and so do the paths that they accept of the tree; the longer
        one leaves a node out.
        """
        ids, tables = self._trial_ids().expand(2, -1), TRIAL.tables(self.device)
        cache, lengths = TreeCache(2, 16, self.device), [*TRIAL_LENGTHS]
        positions = torch.arange(start, start + PROMPT, device=self.device).expand(2, -1)
        in_text = Pass(
            positions=positions,
            counts=send(lengths, self.device),
            written=torch.ones_like(positions, dtype=torch.bool),
        )
        prompts = self.forward(ids[:, :PROMPT], in_text, cache, taps)
        assert cache.layers == self.stateful_layers, "some layers keep no state"
        cache.commit(lengths)
        first = cache.starts()[:, None] + start
        in_tree = Pass(
            positions=first + tables.depths, depths=tables.depths, visible=tables.ancestors
        )
        tree = self.forward(ids[:, PROMPT:], in_tree, cache, taps)
        counts = [len(path) for path in TRIAL_PATHS]
        width = max(counts)
        padded = send([[*path, *[0] * (width - len(path))] for path in TRIAL_PATHS], self.device)
        there = send(counts, self.device)
        cache.commit(Counts(counts, there), padded)
        depths = torch.arange(2, device=self.device)[None]
        causal = torch.ones(1, 2, 2, dtype=torch.bool, device=self.device).tril()
        after = Pass(positions=first + there[:, None] + depths, depths=depths, visible=causal)
        return [prompts, tree, self.forward(ids[:, :2], after, cache, taps)]

    def _trial_ids(self) -> Tensor:
        """Return the tokens of a trial, all different: a prompt and the nodes of a tree."""
        return (torch.arange(PROMPT + TRIAL.nodes, device=self.device) * 7 + 3) % self.vocab_size

    def _cannot(self) -> str:
        attention = "" if self.mixers else "--target.attention sdpa or eager, or "
        return (
            f"{self._called} ({self.config.model_type}) cannot verify draft trees and roll "
            f"back; try {attention}another target"
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `UserError` unless `head` gives the model's own logits, which drafters learn."""
        called = f"{self._called} ({self.config.model_type})"
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        ids = (torch.arange(8, device=self.device) % self.vocab_size)[None]
        for start in self.trial_starts:
            positions = torch.arange(start, start + 8, device=self.device)[None]
            # The model's own forward pass, with whatever it does after its head.
            try:
                whole = self.model(input_ids=ids, position_ids=positions, use_cache=False)
                logits = self.head(self.forward(ids, Pass(positions=positions)).last).float()
            except UNSUPPORTED as error:
                raise UserError(
                    f"{called} cannot be run as a decoder and a head ({known_reason(error)}); name "
                    "another target"
                ) from error
            expected = whole.logits.float()
            if not bool(expected.isfinite().all()):
                raise UserError(
                    f"{self._called} gives logits that are not finite: its weights are damaged "
                    f"(download them again), or they overflow in {dtype_name(self.dtype)} (give "
                    "--target.dtype float32 or bfloat16)"
                )
            error = (expected - logits).abs().max().item() / max(expected.abs().max().item(), 1e-6)
            if not error <= tolerance:
                raise UserError(
                    f"{called} changes its logits after the head in an unknown way (relative "
                    f"difference {error:.1e}); please report this model type"
                )


def run_decoder(
    decoder: Any,
    ids: Tensor,
    positions: Tensor | None,
    mask: Tensor | dict[str, Tensor] | None,
    window: Window | None,
    taps: tuple[int, ...],
    documents: Spans | None = None,
) -> Hidden:
    """Return the last hidden states and the `taps` of a transformers decoder."""
    # Only the tapped states are kept, since all of them hold the memory of every layer. Before 5.23
    # transformers keeps all, and takes a list for numbers of layers, which are one lower.
    kept = (list(taps) or False) if TAPS_BY_NUMBER else bool(taps)
    output = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=window,
        use_cache=window is not None,
        output_hidden_states=kept,
        **({} if documents is None else {"documents": documents}),
    )
    last, tapped = output.last_hidden_state, tuple(output.hidden_states[tap] for tap in taps)
    if any(tap.shape != last.shape for tap in tapped):  # Gemma 3n keeps several streams
        raise UserError(
            f"the layers of {decoder.config.model_type} give several states for a token, which no "
            "drafter here can read; use one that reads none: a draft model, or a lookup"
        )
    return Hidden(last, tapped)


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def nan_last(error: float) -> float:
    """Return an error as a number to compare by: NaN counts as the largest."""
    return math.inf if math.isnan(error) else error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors as a share of that of `expected`."""
    difference = (found - expected).float().norm()
    return (difference / expected.float().norm().clamp(min=1e-6)).item()
