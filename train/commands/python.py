"""The functions of `import draftsmith`: what the commands do, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...heads.errors import UserError
from ...heads.exchange.hub import Drafter, upload
from ...heads.files import check_output_folder
from ...inference import api
from ...inference.conversations.given import given_rows, write_rows
from ...inference.evaluation.options import EvaluateOptions
from ...inference.evaluation.results import Report
from ...inference.evaluation.tuning.profile import TuningProfile
from ...inference.own_drafters import with_name
from ...inference.proposer import Proposer
from ...inference.settings import TargetConfig
from ...inference.targets.target import Target, target_of
from ..callbacks import Callback
from ..config import Data, Source

AnyPath = str | PathLike[str]
ROWS_FILE = "rows.jsonl"
"""File of a run's folder for rows that were given as objects."""


def load(
    target: AnyPath | TargetConfig | Target | PreTrainedModel,
    drafter: AnyPath | Drafter | Proposer = "none",
    *,
    profile: AnyPath | None = None,
    temperature: float = 0.0,
    batch: int = 1,
    **options: Any,
) -> api.Decoder:
    """Return a decoder of `target` that drafts with `drafter`; see `draftsmith.inference.load`.

    With the `profile` that draftsmith tune wrote, the drafter has the settings that were best for
    this `temperature` and `batch`. `options` are tokenizer and compile, and for a target by its
    path dtype, device, adapter and attention. Raises `UserError`.

    >>> import draftsmith
    >>> decoder = draftsmith.load("scripts/quickstart/target", "ngram", device="cpu")
    >>> decoder.generate("def add(a, b):", max_new_tokens=24).tau > 1
    True
    """
    source: Any = fspath(target) if isinstance(target, PathLike) else target
    named: Any = fspath(drafter) if isinstance(drafter, PathLike) else drafter
    if profile is None:
        return api.load(source, named, **options)
    if not isinstance(named, str | Drafter):
        raise UserError("a profile goes with a drafter by its name or folder, not with a proposer")
    loaded = api.load(source, "none", **options).target
    spec = str(named.folder if isinstance(named, Drafter) else named)
    tuned = TuningProfile(fspath(profile), loaded).setting(spec, temperature, batch)
    return api.load(loaded, spec, tuned=tuned)


def train(
    method: str,
    target: AnyPath | None = None,
    data: Any = None,
    out: AnyPath | None = None,
    *,
    config: AnyPath | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Path:
    """Train a drafter, and return the folder of the best one.

    `method` is medusa, eagle, mtp, dflash, dspark or distill; `data` a file of conversations, a
    list of files, a list of rows, or a `datasets.Dataset`, whose rows are kept in `out/rows.jsonl`;
    `out` the run's folder; `config` a YAML file of a run. `callbacks` get the metrics and the
    checkpoints, see `draftsmith.Callback`. `options` are those of the run by their names, such as
    `epochs=2`, `optim={"lr": 3e-4}` and `init_from=FOLDER`. The same call goes on where an earlier
    one stopped. Under `accelerate launch` every process calls it. Raises `UserError`.
    """
    from ..command_line.parse import options_from
    from ..loop import train as run_training
    from ..method import method_named
    from .pushing import pushing

    chosen = method_named(method)
    if wrong := [one for one in callbacks if not isinstance(one, Callback)]:
        raise UserError(
            f"callbacks are objects of draftsmith.Callback, not {type(wrong[0]).__name__}"
        )
    rows = None if data is None or _names_files(data) else given_rows(data, "data")
    source = data if rows is None else [Source(ROWS_FILE, name="data")]
    values: dict[str, Any] = {"target": target, "data": source, "out": out}
    named = {name: value for name, value in values.items() if value is not None}
    run = options_from(chosen.run_class, {**named, **options}, config)
    if rows is not None:
        check_output_folder(run.out, "out")
        file = Path(run.out) / ROWS_FILE
        write_rows(rows, file)
        run.data.sources[0].path = str(file)
    return run_training(run, chosen, [*callbacks, *pushing(run, chosen)])


def evaluate(
    target: AnyPath | TargetConfig | Target | PreTrainedModel,
    drafter: AnyPath | Drafter | Proposer | Sequence[AnyPath | Drafter | Proposer],
    prompts: Any,
    *,
    tokenizer: Any = None,
    **options: Any,
) -> Report:
    """Return acceptance and speed of drafters on held-out prompts, compared with plain decoding.

    `drafter` is a folder, a name such as ngram, a proposer of your own, or several of them;
    `prompts` a file of prompts, a list of rows or of texts, which are what a user says, or a
    `datasets.Dataset`; `target` a path, or a loaded model with its `tokenizer`. `options`
    are those of the command, such as `temperatures="0,1"`, `limit=20`, `baselines=False` and
    `json=FILE`. Raises `UserError`.
    """
    from ...inference.evaluation.evaluate import measured
    from ..command_line.parse import options_from

    for name in ("features", "json"):
        if name in options and (name == "features" or str(options[name]) == "-"):
            raise UserError(f"{name}={options[name]!r} is for the command; leave it out")
    rows = None
    if not isinstance(prompts, str | PathLike):
        for name in ("config_name", "revision", "streaming"):
            if name in options:
                raise UserError(f"{name} is for prompts by their path; leave it out")
        rows = given_rows(prompts, "prompts", options.pop("split", None))
        prompts = "(given in Python)"
    several = drafter if isinstance(drafter, list | tuple) else [drafter]
    own = [with_name(one) for one in several if isinstance(one, Proposer)]
    others = [_path_of(one) for one in several if not isinstance(one, Proposer)]
    if wrong := [one for one in others if not isinstance(one, str | PathLike)]:
        raise UserError(
            f"drafter is a folder, a name or a proposer, not {type(wrong[0]).__name__} "
            f"{str(wrong[0])[:60]!r}"
        )
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

    `to` is the engine's name, such as vllm. `options` are those of the command, such as
    `dtype="bfloat16"` and `serve_as=NAME`. Raises `UserError`.
    """
    from ..command_line.parse import options_from
    from .exporting import write_export
    from .options import ExportOptions

    named = {"drafter": _path_of(drafter), "to": to, "out": out}
    made = options_from(ExportOptions, {**named, **options})
    written = write_export(made)
    if made.push is not None:
        upload(made.out, made.push)
    return written.serve


def _names_files(data: Any) -> bool:
    """Return whether `data` names files: a path, a source of a run, several, or its section."""
    if type(data) in (dict, Data):  # not a `DatasetDict`
        return True
    keys = {one.name for one in fields(Source)}
    several = data if isinstance(data, list | tuple) else [data]
    return all(
        isinstance(one, str | PathLike | Source) or (isinstance(one, dict) and one.keys() <= keys)
        for one in several
    )


def _path_of(drafter: Any) -> Any:
    """Return the folder of a drafter, or its path or name as it was given."""
    return drafter.folder if isinstance(drafter, Drafter) else drafter
