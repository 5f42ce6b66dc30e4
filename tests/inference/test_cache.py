"""The tree cache after any rounds equals one fresh prefill of the same tokens."""

from __future__ import annotations

import pytest
import torch
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decode import verify
from draftsmith.inference.tree import DraftTree, TreeShape
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_target

TARGET = tiny_target(seed=3)
SHAPES = [TreeShape((-1, 0, 0, 1, 2, 2)), TreeShape.chain(3), TreeShape.chain(0), TreeShape((-1, 0, 0, 0, 3))]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=5), st.integers(0, 1000))
@torch.inference_mode()
def test_values_equal_a_fresh_prefill_after_any_accept_pattern(rounds: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(4, TARGET.vocab_size, (1, 6), generator=generator)
    cache = TreeCache(64)
    TARGET.forward(text, cache=cache)
    cache.commit(list(range(6)))
    for which, leaf in rounds:
        shape = SHAPES[which]
        path = shape.path_to(leaf % shape.nodes)
        tokens = torch.randint(4, TARGET.vocab_size, (1, shape.nodes), generator=generator)
        verify(TARGET, DraftTree(shape, tokens), cache, ())
        cache.commit(path)
        text = torch.cat([text, tokens[:, path]], dim=1)
    fresh = TreeCache(64)
    TARGET.forward(text, cache=fresh)
    assert cache.length == cache.get_seq_length() == text.shape[1]
    for ours, other in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        torch.testing.assert_close(ours[:, :, : cache.length], other[:, :, : cache.length], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_capacity_is_kept_and_not_exceeded() -> None:
    cache = TreeCache(6)
    TARGET.forward(torch.tensor([[5, 6, 7, 8, 9, 10]]), cache=cache)
    cache.commit([0, 1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="asked to hold 7"):
        TARGET.forward(torch.tensor([[5]]), positions=torch.tensor([[6]]), cache=cache)
