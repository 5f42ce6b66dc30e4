"""Sentences on which serving engines will take a run's drafter, before anything is loaded."""

from __future__ import annotations

import logging

from ..heads.errors import UserError
from ..heads.exchange.engines import drafter_facts, refusal, sentences
from ..heads.exchange.engines.engine import DrafterFacts
from ..heads.exchange.exporter import load_alone
from ..heads.fingerprint import numbers_of
from .config import RunConfig
from .endings import is_main_rank
from .method import AnyMethod
from .outline import outlined, target_of_run

log = logging.getLogger(__name__)


def say_engines(run: RunConfig, method: AnyMethod) -> None:
    """Log which engines will take the drafter of a run, and why the others will not.

    The sentences are those of `draftsmith export`. Raises `UserError` if an engine of `run.for_`
    will not take it.
    """
    if not run.for_ and not is_main_rank():  # which has nothing to say
        return
    for line in sentences(check_engines(run, method)):
        log.info("%s", line)


def check_engines(run: RunConfig, method: AnyMethod) -> DrafterFacts:
    """Return the drafter that a run will make, as engines see it.

    Raises `UserError` if an engine of `run.for_` will not take it; see `facts_before`.
    """
    facts = facts_before(run, method)
    for name in run.for_:
        if (reason := refusal(name, facts)) is not None:
            raise UserError(f"{reason} (--for {name})")
    return facts


def facts_before(run: RunConfig, method: AnyMethod) -> DrafterFacts:
    """Return the drafter that a run will make, as engines see it, from configs alone.

    Raises `UserError` where the target has no config that can be read, and for heads that do not
    fit it.
    """
    if run.init_from is not None:
        return drafter_facts(load_alone(run.init_from))
    target = target_of_run(run)
    drafter = outlined(method, run, target).drafter
    return DrafterFacts(
        str(drafter.kind), drafter, target.config.model_type, target.vocab_size,
        numbers_of(target.config),
    )  # fmt: skip
