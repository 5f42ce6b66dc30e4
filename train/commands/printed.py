"""`--print-config`: the config of a run with what its target determines, and comments."""

from __future__ import annotations

import re

from ...heads.errors import UserError
from ..command_line.parse import COMMAND_LINE, Values, as_given
from ..config import RunConfig
from ..method import method_named
from ..outline import ConfigOnly, config_at, target_of_run
from ..planning.shapes import folder_of, name_of

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


def config_text(name: str, values: Values[RunConfig]) -> str:
    """Return the config file of a run of the method `name`, resolved where that is possible.

    A comment says why it is not, and what a null stands for that only the data determine.
    """
    try:
        values.check_complete(COMMAND_LINE)
        run, method = values.made(), method_named(name)
        method.resolve(run, known_target(run))
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
