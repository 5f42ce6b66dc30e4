"""Values of a run that its target or its drafter's shape determine, filled in before it begins."""

from __future__ import annotations

import re
from pathlib import Path

from ..heads.errors import UserError
from .command_line.parse import COMMAND_LINE, Values, as_given
from .config import RunConfig
from .method import AnyMethod, method_named
from .methods.beginnings import take_heads_before
from .outline import ConfigOnly, config_at
from .planning.shapes import folder_of, name_of

KNOWN_LATER = {
    "max_steps": "by epochs, which become steps with the data",
    "heads.mask_token": "chosen with the tokenizer and the data",
    "heads.draft_vocab_size": "all tokens of the target",
    "draft_model.hidden_size": "the target's",
    "draft_model.intermediate_size": "in proportion to hidden_size",
    "draft_model.vocab_size": "the target's",
    "objective.gamma": "of weighting decay alone",
}
"""What a null means that is left in a resolved run, by the name of the option."""


def target_of_run(run: RunConfig) -> ConfigOnly:
    """Return the config of a run's target, or of its feature store. Raises `UserError`."""
    path, store = run.target.path, run.features.store
    where = path if store is None else str(Path(store, "target"))
    return ConfigOnly(config_at(where, run.target.trust_remote_code))


def known_target(run: RunConfig) -> ConfigOnly:
    """Return the config of a run's target, without the hub if it is one of the known shapes.

    Raises `UserError` where there is neither.
    """
    try:
        return target_of_run(run)
    except UserError:
        if (name := name_of(run.target.path)) is None:
            raise
        with folder_of(name) as folder:
            return ConfigOnly(config_at(folder))


def resolve(run: RunConfig, method: AnyMethod, target: ConfigOnly) -> None:
    """Fill in what the run leaves to its target, in place. Raises `UserError`.

    A run with these values trains the same as one without them.
    """
    take_heads_before(run)
    method.resolve(run, target)


def config_text(name: str, values: Values[RunConfig]) -> str:
    """Return the config file of a run of the method `name`, resolved where that is possible.

    A comment says why it is not, and what a null stands for that only the data determine.
    """
    try:
        values.check_complete(COMMAND_LINE)
        run, method = values.made(), method_named(name)
        resolve(run, method, known_target(run))
    except UserError as error:
        return f"# Not resolved: {error}.\n{as_given(values)}"
    return with_comments(run.as_yaml())


def with_comments(text: str) -> str:
    """Return a config file with a comment at each null of `KNOWN_LATER`."""
    lines, section = [], ""
    for line in text.splitlines():
        if section_line := re.fullmatch(r"(\w+):", line):
            section = section_line[1]
        if null := re.fullmatch(r"( *)(\w+): null", line):
            name = f"{section}.{null[2]}" if null[1] else null[2]
            line += f"  # {KNOWN_LATER[name]}" if name in KNOWN_LATER else ""
        lines.append(line)
    return "\n".join(lines) + "\n"
