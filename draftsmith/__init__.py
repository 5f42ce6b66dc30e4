"""Draft models for speculative decoding: trained, measured, exported, and decoded with.

    import draftsmith

    decoder = draftsmith.load(TARGET, DRAFTER)
    reply = decoder.generate("How are you?", max_new_tokens=64)

    best = draftsmith.train("eagle", target=TARGET, data="replies.jsonl", out="runs/mine")
    report = draftsmith.evaluate(TARGET, best, "held_out.jsonl")
    draftsmith.export(best, "vllm", "exports/mine")

What is here is imported when it is first used, since torch takes seconds.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands.python import evaluate as evaluate
    from .commands.python import export as export
    from .commands.python import train as train
    from .heads.errors import UserError as UserError
    from .heads.exchange.hub import Drafter as Drafter
    from .inference.api import Decoder as Decoder
    from .inference.api import Reply as Reply
    from .inference.api import load as load
    from .inference.base.settings import Sampling as Sampling
    from .inference.proposers.contract import Proposer as Proposer
    from .train.config import Callback as Callback

    __version__: str

_MODULES = {
    "Callback": ".train.config",
    "Decoder": ".inference.api",
    "Drafter": ".heads.exchange.hub",
    "Proposer": ".inference.proposers.contract",
    "Reply": ".inference.api",
    "Sampling": ".inference.base.settings",
    "UserError": ".heads.errors",
    "evaluate": ".commands.python",
    "export": ".commands.python",
    "load": ".inference.api",
}
__all__ = [
    "Callback", "Decoder", "Drafter", "Proposer", "Reply", "Sampling", "UserError", "__version__",
    "evaluate", "export", "load", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return what was asked for, imported now."""
    if name == "__version__":
        return metadata.version("draftsmith")
    if name == "train":  # the package, which can be called as the function of its name
        return importlib.import_module(".train", __name__)
    if name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name], __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
