"""How a drafter is used: the target and its cache, trees, acceptance, proposers, the decode loop,
evaluation.

`load(target, drafter).generate(...)` is the Python API; it is imported when it is first asked for,
so that importing one module of this room does not import all.
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
