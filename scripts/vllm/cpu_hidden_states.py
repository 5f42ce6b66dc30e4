"""A connector that lets vLLM's CPU build give hidden states; on GPUs vLLM's own is used. Loaded
inside vLLM: hidden_states.sh.

The stock connector copies into pinned memory and asks CUDA events whether they have happened; a
build without an accelerator refuses the one and has placeholders for the other, and the engine
dies.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found]
    ExampleHiddenStatesConnector,
)

_empty_like = torch.empty_like


def _unpinned(*arguments: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:  # noqa: ARG001
    return _empty_like(*arguments, **more)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The stock one, with unpinned copies, and events that have always happened."""

    def _submit_async_write(self, pending: Any) -> None:
        torch.empty_like = _unpinned
        placeholder: Any = torch.cuda.Event
        placeholder.query = lambda event: True
        super()._submit_async_write(pending)
