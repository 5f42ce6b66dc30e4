"""Options of `draftsmith serve`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...heads.errors import UserError
from ..base.settings import Sampling, TargetConfig


@dataclass
class ServeOptions:
    """Start a local server with an OpenAI-compatible API and a chat page that marks drafted tokens.

    It is for trying drafters and for evaluation with existing clients, not for production.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith serve --target TARGET --drafter runs/eagle/best",
        "draftsmith serve --target TARGET --drafter runs/eagle/best --drafter ngram --port 8080",
    )

    target: TargetConfig
    drafter: list[str] = field(default_factory=list)
    """A drafter's folder, a draft model's folder, or ngram; settings
    follow a colon: ngram:length=8. May be given several times. The model name in a request selects
    the drafter: TARGET uses the first one, TARGET:DRAFTER that one, and TARGET:plain none."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections from this machine only. To accept
    others, use an address such as 0.0.0.0, and set an API key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: str | None = field(default=None, metadata={"form": "FILE"})
    """File with the API key that requests must send. If not given, the key is read from
    DRAFTSMITH_API_KEY; if that is unset, no key is required."""
    profile: str | None = None
    """Profile that draftsmith tune wrote; the drafters use its settings for batch size 1."""
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
