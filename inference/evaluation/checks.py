"""Checks of the options of `draftsmith evaluate` before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from ...heads.errors import UserError
from ...heads.files import check_json
from ..base.keys import headers_with_key
from ..base.settings import Sampling, TargetConfig, check_url
from ..conversations.prompts import Prompt, check_source, read_prompts
from ..conversations.rows import InMemoryRows
from ..conversations.templates import check_template_kwargs
from ..profile import read_profile
from ..proposers.registry import check_spec
from ..targets.target_files import base_and_adapter, check_config, read_tokenizer
from .engines import ImitatedEngine
from .measure import Setting
from .options import EvaluateOptions as Options
from .options import TuneOptions

N = TypeVar("N", int, float)


def check(options: Options) -> list[Setting]:
    """Return the settings to measure, a temperature and a batch size each.

    Raises `UserError` for all that can be known to be wrong before a large target is loaded.
    """
    for name in ("limit", "max_new_tokens", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for engine in options.like:
        ImitatedEngine(engine)  # raises for an engine or a setting that is not known
    if (options.like or options.profile) and not options.drafter:
        raise UserError("--like and --profile are about drafters; name one with --drafter")
    if options.profile is not None:
        read_profile(options.profile)
    check_server(options)
    check_source(options.source(options.prompts))
    for spec in options.drafter:
        check_spec(spec)
    check_json(options.json)
    return [
        Setting(sampling, size, options.max_new_tokens, options.repeats)
        for sampling, size in product(*swept(options))
    ]


def swept(options: Options | TuneOptions) -> tuple[list[Sampling], list[int]]:
    """Return the sampling for each temperature of a command, and its batch sizes.

    Raises `UserError`.
    """
    if (fewest := min(options.batch_size, default=0)) < 1:
        raise UserError(f"--batch-size must be at least 1, not {fewest}")
    temperatures = options.temperature or [options.sampling.temperature]
    return [replace(options.sampling, temperature=one) for one in temperatures], options.batch_size


def prompts_of(
    options: Options, tokenizer: Any = None, given: InMemoryRows | None = None
) -> list[Prompt]:
    """Return the prompts that the options name, or those that are `given`.

    Without the target's `tokenizer` it is read, so that an empty prompt or a malformed row is found
    before the target is loaded. Raises `UserError`.
    """
    check_template_kwargs(options.chat_template_kwargs)
    tokenizer = tokenizer_of(options.target) if tokenizer is None else tokenizer
    return read_prompts(
        options.source(options.prompts) if given is None else given,
        tokenizer,
        options.target.path,
        options.limit,
        options.bad_rows,
        options.chat_template_kwargs,
    )


def tokenizer_of(config: TargetConfig) -> Any:
    """Return the tokenizer of a target whose weights are not loaded. Raises `UserError`."""
    path, _ = base_and_adapter(config)
    check_config(path, config.trust_remote_code)
    return read_tokenizer(path, config.trust_remote_code)


def check_server(options: Options) -> None:
    """Raise `UserError` for options that do not go with `server`, or only with it."""
    if options.server is None:
        of_server = ("concurrency", "server_model")
        if given := [name for name in of_server if getattr(options, name)]:
            raise UserError(
                f"--{given[0].replace('_', '-')} is of a server; name it with --server "
                "http://127.0.0.1:8000"
            )
        return
    check_url(options.server, "--server")
    headers_with_key()
    if options.batch_size != [1]:
        raise UserError(
            "--server takes --concurrency 1,8,32 in place of batch sizes; drafters here are "
            "measured one by one"
        )
    if min(options.concurrency, default=1) < 1:
        raise UserError("--concurrency must be at least 1")


def numbers(
    text: str | None, option: str, kind: Callable[[str], N], least: float | None = None
) -> list[N]:
    """Return the numbers of a text such as 1,4,16, each made by `kind`; none where `text` is None.

    Raises `UserError`, which names `option`, for anything else and for numbers below `least`.
    """
    try:
        values = [kind(item) for item in text.split(",")] if text is not None else []
    except ValueError as error:
        raise UserError(f"{option} takes numbers with commas between them, not {text!r}") from error
    for number in values:
        if not math.isfinite(number) or (least is not None and number < least):
            raise UserError(
                f"{option} must be {'finite' if least is None else f'at least {least:g}'}, not "
                f"{number}"
            )
    return values
