"""The functions of `import draftsmith`: what the commands do, from Python.

Messages name options as the command line does: `--data.max-length` is `data.max_length` here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, cast

from transformers import PreTrainedModel

from ..command_line.parse import options_from
from ..command_line.process import SIGNALS
from ..heads.errors import UserError
from ..heads.exchange.hub import Drafter, upload
from ..inference.base.output_paths import check_output_folder
from ..inference.base.settings import TargetConfig
from ..inference.conversations.rows import rows_in_memory, write_rows
from ..inference.evaluation.options import EvaluateOptions
from ..inference.evaluation.results import Report
from ..inference.proposers.contract import Proposer
from ..inference.targets.target import Target, target_of
from ..train.config import Callback
from ..train.data.config import Data, Source
from ..train.method import AnyMethod

AnyPath = str | PathLike[str]
ROWS_FILE = "rows.jsonl"
"""File of a run's folder for rows that were given as objects."""


def train(
    method: str | type[AnyMethod],
    target: AnyPath | None = None,
    data: Any = None,
    out: AnyPath | None = None,
    *,
    config: AnyPath | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    **options: Any,
) -> Path:
    """Train a drafter, and return the folder of the best one.

    `method` is medusa, eagle, dflash, dspark, mtp or distill, or a `train.method.Method` of your
    own: its class, or `module:Class`. `target` is the model's folder or name on the hub. `data` is
    a file of conversations, the name of a data set on the hub, a list of them, a list of rows
    (dicts, such as `{"messages": [...]}`), a `datasets.Dataset`, or a dict of options of the data
    whose `sources` are one of these; rows are kept in `out/rows.jsonl`, and the run records a hash
    of all texts. A data set on the hub of
    several configurations is a dict in a list: `[{"path": "openai/gsm8k", "config_name":
    "main"}]` (also `split`, `revision`, `weight: float`).
    `out` is the run's folder. `config` is a YAML file of a run, whose values the arguments replace.

    `options` are those of the run by their names, nested ones as a dict or by dotted names:

    - `epochs: float` (1), or `max_steps: int`.
    - `optim: dict`: `lr: float`, and more of the optimiser.
    - `batch_rows: int` (4): most packed rows in a forward pass; `rows_per_step: int` (4): those of
      an optimiser step, on all GPUs together.
    - `precision: str`: no (float32) or bf16.
    - `init_from: str`: folder of a drafter to start from.
    - `heads: dict`, `objective: dict`: the drafter's shape and the loss, by method.
    - `data.max_length: int` (1024), `data.held_out: dict` (`{"share": 0.05}`): in addition to
      `data`, as `**{"data.max_length": 512}`.
    - `seed: int` (0), `dtype: str`, `device: str`, `adapter: str`: as for `load`.

    `callbacks` get the metrics and the checkpoints, see `draftsmith.Callback`.

    All options, with defaults: `draftsmith train METHOD --help-all`. The same call continues where
    an earlier one stopped. Under `accelerate launch` every process calls it. Raises `UserError`.
    """
    from ..train.loop import train as run_training
    from ..train.methods.registry import method_named

    chosen = method_named(method)
    if "callback" in options:
        raise UserError("there is no argument callback; did you mean callbacks?")
    if not isinstance(callbacks, list | tuple):
        callbacks = [cast(Callback, callbacks)]
    for one in callbacks:
        _check_callback(one)
    if not isinstance(target, str | PathLike | TargetConfig | NoneType):
        raise UserError(
            "target is a model's folder or its name on the hub, not a "
            f"{type(target).__name__}; save it with save_pretrained"
        )
    part = data if type(data) is dict and "sources" in data else None
    given = data if part is None else part["sources"]
    rows = None if given is None or _names_files(given) else rows_in_memory(given, "data")
    if rows is not None:
        source = [Source(ROWS_FILE, name="data")]
        data = source if part is None else {**part, "sources": source}
    values: dict[str, Any] = {"target": target, "data": data, "out": out}
    named = {name: value for name, value in values.items() if value is not None}
    run = options_from(chosen.run_class, {**named, **options}, config)
    if rows is not None:
        check_output_folder(run.out, "out")
        file = Path(run.out) / ROWS_FILE
        write_rows(rows, file)
        run.data.sources[0].path = str(file)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return run_training(run, chosen, callbacks)
    finally:  # the calling program, such as a notebook, handles its signals again
        for number, handler in handlers.items():
            signal.signal(number, handler)


def evaluate(
    target: AnyPath | TargetConfig | Target | PreTrainedModel,
    drafter: AnyPath | Drafter | Proposer | Sequence[AnyPath | Drafter | Proposer],
    prompts: Any,
    *,
    tokenizer: Any = None,
    **options: Any,
) -> Report:
    """Return acceptance and speed of drafters on held-out prompts, compared with plain decoding.

    `target` is a model's folder or name on the hub, or a loaded model with its `tokenizer`.
    `drafter` is a folder, a name such as ngram, a `draftsmith.Drafter`, a `draftsmith.Proposer` of
    your own, or a list of them. `prompts` is a benchmark (mt-bench, gsm8k, humaneval, spec-bench),
    a file of prompts, the name of a data set on the hub (with `config_name`, `split` and
    `revision`), a list of texts, which are what a user says, a list of rows, or a
    `datasets.Dataset`.

    `options` are those of the command:

    - `temperature: float` (0, greedy), or a list of several; `top_p: float`, `top_k: int`,
      `seed: int`.
    - `max_new_tokens: int` (128), `batch_size: int` (1), or a list of several.
    - `limit: int`: number of prompts, drawn evenly over their categories; all if not given.
    - `repeats: int` (3): timed runs of every request; the run with the median time is reported.
    - `baselines: bool` (True): measure the n-gram baseline.
    - `like: list[str]`: engines to draft like, such as `["vllm:drafts=3"]`.
    - `json: str`: file to write the report to; the same call then continues where one stopped.
    - `dtype: str`, `device: str`: as for `load`, for a target by its path or name.

    All of them: `draftsmith evaluate --help-all`. Of the report, `settings` has an entry for each
    temperature and batch size, whose `drafters` hold tau, speed and the rest by name. Raises
    `UserError`.
    """
    from ..inference.evaluation.evaluate import measured

    if str(options.get("json")) == "-":
        raise UserError("json='-' is for the command; leave it out")
    rows = None
    if _is_text(prompts):
        raise UserError(
            f"prompts: there is no file {prompts!r}; a single prompt goes into a list: "
            f"[{prompts!r}]"
        )
    if not isinstance(prompts, str | PathLike):
        for name in ("config_name", "revision", "split"):
            if name in options:
                raise UserError(f"{name} is for prompts by their path; leave it out")
        rows = rows_in_memory(prompts, "prompts")
        prompts = "given_in_python"
    several = drafter if isinstance(drafter, list | tuple) else [drafter]
    own = [one for one in several if isinstance(one, Proposer)]
    others = [_path_of(one) for one in several if not isinstance(one, Proposer)]
    if wrong := [one for one in others if not isinstance(one, str | PathLike)]:
        raise UserError(f"drafter is a folder, a name or a proposer, not {type(wrong[0]).__name__}")
    values = {"drafter": others, "prompts": prompts, **options}
    loaded = None
    if isinstance(target, Target):
        loaded = target
    elif isinstance(target, PreTrainedModel):
        loaded = target_of(target, tokenizer)
    values["target"] = target if loaded is None else loaded.name
    made = options_from(EvaluateOptions, values)
    return measured(made, loaded, own, rows)


def export(drafter: AnyPath | Drafter, to: str, out: AnyPath, **options: Any) -> str:
    """Write a drafter as a serving engine loads it, and return the command that serves it.

    `drafter` is a folder, or a `draftsmith.Drafter`; `to` is hf (transformers), llamacpp, sglang,
    speculators, trtllm, tgi or vllm; `out` is the folder to write, of which an earlier export
    is replaced. The command is returned as one text.

    `options` are those of the command:

    - `target: str`: target in the command; that of the training if not given. Its output matrix is
      read if the engine needs it in the drafter's folder.
    - `drafts: int`: drafts of a round in the command.
    - `dtype: str` (auto, as stored): float32, bfloat16 or float16.
    - `report: list[str]`: JSON files of `evaluate`, whose figures go into the model card.
    - `license: str`: licence in the card, by the hub's name, such as apache-2.0.
    - `push: str`: repository on the hub to upload the folder to, private if it is new.

    Raises `UserError`.
    """
    from .exporting import ExportOptions, write_export

    named = {"drafter": _path_of(drafter), "to": to, "out": out}
    made = options_from(ExportOptions, {**named, **options})
    written = write_export(made)
    if made.push is not None:
        upload(made.out, made.push)
    return written.serve


def _names_files(data: Any) -> bool:
    """Return whether `data` names files: a path, a source of a run, several, or its section.

    Raises `UserError` for texts.
    """
    if type(data) in (dict, Data):  # not a `DatasetDict`
        return True
    keys = {one.name for one in fields(Source)}
    several = data if isinstance(data, list | tuple) else [data]
    for one in several:
        if _is_text(one):
            raise UserError(
                f"data: there is no file {one!r}, and a text teaches nothing without the target's "
                "reply; give rows with messages, or write replies with draftsmith data regenerate"
            )
    return all(
        isinstance(one, str | PathLike | Source) or (isinstance(one, dict) and one.keys() <= keys)
        for one in several
    )


def _is_text(value: Any) -> bool:
    """Return whether a value is words: neither a path nor a name on the hub has white space."""
    return isinstance(value, str) and len(value.split()) > 1 and not os.path.exists(value)


def _check_callback(given: Any) -> None:
    """Raise `UserError` for an object that is not a callback, or has methods never called."""
    if not isinstance(given, Callback):
        raise UserError(f"callbacks are objects of draftsmith.Callback, not {type(given).__name__}")
    known = [name for name in vars(Callback) if name.startswith("on_")]
    methods = [name for name in dir(type(given)) if name.startswith("on_")]
    if wrong := [name for name in methods if name not in known]:
        raise UserError(
            f"{type(given).__name__}.{wrong[0]} is never called; the methods of a callback are "
            f"{', '.join(known)}"
        )


def _path_of(drafter: Any) -> Any:
    """Return the folder of a drafter, or its path or name as it was given."""
    return drafter.folder if isinstance(drafter, Drafter) else drafter
