"""Runs that begin with a drafter: its shape, confirmed against the run's options and the target."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.exchange.exporter import load_alone
from ...heads.files import JsonObject
from ...heads.layers import config_of
from ...heads.medusa import MedusaHeads
from ...inference.targets.target import TargetSource

log = logging.getLogger(__name__)


def check_same(options: Any, init_from: str, stored: JsonObject) -> None:
    """Raise `UserError` if the run's `heads`, `options`, ask for others than those in `stored`."""
    defaults = asdict(type(options)())
    for name, value in asdict(options).items():
        # An option given as its default cannot be distinguished from one that was left out.
        if value not in (defaults[name], stored[name]):
            # A recipe's key cannot be left out, so what it has to be is said.
            right = "null" if stored[name] is None else str(stored[name])
            if defaults[name] is None:
                right = "null, which takes the drafter's"
            raise UserError(
                f"init_from {init_from} has {name} {stored[name]}, heads.{name} says {value}; set "
                f"heads.{name} to {right}"
            )


def take_heads_before(run: Any) -> None:
    """Set `run.heads` to those of the drafter that the run begins with, if it names one.

    Which features are read follows from them. Raises `UserError` for a folder without a drafter,
    and if the run asks for other heads than the drafter has.
    """
    if run.init_from is None or not hasattr(run, "heads"):
        return
    drafter, options_class = load_alone(run.init_from).drafter, type(run.heads)
    if isinstance(drafter, MedusaHeads):
        stored = asdict(drafter.config)
    else:
        stored = config_of(drafter.shape, options_class)
    check_same(run.heads, run.init_from, stored)
    run.heads = options_class(**stored)


def shape_before(
    options: Any, init_from: str, target: TargetSource, before: Artifact, configs: Any
) -> Any:
    """Return the shape of the drafter that the run begins with.

    Differences to what its target would have now are logged as warnings. `options` are the run's
    `heads`, `configs` the module of `heads/` with `shape_for`.
    Raises `UserError` if the run asks for another shape.
    """
    shape = before.drafter.shape
    options_class = type(options)
    stored = config_of(shape, options_class)
    check_same(options, init_from, stored)
    listed = ", ".join(f"{name} {value}" for name, value in stored.items())
    log.info("going on from %s: %s", init_from, listed)
    # Block drafters have a token for the slots that are to be drafted, which no option names.
    own = [shape.mask_token] if hasattr(shape, "mask_token") else []
    expected = asdict(configs.shape_for(options_class(**stored), target.config, *own))
    for name, value in asdict(shape).items():
        if expected[name] != value:
            log.warning(
                "the drafter keeps %s %s, though the target has %s", name, value, expected[name]
            )
    return shape
