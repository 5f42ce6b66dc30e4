"""State of recurrent layers over draft trees: no copy for each node, and nothing is taken back.

Such a layer has a matrix S for each head, of which every position makes `S <- exp(g) S + k d^T` and
reads `q S`; d is given, or a correction of what S holds for k (the delta rule). So the state after
a node is a sum over its ancestors: one pass over a tree is the chunk form of the layer with the
mask of ancestors in place of the causal one. What a pass adds is kept as keys, corrections and
decays until a path is accepted. The commit is then one product, and no layer runs again. The
derivation is in docs/verification.md#recurrent-layers.

A position that a row does not have (padding, or a node that was not accepted) gets the weight 0.

Shapes: B rows of a batch, N positions of one forward pass, U undecided slots of which these are the
last, A nodes of a path, L layers of equal shape, G key heads, R value heads of each key head, K and
V sizes of keys and values, C channels and W width of a convolution. Decays are logarithms, and D is
1, or K where each channel of a key has its own. All but the convolution is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .device import static_address
from .tree import Pass

CHUNK = 64
"""Positions of a text that are computed at once."""
CHANNEL_CHUNK = 16
"""The same where each channel has its own decay, whose pairs hold K numbers."""


@dataclass
class Terms:
    """Terms of a layer's recurrence at N positions."""

    queries: Tensor  # [B, G, 1, N, K]
    keys: Tensor  # [B, G, 1, N, K]
    values: Tensor  # [B, G, R, N, V]
    decays: Tensor  # [B, G, R, N, D]
    strength: Tensor  # [B, G, R, N]: beta of the delta rule, or what values are multiplied by


class PendingUpdates(NamedTuple):
    """Contributions of U undecided nodes to the matrices, if they are accepted."""

    keys: Tensor  # [B, G, 1, U, K]
    corrections: Tensor  # [B, G, R, U, V]
    decays: Tensor  # [B, G, R, U, D]
    sums: Tensor  # [B, G, R, U, D]: of the decays along each node's path, with its own


class RecurrentState:
    """State of one recurrent layer: what is committed, and what undecided nodes would add."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        """[B, W - 1, C]: the last committed inputs of the convolution."""
        self.matrix: Tensor | None = None
        """[B, G, R, K, V]; None for a layer that is a convolution alone."""
        self.new_inputs: Tensor | None = None
        """[B, U, C]: inputs of the undecided nodes."""
        self.added: PendingUpdates | None = None

    def truncate(self, undecided: int) -> None:
        """Keep the first `undecided` undecided nodes, and forget the others."""
        if not undecided:
            self.new_inputs = self.added = None
        elif self.new_inputs is not None and self.new_inputs.shape[1] > undecided:
            self.new_inputs = self.new_inputs[:, :undecided]
            if self.added is not None:
                self.added = PendingUpdates(*(x[:, :, :, :undecided] for x in self.added))

    def keep(self, index: Tensor) -> None:
        """Drop every batch row of the undecided nodes but those in `index`."""
        if self.new_inputs is not None:
            index = index.to(self.new_inputs.device)
            self.new_inputs = self.new_inputs.index_select(0, index)
        if self.added is not None:
            self.added = PendingUpdates(*(x.index_select(0, index) for x in self.added))

    def convolve(
        self, new: Tensor, weight: Tensor, places: Pass, bias: Tensor | None = None
    ) -> Tensor:
        """Return the convolution `[B, N, C]` of inputs `new` `[B, N, C]` by `weight` `[W, C]`.

        It is summed in float32 at least, and has the dtype of `new`.
        """
        width, (batch, count, channels) = len(weight), new.shape
        wide = torch.promote_types(new.dtype, torch.float32)
        weight = weight.to(wide)
        if self.inputs is None:
            self.inputs = new.new_zeros(batch, width - 1, channels)
        parts = [self.inputs] if self.new_inputs is None else [self.inputs, self.new_inputs]
        every = torch.cat([*parts, new], 1)
        if places.counts is not None:
            near = places.documents
            before = None if near is None else functional.pad(near, (width - 1, 0), value=-1)
            mixed = torch.zeros_like(new, dtype=wide) if bias is None else bias.to(wide)
            for back in range(width):
                read = every[:, back : back + count]
                if before is not None:  # an input of another document counts as none
                    read = read * (before[:, back : back + count] == near)[..., None]
                mixed = mixed + read * weight[back]
            if near is None:
                self.inputs.copy_(_windows_after(every, places.counts, width - 1))
            return mixed.to(new.dtype)
        self.new_inputs = every[:, width - 1 :]
        windows = places.windows(width)
        if len(windows) == 1:
            read = every[:, windows[0]]
        else:
            index = windows.flatten(1)[..., None].expand(-1, -1, channels)
            read = every.gather(1, index).unflatten(1, windows.shape[1:])
        mixed = (read * weight).sum(2)
        return (mixed if bias is None else mixed + bias.to(wide)).to(new.dtype)

    def recur(self, terms: Terms, delta: bool, places: Pass) -> Tensor:
        """Return what the positions read, `[B, G, R, N, V]`.

        `delta`: values are corrected by what the matrix holds for their keys.
        """
        if self.matrix is None:
            shape = *terms.values.shape[:3], terms.keys.shape[-1], terms.values.shape[-1]
            self.matrix = terms.values.new_zeros(shape)
        if places.counts is not None:
            return self._over_text(terms, delta, places.counts, places.documents)
        assert places.visible is not None
        read, self.added = over_nodes(
            self.matrix, self.added, terms, delta, places.visible[:, None, None]
        )
        return read

    def _over_text(
        self, terms: Terms, delta: bool, counts: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Take over `counts[b]` positions of each row b, a chunk at a time."""
        assert self.matrix is not None and self.added is None
        count, channels = terms.keys.shape[3], terms.decays.shape[-1] > 1
        size = CHANNEL_CHUNK if channels else CHUNK
        # A position that a row does not have changes nothing: no decay, and no correction.
        has = torch.arange(count, device=counts.device) < counts[:, None]
        has = has[:, None, None].to(terms.strength.dtype)
        decays, strength = terms.decays * has[..., None], terms.strength * has
        causal = torch.ones(size, size, dtype=torch.bool, device=counts.device).tril()
        matrix, reads = self.matrix, []
        for start in range(0, count, size):
            piece = slice(start, start + size)
            part = Terms(
                queries=terms.queries[:, :, :, piece],
                keys=terms.keys[:, :, :, piece],
                values=terms.values[:, :, :, piece],
                decays=decays[:, :, :, piece],
                strength=strength[:, :, :, piece],
            )
            length = part.keys.shape[3]
            see = causal[:length, :length][None, None, None]
            if documents is not None:
                here = documents[:, piece]
                see = see & (here[:, :, None] == here[:, None])[:, None, None]
                # The matrix is of the document before the chunk.
                before = documents[:, max(start - 1, 0)][:, None]
                goes_on = (here == before)[:, None, None, :, None]
                # Queries and keys of other documents find nothing in it.
                read, added = over_nodes(matrix, None, part, delta, see, goes_on)
                end = here[:, -1:]
                matrix = _after(matrix * (end == before)[..., None, None, None], added, here == end)
            else:
                read, added = over_nodes(matrix, None, part, delta, see)
                matrix = _after(matrix, added)
            reads.append(read)
        if documents is None:
            self.matrix.copy_(matrix)
        return torch.cat(reads, 3)


def over_nodes(
    matrix: Tensor,
    earlier: PendingUpdates | None,
    terms: Terms,
    delta: bool,
    see: Tensor,
    goes_on: Tensor | None = None,
) -> tuple[Tensor, PendingUpdates]:
    """Return what N nodes read, `[B, G, R, N, V]`, and what all undecided nodes would add.

    `matrix` `[B, G, R, K, V]` is the committed state, `earlier` the nodes before these. `see`
    `[1 | B, 1, 1, N, U]` bool says which nodes are on the path of each, itself among them. Parents
    come before their children. `goes_on` `[B, 1, 1, N, 1]` is false where the matrix is another
    document's.
    """
    keys, decays, sums = terms.keys, terms.decays, None
    if earlier is not None:
        keys = torch.cat([earlier.keys, keys], 3)
        decays = torch.cat([earlier.decays, decays], 3)
    own = see.to(decays.dtype) @ decays  # [B, G, R, N, D]
    sums = own if earlier is None else torch.cat([earlier.sums, own], 3)
    before = keys.shape[3] - own.shape[3]
    decay = _decay_between(own, sums, see)
    decayed = own.exp() if goes_on is None else own.exp() * goes_on
    if delta:
        # Unitriangular: correction n is strength * (value - decayed key @ matrix - what its
        # ancestors' corrections hold for its key).
        # The solver does not read the diagonal, where a node sees itself.
        system = terms.strength[..., None] * _pairs(terms.keys, keys, decay)
        right = terms.strength[..., None] * (terms.values - (terms.keys * decayed) @ matrix)
        if earlier is not None:
            right = right - system[..., :before] @ earlier.corrections
        new = right
        if own.shape[3] > 1:
            new = torch.linalg.solve_triangular(
                system[..., before:], right, upper=False, unitriangular=True
            )
    else:
        new = terms.strength[..., None] * terms.values
    corrections = new if earlier is None else torch.cat([earlier.corrections, new], 3)
    read = (terms.queries * decayed) @ matrix
    read = read + _pairs(terms.queries, keys, decay) @ corrections
    return read, PendingUpdates(keys, corrections, decays, sums)


def _decay_between(own: Tensor, sums: Tensor, see: Tensor) -> Tensor:
    """Return what is left at N nodes of the contributions of U; 0 where a node does not see one.

    It is `[B, G, R, N, U]`, or with a decay for each channel `[B, G, R, N, U, K]`: for 60 nodes
    with 32 heads of 128 channels 59 MB a row.
    """
    # Minus infinity comes before the exponential: off the path a difference may be positive.
    if own.shape[-1] == 1:
        return (own - sums.mT).masked_fill(~see, -torch.inf).exp()
    between = own[..., :, None, :] - sums[..., None, :, :]
    return between.masked_fill(~see[..., None], -torch.inf).exp()


def _pairs(left: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """Return `[B, G, R, N, U]`: products of `left` with `keys` that have decayed on the way."""
    if decay.ndim == left.ndim:
        return (left @ keys.mT) * decay
    return (left[..., :, None, :] * keys[..., None, :, :] * decay).sum(-1)


def _after(matrix: Tensor, added: PendingUpdates, counted: Tensor | None = None) -> Tensor:
    """Return the matrix after all nodes of a chain, of which `counted` `[B, U]` bool add to it."""
    end = added.sums[:, :, :, -1:]
    rest = end - added.sums
    if counted is not None:
        rest = rest.masked_fill(~counted[:, None, None, :, None], -torch.inf)
    weighted = added.keys * rest.exp()
    return end.mT.exp() * matrix + weighted.mT @ added.corrections


def _windows_after(inputs: Tensor, counts: Tensor, width: int) -> Tensor:
    """Return the `width` inputs that end `counts[b]` after the first `width` of each row b."""
    index = counts[:, None] + torch.arange(width, device=inputs.device)
    return inputs.gather(1, index[..., None].expand(-1, -1, inputs.shape[-1]))


class RecurrentStates:
    """States of the recurrent layers of a batch. Equal shapes lie in one tensor, for the commit."""

    def __init__(self) -> None:
        self.layers: dict[int, RecurrentState] = {}
        self._groups: list[_Stacked] = []

    def of(self, layer: int) -> RecurrentState:
        """Return the state of a layer, empty if it has none yet."""
        if layer not in self.layers:
            self.layers[layer] = RecurrentState()
            self._groups = []
        return self.layers[layer]

    def truncate(self, undecided: int) -> None:
        """Keep the first `undecided` undecided nodes, and forget the others."""
        for state in self.layers.values():
            state.truncate(undecided)

    def commit(self, counts: Tensor, path: Tensor | None) -> None:
        """Take over the first `counts[b]` nodes of `path[b]` `[B, A]`; the others are forgotten.

        Without `path` they are the first undecided ones. States must have their place.
        """
        for group in self._groups:
            group.commit(counts, path)

    @property
    def undecided(self) -> bool:
        """True if a commit has something to take over."""
        return any(state.new_inputs is not None for state in self.layers.values())

    def keep(self, index: Tensor) -> None:
        """Drop every batch row but those in `index`."""
        self.place()
        for group in self._groups:
            group.keep(index)

    def reset(self) -> None:
        """Forget everything, at the same addresses."""
        self.truncate(0)
        if not self._groups:  # a prefill that failed has left states of some layers alone
            self.layers.clear()
        for group in self._groups:
            group.inputs.zero_()
            if group.matrices is not None:
                group.matrices.zero_()

    def place(self) -> None:
        """Put states of one shape into one tensor, once all layers have run; a prefill's commit."""
        if self._groups or not self.layers:
            return
        kinds: dict[tuple[object, ...], list[RecurrentState]] = {}
        for state in self.layers.values():
            kinds.setdefault(tuple(_kind(state)), []).append(state)
        self._groups = [_Stacked(states) for states in kinds.values()]


def _kind(state: RecurrentState) -> Iterator[object]:
    """Yield what the states of a group have in common."""
    for tensor in (state.inputs, state.matrix):
        if tensor is not None:
            yield from (tensor.shape, tensor.dtype, tensor.device)


class _Stacked:
    """States of L layers of equal shape, of which those of the layers are views."""

    def __init__(self, states: Sequence[RecurrentState]) -> None:
        self._states = states
        self._place(
            torch.stack([state.inputs for state in states if state.inputs is not None]),
            torch.stack([state.matrix for state in states if state.matrix is not None])
            if states[0].matrix is not None
            else None,
        )

    def _place(self, inputs: Tensor, matrices: Tensor | None) -> None:
        self.inputs = static_address(inputs)
        """[L, B, W - 1, C]."""
        self.matrices = None if matrices is None else static_address(matrices)
        """[L, B, G, R, K, V]; None for convolutions alone."""
        for layer, state in enumerate(self._states):
            state.inputs = self.inputs[layer]
            state.matrix = None if self.matrices is None else self.matrices[layer]

    def keep(self, index: Tensor) -> None:
        """Drop every batch row but those in `index`."""
        index = index.to(self.inputs.device)
        for state in self._states:
            state.keep(index)
        matrices = self.matrices
        self._place(
            self.inputs.index_select(1, index),
            None if matrices is None else matrices.index_select(1, index),
        )

    def commit(self, counts: Tensor, path: Tensor | None) -> None:
        """Take over nodes, see `RecurrentStates.commit`."""
        new = [state.new_inputs for state in self._states if state.new_inputs is not None]
        if not new:
            return
        batch, undecided, _ = new[0].shape
        device = self.inputs.device
        counts = counts.to(device)
        if path is None:
            path = torch.arange(undecided, device=device).expand(batch, -1)
        path = path.to(device)
        self._take_inputs(new, counts, path)
        if self.matrices is not None:
            self._take_added(self.matrices, counts, path)
        for state in self._states:
            state.truncate(0)

    def _take_inputs(self, new: list[Tensor], counts: Tensor, path: Tensor) -> None:
        width = self.inputs.shape[2]
        every = torch.cat([self.inputs, _along(new, path)], 2)
        counts = counts.expand(len(new), -1).flatten()
        taken = _windows_after(every.flatten(0, 1), counts, width)
        self.inputs.copy_(taken.unflatten(0, self.inputs.shape[:2]))

    def _take_added(self, matrices: Tensor, counts: Tensor, path: Tensor) -> None:
        added = [state.added for state in self._states if state.added is not None]
        keys, corrections, sums = (
            _along([getattr(each, name) for each in added], path)
            for name in ("keys", "corrections", "sums")
        )
        # The last accepted node's sum; a row that accepts nothing does not decay.
        last = (counts - 1).clamp(min=0)[None, :, None, None, None, None]
        end = sums.gather(4, last.expand(*sums.shape[:4], 1, sums.shape[5]))
        taken = (torch.arange(path.shape[1], device=path.device) < counts[:, None])[
            None, :, None, None, :, None
        ]
        end = torch.where((counts > 0)[None, :, None, None, None, None], end, 0.0)
        # Before the exponential: a node past the count may have a larger sum than the last one.
        weights = (end - sums).masked_fill(~taken, -torch.inf).exp()
        # In place: a recorded round finds the state where it was, and memory is read once less.
        matrices.mul_(end.mT.exp())
        matrices.flatten(0, 3).baddbmm_(
            (keys * weights).mT.flatten(0, 3), corrections.flatten(0, 3)
        )


def _along(layers: list[Tensor], path: Tensor) -> Tensor:
    """Return nodes `path` `[B, A]` of tensors `[B, .., U, X]` of L layers: `[L, B, .., A, X]`."""
    if len(path) == 1:
        # One row needs no index for each number, and most nodes of a tree are not on its path.
        nodes = path[0]
        if path.device.type == "cuda":  # fewer kernels
            return torch.stack(layers).index_select(-2, nodes)
        return torch.stack([layer.index_select(-2, nodes) for layer in layers])
    stacked = torch.stack(layers)
    index = path.reshape(1, len(path), *[1] * (stacked.ndim - 4), path.shape[1], 1)
    return stacked.gather(
        -2, index.expand(*stacked.shape[:-2], *path.shape[1:], layers[0].shape[-1])
    )
