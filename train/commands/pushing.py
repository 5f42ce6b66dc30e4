"""Uploads of a training's best drafter to the hub, exported with its card."""

from __future__ import annotations

import logging
import shlex
import tempfile
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...heads.errors import UserError
from ...heads.exchange.engines import INSIDE, takers
from ...heads.exchange.hub import upload
from ...inference.targets.target_files import names_a_folder
from ..callbacks import Callback
from ..config import RunConfig
from ..endings import is_main_rank
from ..estimate import facts_before
from ..method import AnyMethod
from .exporting import write_export
from .options import ExportOptions

log = logging.getLogger(__name__)


class Pushing(Callback):
    """Exports the best drafter for an engine and uploads it; a failure is a warning."""

    def __init__(self, run: RunConfig, repository: str, engine: str, target: str | None) -> None:
        self._repository = repository
        self._engine, self._target = engine, target
        self._out = f"{run.out}/pushed"  # of the command that repeats a failed upload

    def on_end(self, best: Path) -> None:
        name, drafter = self._repository, best.resolve()
        options = ExportOptions(str(drafter), self._engine, "", target=self._target)
        try:
            with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
                options.out = f"{folder}/{drafter.parent.name}"
                write_export(options)
                log.info("pushed: %s", upload(options.out, name))
        except (UserError, OSError) as error:
            target = [] if self._target is None else ["--target", self._target]
            words = ["--drafter", str(drafter), "--to", self._engine, *target]
            words += ["--out", self._out, "--push", name]
            log.warning(
                "not pushed: %s; to repeat it: draftsmith export %s", error, shlex.join(words)
            )


def pushing(run: RunConfig, method: AnyMethod) -> list[Callback]:
    """Return the uploads of a run as a list of at most one callback.

    Raises `UserError` for a name that is no repository's, without a token or a network, and for a
    drafter that no engine takes.
    """
    if run.push is None:
        return []
    if not is_main_rank():  # which does not upload, and may have no token
        return [Callback()]
    check_hub(run.push)
    facts = facts_before(run, method)
    if facts.kind == "mtp":
        raise UserError(f"push exports the drafter, and {INSIDE}")
    if not (engines := run.for_ or takers(facts)):
        raise UserError("push exports the drafter, and no engine takes this one; leave out push")
    # A drafter that shares the target's output matrix is exported with the rows that it reads.
    shared = getattr(getattr(facts.drafter, "shape", None), "shared_head", False)
    target = run.target.path
    there = not names_a_folder(target) or Path(target).is_dir()
    return [Pushing(run, run.push, engines[0], target if shared and there else None)]


def check_hub(name: str) -> None:
    """Raise `UserError` where nothing can be uploaded as repository `name`, without asking the hub.

    That is a name that is no repository's, a machine without a token, and HF_HUB_OFFLINE.
    """
    wrong = f"push is {name!r}, which is no repository; write OWNER/NAME"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(wrong) from error
    if name.count("/") != 1:
        raise UserError(wrong)
    if constants.HF_HUB_OFFLINE:
        raise UserError("push needs the hub; unset HF_HUB_OFFLINE, or leave push out")
    if get_token() is None:
        raise UserError("push needs a token; log in with hf auth login, or set HF_TOKEN")
