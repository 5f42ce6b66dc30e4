"""Options of `draftsmith data plan`, and configs of well-known targets, which need no hub.

Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..heads.errors import UserError
from ..inference.base.costs import known_gpu
from .run_file import RunFile

FOLDER = Path(__file__).with_name("targets")  # NAME.json is the config.json of a target


@dataclass
class PlanOptions(RunFile):
    """Estimate the cost of a training run: whether it fits, hours, disk, GPU memory, price.

    Target and drafter are built without weights; nothing is run with numbers.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data plan --config configs/eagle/llama-3.1-8b.yaml --tokens 300M --gpu H100"
        " --gpus 8",
        "draftsmith data plan --config configs/eagle/qwen3-32b.yaml --target-shape qwen3-32b"
        " --tokens 300M --price-per-gpu-hour 2.5",
        "draftsmith data plan --config run.yaml --set target.path=FOLDER --set batch_rows=4",
    )

    tokens: float = 1e9
    """Number of tokens of data, prompts included."""
    reply_share: float | None = None
    """Share of the tokens that the target writes; if not given, all of them are counted, which is
    an upper bound."""
    gpu: str = "H100"
    """Kind of GPU, by the name of its data sheet."""
    gpus: int = 0
    """Number of GPUs that share the steps; 0: 8, or the most below that can share the rows of a
    step evenly."""
    price_per_gpu_hour: float | None = None
    """Price of an hour of one GPU, in any currency."""
    target_shape: str | None = None
    """Known target in place of the config's target.path, without the hub: qwen3-32b,
    llama-3.1-8b-instruct and others; a wrong name is answered with all of them."""
    json: str | None = None
    """File to write the numbers to; `-` prints them in place of the tables."""

    def __post_init__(self) -> None:
        self.gpu = known_gpu(self.gpu)
        if self.tokens <= 0 or self.gpus < 0 or not 0 < self.written_share <= 1:
            raise UserError("tokens must be above 0, gpus at least 1, reply_share in (0, 1]")
        if self.price_per_gpu_hour is not None and self.price_per_gpu_hour < 0:
            raise UserError("--price-per-gpu-hour must be at least 0")

    @property
    def written_share(self) -> float:
        """Share of the tokens that the target writes; 1 if it is not known."""
        return 1.0 if self.reply_share is None else self.reply_share


def names() -> list[str]:
    """Return the names of the targets whose configs are here, such as qwen3-32b."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def name_of(target: str) -> str | None:
    """Return the name here of a target by its name on the hub; None if it is not here."""
    name = target.rpartition("/")[2].lower()
    return name if name in names() else None


@contextmanager
def folder_of(name: str) -> Iterator[str]:
    """Yield a folder that holds the config.json of a target, and nothing else, for as long as used.

    Upper case and the owner on the hub may be given. Raises `UserError` with the nearest names and
    all names if there is no such target.
    """
    if (found := name_of(name)) is None:
        wanted = name.rpartition("/")[2].lower()
        near = difflib.get_close_matches(wanted, names(), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"unknown target shape {name!r}; {hint}there are: {', '.join(names())}")
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        folder = Path(temporary) / found
        folder.mkdir()
        shutil.copyfile(FOLDER / f"{found}.json", folder / "config.json")
        yield str(folder)
