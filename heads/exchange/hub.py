"""Drafters by name: a folder here, or a repository on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from ..artifact import check_files, read_own_file
from ..errors import UserError, first_line

READ = ("*.json", "*.safetensors", "*.md", "*.jinja", "*.model", "*.txt")
"""Files of a drafter, the tokenizer of a draft model among them. No code."""


@dataclass(frozen=True)
class Drafter:
    """Drafter on disk, whose files were found to be those that were written.

    >>> drafter = Drafter.from_pretrained("scripts/quickstart/drafters/eagle3")
    >>> drafter.method, drafter.target_name
    ('eagle', 'scripts/quickstart/target')
    """

    folder: Path
    method: str
    """Module of its method in `heads`."""
    target_name: str
    """Name of the target in the training."""

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Drafter:
        """Return the drafter of a folder, or of a repository on the hub, which is downloaded.

        Raises `UserError` for a folder that is not a drafter, and for damaged files.
        """
        folder = fetch_folder(str(name), READ)
        own = read_own_file(folder)
        check_files(folder, own)
        return cls(folder, own.method, own.target.name)


def fetch_folder(name: str, patterns: Sequence[str], what: str = "drafter") -> Path:
    """Return the folder `name`, or a downloaded repository. Raises `UserError` for neither."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"{name} is not a folder; name a {what}'s folder, or a repository on the hub"
        )
    with hub_errors(f"{name} is not a folder here, and the hub cannot give it"):
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))


def upload(folder: str | Path, name: str) -> str:
    """Upload a folder as a repository, private if new; return its address. Raises `UserError`."""
    with hub_errors(f"{folder} was written, but the hub does not take it as {name}"):
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        return str(
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="draftsmith export")
        )


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn errors of the package huggingface_hub into `UserError`s that begin with `what`."""
    try:
        yield
    except Exception as error:  # of any HTTP library that huggingface_hub uses
        raise UserError(f"{what} ({first_line(error)}); {hub_remedy(error)}") from error


def hub_remedy(error: Exception) -> str:
    """Return what to do about an error of the package huggingface_hub."""
    if isinstance(error, HFValidationError):
        return "write the name as OWNER/NAME"
    if isinstance(error, OfflineModeIsEnabled):
        return "check the name, or unset HF_HUB_OFFLINE"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
        return "check the name, and log in with hf auth login"
    if status is not None:
        return "check the name"
    return "check the name and the network"
