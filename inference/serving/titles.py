"""What the page says of the target and the drafters: titles, sizes, and whether it writes code."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub.repocard import metadata_load
from yaml import YAMLError

from ...heads.exchange.exports import TITLES
from ..evaluation.names import CHECKPOINT
from ..proposer import Proposer
from ..targets.target import Target

GENERIC = re.compile(rf"target|model|final|checkpoint-\d+|{CHECKPOINT.pattern}")
"""Last parts of a target's path that do not tell it from others."""


def target_title(path: str) -> str:
    """Return the last part of a target's path, with the parts above it while that is generic."""
    parts = Path(path).parts
    first = len(parts) - 1
    while first > 0 and GENERIC.fullmatch(parts[first]):
        first -= 1
    return "/".join(parts[max(first, 0) :]).strip("/") or path


def target_facts(target: Target) -> str:
    """Return the target's architecture, depth, width, type of numbers and device in a few words."""
    config = target.model.config.get_text_config()
    numbers = str(target.dtype).removeprefix("torch.")
    return (
        f"{target.model.config.model_type}, {config.num_hidden_layers} layers, "
        f"hidden size {config.hidden_size}, {numbers}, {target.device.type}"
    )


def drafter_title(proposer: Proposer) -> str:
    """Return a drafter's method, the size of its drafts, and the settings that a user gave it.

    Example: "EAGLE-3, chains of 4", "EAGLE-3, trees of 26 nodes, lookup=3".
    """
    method, _, settings = proposer.name.partition(":")
    parts = [TITLES.get(method.replace("-", "_"), method)]
    # A lookup stands in for the drafts of the drafter inside it.
    plan = getattr(getattr(proposer, "trained", proposer), "plan", None)
    said: tuple[str, ...] = ()  # settings that the size of the drafts says already
    if plan is not None and plan.width == 1:
        parts.append(f"chains of {plan.nodes}")
        said = ("length=", "width=", "nodes=")
    elif plan is not None:
        parts.append(f"trees of {plan.nodes} nodes")
        said = ("nodes=",)
    parts += [one for one in settings.split(",") if one and not one.startswith(said)]
    return ", ".join(parts)


def writes_code(path: str) -> bool:
    """Return true if the model card in a target's folder has the tag "code"."""
    try:
        card = metadata_load(Path(path, "README.md")) or {}
    except (OSError, ValueError, YAMLError):  # there is none, or it is damaged
        return False
    tags = card.get("tags")
    return isinstance(tags, list) and "code" in tags
