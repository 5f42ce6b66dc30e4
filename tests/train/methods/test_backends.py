"""Which attention training chooses, and that FlexAttention never leaves its kernels."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from draftsmith.train.losses import backends
from draftsmith.train.losses.backends import GRAPHS, backend_for, bucket

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "head", "triton", "chosen"),
    [
        (CPU, 64, True, "sdpa"),
        (CUDA, 128, True, "flex"),
        (CUDA, 8, True, "plain"),  # its kernels take heads of 16 at least
        (CUDA, 128, False, "plain"),
        (CUDA, 256, True, "flex"),
        (torch.device("mps"), 64, True, "plain"),
    ],
)
def test_auto_attention_backend_depends_on_device_and_head_size(
    device: torch.device, head: int, triton: bool, chosen: str
) -> None:
    with patch.object(backends, "has_triton", lambda: triton):
        assert backend_for("auto", device, head) == chosen
        assert backend_for("plain", device, head) == "plain"
        # Heads of 192, of latent attention, do not fit into shared memory in float32.
        assert backend_for("auto", CUDA, 192, torch.float32) == "plain"
        assert (backend_for("auto", CUDA, 192) == "flex") == triton


def test_lengths_fall_into_few_buckets() -> None:
    assert [bucket(n) for n in (1, 128, 129, 192, 193, 256, 257, 400)] == [
        *(128, 128, 192, 192, 256, 256, 384, 512)
    ]
    for length in range(1, 5000, 7):
        assert length <= bucket(length) <= max(128, 1.5 * length)
    # a process trains with one batch size and judges with another
    assert 2 * len({bucket(n) for n in range(1, 32769)}) <= GRAPHS


@pytest.mark.full
def test_flex_is_compiled_for_every_one_of_fifty_lengths() -> None:
    """Done with dynamo alone, else as on a GPU: `fullgraph` turns a fallback into an error."""
    compiled = []
    original = torch.compile

    def compile_here(function: object, **options: object) -> object:
        compiled.append(options)
        return original(function, backend="eager", **options)  # type: ignore[call-overload]

    limit = torch.compiler.config.recompile_limit
    backends._compiled.cache_clear()
    with patch.object(torch, "compile", compile_here):
        try:
            attend = backends.flex_for(CUDA)
            for number in range(50):
                width = bucket(70 * (number + 1))
                queries = torch.zeros(1, 1, width, 16)
                assert attend(queries, queries, queries).shape == queries.shape
        finally:
            torch.compiler.config.recompile_limit = limit
            torch._dynamo.reset()
            backends._compiled.cache_clear()
    assert compiled == [{"dynamic": False, "fullgraph": True}]
    assert flex_attention is backends.flex_for(CPU)
