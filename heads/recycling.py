"""Base of drafters that go on from their own output: EAGLE drafters and MTP layers.

A row at position t pairs a state of t with the token at t + 1, and predicts the token at t + 2. The
first state is the target's. For the next draft the drafter's own output is recycled as the state of
the next row (docs/notation.md#positions).

Shapes: B rows of the batch, N rows of one pass, H hidden size, Ht the target's hidden size, V
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from .layers import Attend, LayeredDrafter


class RecyclingDrafter(LayeredDrafter):
    """Contract with the proposer that drafts a level at a time, and with the unrolled training."""

    drafts_by_level = True
    fc: nn.Linear
    """Layer that every row's input passes."""
    reads_last: bool
    """True if rows begin with the target's last hidden state, false if with its taps."""
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Function from positions `[B, N]` to their cosines and sines, as `advance` takes them."""

    @abstractmethod
    def fuse(self, taps: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """Return the state `[B, N, H]` with which rows begin, from the target's features.

        These are its `taps` and its `last` hidden states, `[B, N, Ht]` each.
        """

    @abstractmethod
    def token_part(self, ids: Tensor) -> Tensor:
        """Return the tokens' part of the product in which tokens `ids` `[B, N]` and states meet.

        Training computes this part once for all unrolled steps.
        """

    @abstractmethod
    def advance(
        self, token_part: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return the layers' output `[B, N, H]` of one pass.

        `state` `[B, N, H]` comes from `fuse`, or for drafts of a greater depth from `recycled`.
        """

    def recycled(self, output: Tensor) -> Tensor:
        """Return the layers' output as the state `[B, N, H]` of the next row."""
        return output

    def feature(self, output: Tensor) -> Tensor:
        """Return the layers' output `[..., H]` in the scale of the target's last hidden state.

        A feature loss compares the two (docs/objectives.md#eagle).
        """
        return output

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` for the layers' output `[..., H]`."""

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters of the drafter that `logits` reads."""
        return []
