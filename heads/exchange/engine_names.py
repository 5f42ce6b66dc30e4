"""The serving engines that drafters are exported to, by the names that `draftsmith export --to`
takes."""

from __future__ import annotations

from typing import Literal, get_args

EngineName = Literal["vllm", "speculators", "sglang", "trtllm", "llamacpp", "tgi", "hf"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
