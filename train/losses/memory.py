"""Recomputation: less memory for what the backward pass needs, for more work.

accelerate and transformers have it too, but by wrapping a module's own layers, and for models in
training mode. draftsmith's own are needed because EAGLE's unrolled steps are not layers, draft
models learn without dropout (in evaluation mode), and objectives read weights next to the modules
that own them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` in a form that keeps only its arguments for the backward pass.

    There it runs a second time (arXiv 1604.06174).
    """
    # The reentrant form takes no keyword arguments, which layers of transformers get, and gives no
    # gradients where no argument of its own needs one.
    return partial(checkpoint, function, use_reentrant=False)


@contextmanager
def recomputed(
    layers: Iterable[nn.Module], within: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Make each of the layers `recomputing` within this context, in any mode of the model.

    Both runs of a layer are in a context of `within`; the second comes after this one has ended.
    """

    def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with within():
            return function(*arguments, **options)

    # Gone through twice, so that a generator would be empty the second time.
    layers = list(layers)
    for layer in layers:
        layer.forward = recomputing(partial(run, layer.forward))
    try:
        yield
    finally:
        # The assignment shadowed the method of the class by an attribute of the instance.
        for layer in layers:
            del layer.forward
