"""Decoding with drafters: target, caches, draft trees, acceptance, decode loop, evaluation.

`load(target, drafter).generate(...)` is the Python API. Its module is imported when one of its
names is first used, so that importing one module of this package does not import all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Decoder, Reply, load

__all__ = ["Decoder", "Reply", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
