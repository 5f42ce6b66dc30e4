"""Options of `draftsmith tune`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ....heads.errors import UserError
from ...settings import BadRows, Sampling, SourceOptions, TargetConfig

SWEEPS = 4  # turns over which the rounds of a median are spread


@dataclass
class TuneOptions(SourceOptions):
    """Find the fastest chain or tree for each drafter, temperature and batch size on this machine.

    The acceptance of every chain, fixed tree and dynamic tree is counted on the target's own
    replies, and the cost of rounds is timed. The best few predictions are then decoded with the
    default, which the profile keeps unless the best of them surely gains.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith tune --target TARGET --drafter runs/eagle/best --prompts calibration.jsonl "
        "--out profile.json",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --profile profile.json "
        "--prompts held_out.jsonl",
    )
    first: ClassVar[tuple[str, ...]] = (
        "target.path",
        "drafter",
        "prompts",
        "out",
        "budget",
        "temperatures",
        "batch_sizes",
    )

    target: TargetConfig
    prompts: str
    """Calibration prompts, in the forms that `draftsmith evaluate` takes, a benchmark's name among
    them; other prompts than those that you evaluate on."""
    out: str = field(metadata={"form": "FILE"})
    """Profile to write; `evaluate` and `generate` take it as --profile."""
    drafter: list[str] = field(default_factory=list)
    """A trained drafter's folder, a draft model's folder, or ngram. May be given several times."""
    bad_rows: BadRows = "stop"
    """Treatment of a malformed row: stop the command, or skip the row and name it."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template of all prompts, such as '{"enable_thinking": false}'; those
    of a row win."""
    limit: int = 24
    """Number of prompts to use, drawn evenly over their categories."""
    max_new_tokens: int = 96
    """Longest reply, in tokens."""
    temperatures: str | None = None
    """Temperatures to tune for, in place of sampling.temperature: 0,0.7."""
    batch_sizes: str = "1"
    """Batch sizes to tune for: 1,4,16."""
    contexts: str = "128,1024,4096"
    """Contexts at which verification is timed; cut to the target's positions."""
    budget: float = 5.0
    """Minutes that tuning may take, roughly: prompts, reply lengths, timings and finalists are cut
    to fit. 0 sets no limit."""
    finalists: int = 3
    """Number of the best predictions that are measured, besides the tree without a profile."""
    repeats: int = 3
    """Timed runs of every request."""
    samples: int = 24
    """Rounds of every timing; fewer are quicker and less exact."""
    sampling: Sampling = field(default_factory=Sampling)
    """Other sampling settings."""

    def __post_init__(self) -> None:
        if not self.drafter:
            raise UserError("name a drafter to tune: --drafter FOLDER")
        for name in ("limit", "max_new_tokens", "finalists", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}"
                )
        if not 0 <= self.budget < 1e6:
            raise UserError(f"--budget is in minutes, 0 for no limit; it cannot be {self.budget:g}")
        if self.samples < SWEEPS:
            raise UserError(f"--samples must be at least {SWEEPS}, not {self.samples}")
        # acceptance is counted for these two rules; under others, other drafts are accepted
        if self.sampling.rule not in ("auto", "coupled"):
            raise UserError(
                "tune works with greedy and coupled decoding, not with rule "
                f"{self.sampling.rule}; leave it out"
            )
