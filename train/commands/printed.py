"""`--print-config`: the config of a run with what its target determines."""

from __future__ import annotations

from ...heads.errors import UserError
from ..command_line.parse import COMMAND_LINE, Values, as_given
from ..config import RunConfig
from ..method import method_named
from ..outline import ConfigOnly, config_at, target_of_run
from ..planning.options import folder_of, name_of


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

    A comment says why it is not. What only the data determine is null.
    """
    try:
        values.check_complete(COMMAND_LINE)
        run, method = values.made(), method_named(name)
        method.resolve(run, known_target(run))
    except UserError as error:
        return f"# Not resolved: {error}.\n{as_given(values)}"
    return run.as_yaml()
