"""Options of `draftsmith tune`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....heads.errors import UserError
from ...settings import Sampling, SourceOptions, TargetConfig


@dataclass
class TuneOptions(SourceOptions):
    """Find the fastest chain or tree for each drafter, temperature and batch size on this machine.

    Up to ten chains and trees are decoded with: few prompts for all of them, more for the faster
    half, and so on. The profile keeps the default unless the best of them surely gains.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith tune --target TARGET --drafter runs/eagle/best --prompts calibration.jsonl "
        "--out profile.json",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --profile profile.json "
        "--prompts held_out.jsonl",
    )

    target: TargetConfig
    prompts: str
    """Calibration prompts, in the forms that `draftsmith evaluate` takes, a benchmark's name among
    them; other prompts than those that you evaluate on. As many are used as fit into --budget."""
    out: str = field(metadata={"form": "FILE"})
    """Profile to write; `evaluate` and `generate` take it as --profile."""
    drafter: list[str] = field(default_factory=list)
    """A trained drafter's folder, a draft model's folder, or ngram. May be given several times."""
    temperature: list[float] = field(default_factory=list)
    """Temperatures to tune for, such as 0,0.7; 0, greedy decoding, if not given."""
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Batch sizes to tune for: 1,4,16."""
    budget: float = 5.0
    """Minutes that tuning may take, roughly: prompts, reply lengths and repeats are cut to fit. 0
    sets no limit."""
    sampling: Sampling = field(default_factory=Sampling)
    """Other sampling settings."""

    def __post_init__(self) -> None:
        if not self.drafter:
            raise UserError("name a drafter to tune: --drafter FOLDER")
        if not 0 <= self.budget < 1e6:
            raise UserError(f"--budget is in minutes, 0 for no limit; it cannot be {self.budget:g}")
        # the text has to be the same for every tree, so that all of them are timed on one text
        if self.sampling.rule not in ("auto", "coupled"):
            raise UserError(
                "tune works with greedy and coupled decoding, not with rule "
                f"{self.sampling.rule}; leave it out"
            )
