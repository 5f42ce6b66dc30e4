"""Options of `draftsmith serve`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...heads.errors import UserError
from ..base.settings import Sampling, TargetConfig


@dataclass
class ServeOptions:
    """A local server with OpenAI's API and a page to chat on, which shows what was drafted.

    It is for trying drafters and for evaluation with existing clients, not for production.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith serve --target TARGET --drafter runs/eagle/best",
        "draftsmith serve --target TARGET --drafter runs/eagle/best --drafter ngram --port 8080",
    )

    target: TargetConfig
    drafter: list[str] = field(default_factory=list)
    """A drafter's folder, a draft model's folder, or ngram; settings
    follow a colon: ngram:length=8. May be given several times: the first drafts for the model of
    the target's name, and each for a model TARGET:DRAFTER. TARGET:plain drafts nothing."""
    host: str = "127.0.0.1"
    """Address to listen on. Others than this machine reach the server only at another address, such
    as 0.0.0.0; give an API key then."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: str | None = field(default=None, metadata={"form": "FILE"})
    """File with the key that requests have to carry; DRAFTSMITH_API_KEY if not given, and none
    without that."""
    profile: str | None = None
    """Profile that draftsmith tune wrote, whose settings for a batch of 1 the drafters take."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    """Sampling parameters that a request does not name; OpenAI's default is temperature 1."""
    max_new_tokens: int = 1024
    """Longest reply, in tokens, of a request that gives no limit."""
    batch_size: int = 16
    """Replies decoded at a time, at most, in all batches together."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max-new-tokens", self.max_new_tokens), ("batch-size", self.batch_size)
        ):  # fmt: skip
            if value < 1:
                raise UserError(f"--{name} must be at least 1, not {value}")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port must be between 0 and 65535, not {self.port}")
