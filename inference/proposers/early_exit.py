"""Self-speculation: the target's own first layers draft, with its final norm and head (arXiv
2309.08168, 2404.16710).

The drafting layers read and write the target's own cache: what they write for the undecided
positions is what verification writes there again, so drafting needs no cache, no catching up and no
weights of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..cache import TreeCache
from ..proposer import Accepted, Prompts
from ..sampling import Draws
from ..target import Target
from ..tree import DraftTree
from ..tree_settings import TreeSettings, positive
from .autoregressive import depth_row
from .growth import Level
from .tree_plan import TreePlan

DEFAULT_LENGTH = 4
DEFAULT_TREE = TreeSettings()


class EarlyExit:
    """Drafts with the first `layers` of the target's layers (half of them if not given)."""

    name = "early-exit"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        target: Target,
        layers: int | None = None,
        settings: TreeSettings = DEFAULT_TREE,
    ) -> None:
        layers = positive(
            "layers", layers if layers is not None else max(target.num_layers // 2, 1)
        )
        self._first_layers = first_layers(target, layers)
        self.plan = TreePlan(settings.or_else(length=DEFAULT_LENGTH, width=1))
        # Walking a wide tree may take more undecided slots of the target's cache than verifying its
        # best nodes.
        self.max_drafted = max(self.plan.nodes, self.plan.expanded)
        self._cache: TreeCache | None = None

    def prefill(self, prompts: Prompts) -> None:
        self._cache = prompts.cache

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        assert self._cache is not None, "prefill first"
        depths: tuple[int, ...] = (0,)
        logits = self._run(
            root[:, None], None, depth_row(depths, root.device), depth_row(depths, root.device)
        )

        def go_on(level: Level) -> Tensor:
            nonlocal depths
            here = (level.depth,) * level.tokens.shape[1]
            depths += here
            visible = level.visible
            if visible is not None:
                # the root's slot
                visible = torch.cat([visible.new_ones(*visible.shape[:2], 1), visible], dim=-1)
            return self._run(
                level.tokens, visible, depth_row(here, root.device), depth_row(depths, root.device)
            )

        tree, _ = self.plan.draft(logits[:, 0], root, draws, go_on)
        self._cache.staged = 0  # verification writes all of it again
        return tree

    def _run(
        self, tokens: Tensor, visible: Tensor | None, depths: Tensor, slot_depths: Tensor
    ) -> Tensor:
        assert self._cache is not None
        hidden = self._first_layers.forward_tree(tokens, visible, depths, slot_depths, self._cache)
        self._cache.stage(tokens.shape[1])
        return self._first_layers.head(hidden.last)

    def commit(self, accepted: Accepted) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def finish(self) -> None:
        self._cache = None


def first_layers(target: Target, layers: int) -> Target:
    """`target` with only its first layers, sharing all weights. Raises `UserError` where the model
    does not follow its config.

    The decoder is copied shallowly with a config of its own, so nothing of the target changes.
    GPT-2 and GPT-NeoX run every layer they hold, whatever `num_hidden_layers` says; such targets
    are found by counting the layers that really run.
    """
    if layers > target.num_layers:
        raise UserError(
            f"early-exit: the target has {target.num_layers} layers, {layers} were asked for"
        )
    shallow = copy.copy(target)
    shallow.config = _shortened(target.config, layers)
    shallow.decoder = copy.copy(target.decoder)
    shallow.decoder.config = shallow.config
    cache = TreeCache(1, 4, target.device)
    try:
        with torch.inference_mode():
            shallow.forward(torch.zeros(1, 2, dtype=torch.long, device=target.device), cache=cache)
        ran = len(cache)
    except IndexError:  # a layer past the last looked itself up in the shortened config
        ran = target.num_layers
    if ran != layers:
        raise UserError(
            f"early-exit cannot draft for {target.name} ({target.config.model_type}): this "
            "architecture runs all its layers "
            "whatever its config says; use ngram, suffix, lookahead or a small model"
        )
    return shallow


def _shortened(config: Any, layers: int) -> Any:
    shortened = copy.deepcopy(config)
    shortened.num_hidden_layers = layers
    if getattr(shortened, "layer_types", None):
        shortened.layer_types = shortened.layer_types[:layers]
    return shortened
