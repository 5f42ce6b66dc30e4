"""Names of the serving engines, as `draftsmith export --to` takes them."""

from __future__ import annotations

from typing import Literal, get_args

EngineName = Literal["vllm", "speculators", "sglang", "trtllm", "llamacpp", "tgi", "hf"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
