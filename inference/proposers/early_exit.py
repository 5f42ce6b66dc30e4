"""Self-speculation: the target's first layers draft, with its own final norm and head.

The method is that of arXiv 2309.08168 and 2404.16710. The drafting layers read and write the
target's own cache. Verification overwrites whatever they write for undecided positions, so drafting
needs no cache, no catching up and no weights of its own.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.errors import UserError
from ..proposer import Prompts, Proposer
from ..rounds.cache import TreeCache
from ..rounds.device import row_of
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree
from ..targets.masks import Pass
from ..targets.target import Target
from ..tree_settings import TreeSettings, positive
from .cached import TreeRunner
from .tree_plan import DEFAULT_TREE, TreePlan

DEFAULT_LENGTH = 4


class EarlyExit(Proposer):
    """Proposer that drafts with the first layers of the target."""

    name = "early-exit"

    def __init__(
        self,
        target: Target,
        layers: int | None = None,
        settings: TreeSettings = DEFAULT_TREE,
    ) -> None:
        """Draft with the first `layers` of the target's layers, by default half of them.

        Raises `UserError` for a target that cannot run some of its layers alone.
        """
        layers = positive(
            "layers", layers if layers is not None else max(target.num_layers // 2, 1)
        )
        self._first_layers = first_layers(target, layers)
        self.plan = TreePlan(settings.or_else(length=DEFAULT_LENGTH, width=1))
        # Growing a wide tree may take more undecided slots of the target's cache than verifying the
        # best of its nodes.
        self.max_drafted = max(self.plan.nodes, self.plan.expanded)
        # A chain that ends where the drafter is unsure asks the device.
        self.traceable = not self.plan.threshold
        self._cache: TreeCache | None = None

    def prefill(self, prompts: Prompts) -> None:
        # The prefill of the target has written the first layers' keys and values already.
        self._cache = prompts.cache

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the drafts of the first layers below `root` `[B]`.

        The root is not in the target's cache yet, so the first layers run it too, at depth 0.
        """
        assert self._cache is not None, "prefill first"
        model, cache = self._first_layers, self._cache
        nodes = Pass(depths=row_of((0,), root.device))
        first = model.head(model.forward(root[:, None], nodes, cache).last)[:, 0]
        cache.stage(1)
        tree, _ = self.plan.draft(first, root, draws, TreeRunner(model, cache, root_undecided=True))
        cache.drop()  # verification overwrites all of it
        return tree

    # The cache is the target's own, and the decode loop commits and cuts it.

    def finish(self) -> None:
        self._cache = None


def first_layers(target: Target, layers: int) -> Target:
    """Return `target` with only its first layers, sharing all weights.

    The decoder is copied shallowly with a config of its own, so that nothing of the target changes.
    Raises `UserError` where a model runs all its layers, as GPT-2 and GPT-NeoX do, whatever
    `num_hidden_layers` of its config says.
    """
    if layers > target.num_layers:
        raise UserError(
            f"early-exit: the target has {target.num_layers} layers, {layers} were asked for"
        )
    shallow = copy.copy(target)
    shallow.decoder = copy.copy(target.decoder)
    # Set before the trial: decoders take the number of layers from their config at each forward
    # pass, where they do not run all of their list.
    shallow.config = shallow.decoder.config = config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):  # of which transformers demands one for each layer
        with suppress(AttributeError):  # some configs derive them from the number of layers
            config.layer_types = config.layer_types[:layers]
    keep_first(shallow.decoder, layers)
    shallow.keep_layers(layers)
    # Found by trying: every layer that runs leaves a state.
    cache = TreeCache(1, 4, target.device)
    try:
        with torch.inference_mode():
            shallow.forward(torch.zeros(1, 2, dtype=torch.long, device=target.device), cache=cache)
        ran = len(cache)
        wanted = shallow.stateful_layers
    except IndexError:  # a layer past the last looked itself up in the shortened config
        ran, wanted = target.num_layers, layers
    if ran != wanted:
        raise UserError(
            f"early-exit cannot draft for {target.name} ({target.config.model_type}): this "
            "architecture runs all its layers whatever its config says; use ngram, suffix, "
            "lookahead or a small model"
        )
    return shallow


def keep_first(decoder: Any, layers: int) -> None:
    """Cut the list of a decoder, which is a shallow copy, to its first `layers`."""
    # Some decoders run all of their list, whatever the config says.
    decoder._modules = dict(decoder._modules)  # else it is that of the whole decoder
    for name, part in decoder._modules.items():
        if isinstance(part, nn.ModuleList) and len(part) > layers:
            decoder._modules[name] = part[:layers]
