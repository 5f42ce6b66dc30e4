"""The tree cache after any rounds equals one fresh prefill of the same tokens, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.rounds.cache import Pool, StaticTreeCache, TreeCache
from draftsmith.inference.rounds.tree import Pass, TreeShape
from draftsmith.inference.targets.target import Target
from tests.conftest import tiny_target
from tests.helpers.architectures import architecture

TARGETS = {
    "llama": tiny_target(seed=3),
    "mistral": architecture("mistral", dtype=torch.float32),
    "gemma3": architecture("gemma3"),
}
SHAPES = [
    TreeShape((-1, 0, 0, 1, 2, 2)),
    TreeShape.chain(3),
    TreeShape.chain(0),
    TreeShape((-1, 0, 0, 0, 3)),
]
CPU = torch.device("cpu")


def run_tree(
    target: Target, cache: TreeCache, shape: TreeShape, tokens: torch.Tensor
) -> torch.Tensor:
    tables = shape.tables(CPU)
    nodes = Pass(depths=tables.depths, visible=tables.ancestors)
    return target.forward(tokens, nodes, cache).last


def buffers(cache: TreeCache) -> list[torch.Tensor]:
    return [buffer for state in cache.states.values() for buffer in (state.keys, state.values)]


def padded(paths: list[list[int]]) -> torch.Tensor:
    width = max(map(len, paths))
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths])


def check_equal_to_fresh(target: Target, cache: TreeCache, texts: list[list[int]]) -> None:
    assert cache.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = TreeCache(1, 64)
        target.prefill(torch.tensor([text]), [len(text)], fresh)
        for ours, other in zip(buffers(cache), buffers(fresh), strict=True):
            torch.testing.assert_close(
                ours[row, :, : len(text)], other[0, :, : len(text)], atol=1e-5, rtol=1e-5
            )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(TARGETS)),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), min_size=4, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.integers(0, 1000),
)
@torch.inference_mode()
def test_values_equal_a_fresh_prefill_after_any_accept_pattern(
    kind: str, lengths: list[int], rounds: list[tuple[int, list[int]]], static: bool, seed: int
) -> None:
    """Ragged rows, any tree, any accepted node in each row (leaves that are not the last row, and
    whole chains, among them)."""
    target = TARGETS[kind]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(4, target.vocab_size, shape, generator=generator)

    texts = [draw(length).tolist() for length in lengths]
    cache = StaticTreeCache(len(texts), 64) if static else TreeCache(len(texts), 12)
    width = max(lengths)
    prompts = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    target.prefill(prompts, lengths, cache, chunk=4)
    assert cache.lengths == list(lengths)
    for which, leaves in rounds:
        shape = SHAPES[which]
        paths = [shape.path_to(leaves[row] % shape.nodes) for row in range(len(texts))]
        tokens = draw(len(texts), shape.nodes)
        run_tree(target, cache, shape, tokens)
        in_place = all(path == list(range(len(path))) for path in paths)
        cache.commit([len(path) for path in paths], None if in_place else padded(paths))
        texts = [
            text + tokens[row, path].tolist()
            for row, (text, path) in enumerate(zip(texts, paths, strict=True))
        ]
    check_equal_to_fresh(target, cache, texts)


@torch.inference_mode()
def test_features_of_every_node_equal_those_of_its_own_path() -> None:
    """In a ragged batch, with undecided slots of an earlier forward before the tree's own."""
    for target in TARGETS.values():
        texts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 8, 7]]
        cache = TreeCache(2, 32)
        padded = torch.tensor([text + [0] * (10 - len(text)) for text in texts])
        target.prefill(padded, [10, 3], cache)
        first = torch.tensor([[20, 21], [22, 23]])  # two siblings below nothing: depth 0
        eye = torch.eye(2, dtype=torch.bool)[None]
        zero = torch.zeros(1, 2, dtype=torch.long)
        target.forward(first, Pass(depths=zero, visible=eye), cache)
        cache.stage(2)
        second = torch.tensor([[30, 31, 32], [33, 34, 35]])  # children of sibling 1, 0, 1
        above = [1, 0, 1]
        sees = torch.zeros(1, 3, 5, dtype=torch.bool)
        for node, parent in enumerate(above):
            sees[0, node, [parent, 2 + node]] = True
        depths = torch.tensor([[0, 0, 1, 1, 1]])
        nodes = Pass(depths=depths[:, 2:], visible=sees, slot_depths=depths)
        found = target.forward(second, nodes, cache).last
        for row, text in enumerate(texts):
            for node, parent in enumerate(above):
                path = [*text, int(first[row, parent]), int(second[row, node])]
                alone = target.forward(torch.tensor([path])).last[0, -1]
                torch.testing.assert_close(found[row, node], alone, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("room", [-1, 0, 1])
def test_cache_capacity_doubles_up_to_its_limit(room: int) -> None:
    """Six positions into a cache of capacity 7, 6, 5: kept as it is, or doubled up to a limit."""
    target, text = TARGETS["llama"], [5, 6, 7, 8, 9, 10]
    cache = TreeCache(1, 6 - room)
    target.prefill(torch.tensor([text]), [len(text)], cache)
    assert cache.capacity == (10 if room == 1 else 6 - room)
    check_equal_to_fresh(target, cache, [text])
    limited = TreeCache(1, 6 - room, limit=7)
    target.prefill(torch.tensor([text]), [len(text)], limited)
    assert limited.capacity == (7 if room == 1 else 6 - room)


@torch.inference_mode()
def test_growing_and_dropping_rows_preserve_cached_values() -> None:
    target = TARGETS["llama"]
    texts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    cache = TreeCache(3, 5)
    padded = torch.tensor([text + [0] * (5 - len(text)) for text in texts])
    target.prefill(padded, [3, 5, 1], cache)
    cache.keep([0, 2])
    tokens = torch.tensor([[20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]])
    run_tree(target, cache, TreeShape.chain(5), tokens)
    cache.commit([6, 2])
    assert cache.capacity == 10
    check_equal_to_fresh(target, cache, [[5, 6, 7, 20, 21, 22, 23, 24, 25], [13, 30, 31]])


@torch.inference_mode()
def test_a_chain_is_committed_without_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TreeCache(1, 16)
    TARGETS["llama"].prefill(torch.tensor([[5, 6, 7]]), [3], cache)
    run_tree(TARGETS["llama"], cache, TreeShape.chain(3), torch.tensor([[1, 2, 3, 4]]))
    before = [buffer.data_ptr() for buffer in buffers(cache)]
    for state in cache.states.values():
        monkeypatch.setattr(state, "commit", lambda *_: pytest.fail("a chain was moved"))
    cache.commit([3])
    assert cache.lengths == [6] and [buffer.data_ptr() for buffer in buffers(cache)] == before


@torch.inference_mode()
def test_chunked_prefill_gives_the_same_features() -> None:
    for target in TARGETS.values():
        ids, lengths = torch.arange(4, 24)[None].repeat(2, 1), [20, 20]
        whole = target.prefill(ids, lengths, TreeCache(2, 32), taps=(0, 1))
        parts = target.prefill(ids, lengths, TreeCache(2, 32), taps=(0, 1), chunk=7)
        torch.testing.assert_close(whole.last, parts.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(whole.taps[1], parts.taps[1], atol=1e-5, rtol=1e-5)


def test_a_kept_cache_gives_nothing_of_its_last_batch_to_the_next() -> None:
    """A slot is hidden by a weight of 0, which would not hide NaN."""
    target, kept = TARGETS["llama"], Pool()
    ids = torch.tensor([[5, 6, 7, 8]])
    shape = TreeShape((-1, 0, 0, 1))

    def states() -> torch.Tensor:
        cache = kept.pop((1, 32), None) or StaticTreeCache(1, 32)
        cache.reset()
        target.prefill(ids, [4], cache)
        found = run_tree(target, cache, shape, torch.tensor([[9, 10, 11, 12]]))
        kept.put(cache, cache)
        return found

    first = states()
    (cache,) = kept.values()
    address = buffers(cache)[0].data_ptr()
    for buffer in buffers(cache):
        buffer.fill_(torch.nan)
    torch.testing.assert_close(states(), first)
    assert [*kept.values()] == [cache] and buffers(cache)[0].data_ptr() == address
