"""Options of `draftsmith data plan`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...heads.errors import UserError
from ...inference.evaluation.gains import GPUS
from ...inference.settings import choice_named
from ..command_line.parse import RunFile


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
    first: ClassVar[tuple[str, ...]] = (
        "config",
        "tokens",
        "gpu",
        "gpus",
        "gpu_memory",
        "price_per_gpu_hour",
        "target_shape",
        "set",
    )

    tokens: float = 1e9
    """Number of tokens of data, prompts included."""
    reply_share: float | None = None
    """Share of the tokens that the target writes; if not given, that of some rows of the run's
    data, or 1 where data and tokenizer cannot be read here."""
    gpu: str = "H100"
    """Kind of GPU, by the name of its data sheet."""
    gpus: int = 0
    """Number of GPUs that share the steps; 0: 8, or the most below that can share the rows of a
    step evenly."""
    gpu_memory: float | None = None
    """Memory of a GPU in GB; if not given, by the data sheet of its kind."""
    price_per_gpu_hour: float | None = None
    """Price of an hour of one GPU, in any currency."""
    target_shape: str | None = None
    """Known target in place of the config's target.path, without the hub: qwen3-32b,
    llama-3.1-8b-instruct and others; a wrong name is answered with all of them."""
    mfu: float = 0.4
    """Share of the data sheet's bf16 peak that a forward or training pass reaches."""
    link: float = 450.0
    """GB/s that a GPU sends to the others of its node; 450: NVLink of an H100."""
    network: float = 400.0
    """GB/s that a node of 8 GPUs sends to others; 400: eight cards of 400 Gbit/s."""
    json: str | None = None
    """File to write the numbers to; `-` prints them in place of the tables."""

    def __post_init__(self) -> None:
        self.gpu = choice_named(self.gpu, GPUS)
        if self.gpu not in GPUS:
            raise UserError(f"unknown GPU {self.gpu!r}; there are: {', '.join(GPUS)}")
        if (
            self.tokens <= 0
            or self.gpus < 0
            or not 0 < self.mfu <= 1
            or not 0 < self.written_share <= 1
        ):
            raise UserError(
                "tokens must be above 0, gpus at least 1, mfu and reply_share in (0, 1]"
            )
        if self.link <= 0 or self.network <= 0:
            raise UserError("link and network must be above 0")
        if self.gpu_memory is not None and self.gpu_memory <= 0:
            raise UserError(f"--gpu-memory is in GB and above 0; it cannot be {self.gpu_memory:g}")
        if self.price_per_gpu_hour is not None and self.price_per_gpu_hour < 0:
            raise UserError("--price-per-gpu-hour must be at least 0")

    @property
    def written_share(self) -> float:
        """Share of the tokens that the target writes; 1 if it is not known."""
        return 1.0 if self.reply_share is None else self.reply_share
