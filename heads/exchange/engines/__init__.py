"""Serving engines: one file for each, which is found by being here.

A file holds what draftsmith knows of its engine as `ENGINE`: how a drafter is exported to it and
what it cannot express, how `--like` imitates it, and how `--server` measures it. Facts are taken
from the source code of vLLM 0.32 and 0.33, SGLang 0.5, TensorRT-LLM's PyTorch backend, llama.cpp
b10434 and TGI of 2026, which says more than their documentation. No file imports torch: the command
line reads the names of the engines before it does anything.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from .engine import ServingEngine

_found = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
_engines: list[ServingEngine] = [file.ENGINE for file in _found if hasattr(file, "ENGINE")]

ENGINES = {engine.name: engine for engine in sorted(_engines, key=lambda e: (e.place, e.name))}
"""All engines by name, in the order in which they are listed."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]
    """Names of the engines, as `draftsmith export --to` takes them."""
