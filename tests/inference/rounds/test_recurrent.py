"""Recurrent layers over trees and ragged texts: equal to the recurrence taken step by step, and the
states that any accepted paths leave are those of one pass over the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Thread, get_ident
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.rounds.cache import Counts, TreeCache
from draftsmith.inference.rounds.recurrent import RecurrentStates, Terms, over_nodes
from draftsmith.inference.rounds.tree import Pass, TreeShape
from draftsmith.inference.targets.mixers import Mixer
from draftsmith.inference.targets.target import Target
from tests.helpers.architectures import HYBRIDS, architecture, without_limits

GROUPS, HEADS, KEY, VALUE, WIDTH, CHANNELS = 2, 3, 5, 4, 4, 3


def random_terms(batch: int, count: int, channels: bool, seed: int) -> Terms:
    generator = torch.Generator().manual_seed(seed)

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    keys = some(batch, GROUPS, 1, count, KEY)
    return Terms(
        some(batch, GROUPS, 1, count, KEY),
        keys / keys.norm(dim=-1, keepdim=True),
        some(batch, GROUPS, HEADS, count, VALUE),
        -some(batch, GROUPS, HEADS, count, KEY if channels else 1).exp(),
        some(batch, GROUPS, HEADS, count).sigmoid(),
    )


def step_by_step(
    matrix: Tensor, terms: Terms, path: list[int], delta: bool
) -> tuple[Tensor, Tensor]:
    """Return what the last node of a path reads of one row, and the matrix after it."""
    read = matrix[..., 0, :]
    for node in path:
        queries, keys, values, decays = (
            x[:, :, node]
            for x in (terms.queries[0], terms.keys[0], terms.values[0], terms.decays[0])
        )
        matrix = decays.exp()[..., None] * matrix
        held = (keys[..., None] * matrix).sum(-2)
        new = terms.strength[0, :, :, node, None] * (values - held if delta else values)
        matrix = matrix + keys[..., None] * new[..., None, :]
        read = (queries[..., None] * matrix).sum(-2)
    return read, matrix


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TreeShape:
    count = draw(st.integers(1, most))
    return TreeShape((-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))))


@settings(max_examples=40, deadline=None)
@given(trees(), st.booleans(), st.booleans(), st.data())
def test_nodes_read_what_their_paths_read_step_by_step(
    shape: TreeShape, delta: bool, channels: bool, data: st.DataObject
) -> None:
    """In one pass, and in two of which the first nodes stay undecided."""
    count = shape.nodes
    terms = random_terms(1, count, channels, seed=count)
    matrix = torch.randn(1, GROUPS, HEADS, KEY, VALUE, dtype=torch.float64)
    see = shape.tables(torch.device("cpu")).ancestors[:, None, None]
    cut = data.draw(st.integers(0, count - 1))
    earlier, reads = None, []
    for first, last in ((0, cut), (cut, count)):
        if first < last:
            piece = (slice(None),) * 3 + (slice(first, last),)
            part = Terms(
                terms.queries[piece],
                terms.keys[piece],
                terms.values[piece],
                terms.decays[piece],
                terms.strength[piece],
            )
            read, earlier = over_nodes(matrix, earlier, part, delta, see[..., first:last, :last])
            reads.append(read)
    found = torch.cat(reads, 3)
    for node in range(count):
        expected, _ = step_by_step(matrix[0], terms, shape.path_to(node), delta)
        torch.testing.assert_close(found[0, :, :, node], expected)


def test_a_window_is_a_nodes_own_path() -> None:
    """W = 3: two committed inputs (0, 1), then the slots 0 .. 3 of the root, two children, and
    a child of the second one."""
    shape = TreeShape((-1, 0, 0, 2))
    tables = shape.tables(torch.device("cpu"))
    course = Pass(depths=tables.depths, visible=tables.ancestors, slot_depths=tables.depths)
    assert course.windows(3).tolist() == [[[0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 4, 5]]]


def states_of(cache: TreeCache, row: int) -> list[Tensor]:
    """Return the matrices and convolution inputs of a row."""
    found = []
    for state in cache.recurrent.layers.values():
        assert state.new_inputs is None and state.added is None
        found += [x[row] for x in (state.inputs, state.matrix) if x is not None]
    return found


def run_rounds(
    target: Target, lengths: list[int], shapes: list[TreeShape], ends: list[list[int]]
) -> tuple[TreeCache, list[list[int]]]:
    """Run prompts, and trees of which each row accepts the path to a node; -1: none of it.

    Returns the cache, and the text of each row.
    """
    generator = torch.Generator().manual_seed(len(shapes))
    batch, longest = len(lengths), max(lengths)
    cache = TreeCache(batch, 16)
    prompts = torch.randint(3, target.vocab_size, (batch, longest), generator=generator)
    with without_limits(target.mixers):  # as nodes, see `mixers.Mamba2`
        target.prefill(prompts, lengths, cache, chunk=5)
    texts = [prompts[row, :length].tolist() for row, length in enumerate(lengths)]
    for shape, last in zip(shapes, ends, strict=True):
        nodes = torch.randint(3, target.vocab_size, (batch, shape.nodes), generator=generator)
        tables = shape.tables(target.device)
        layout = Pass(depths=tables.depths, visible=tables.ancestors)
        target.forward(nodes, layout, cache)
        paths = [shape.path_to(end) if end >= 0 else [] for end in last]
        counts = [len(path) for path in paths]
        width = max(1, *counts)
        places = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths])
        cache.commit(Counts(counts, torch.tensor(counts)), places)
        for row, path in enumerate(paths):
            texts[row] += nodes[row, path].tolist()
    return cache, texts


@pytest.mark.parametrize("kind", HYBRIDS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_states_after_accepted_paths_are_those_of_one_prefill(
    kind: str, data: st.DataObject
) -> None:
    """Rows that accept nothing, and rows that accept a whole path, in one batch."""
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=3, max_size=3))
    shapes = data.draw(st.lists(trees(), min_size=1, max_size=4))
    ends = [
        data.draw(st.lists(st.integers(-1, shape.nodes - 1), min_size=3, max_size=3))
        for shape in shapes
    ]
    check_states(kind, lengths, shapes, ends)


@pytest.mark.parametrize("kind", ["qwen3.5", "kimi-linear", "bamba"])
def test_states_do_not_drift_in_fifty_rounds(kind: str) -> None:
    random = Random(0)
    sizes = [random.randint(1, 12) for _ in range(50)]
    shapes = [
        TreeShape((-1, *(random.randrange(node) for node in range(1, size)))) for size in sizes
    ]
    ends = [[random.randint(-1, size - 1) for _ in range(3)] for size in sizes]
    check_states(kind, [3, 1, 8], shapes, ends)


@torch.inference_mode()
def check_states(
    kind: str, lengths: list[int], shapes: list[TreeShape], ends: list[list[int]]
) -> None:
    """Compare the states after rounds of three rows with those of one prefill of their texts."""
    # With larger weights a random model amplifies what its layers round.
    target = architecture(kind, dtype=torch.float32, scale=0.1)
    cache, texts = run_rounds(target, lengths, shapes, ends)
    compare(target, cache, texts)


@torch.inference_mode()
def compare(target: Target, cache: TreeCache, texts: list[list[int]]) -> None:
    """Compare the states of rows with those of one prefill of their texts."""
    fresh = TreeCache(len(texts), 16)
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[7] * (longest - len(text))] for text in texts])
    with without_limits(target.mixers):
        target.prefill(padded, list(map(len, texts)), fresh)
    assert cache.lengths == fresh.lengths
    assert len(cache.states) == target.layers_with_keys, "a static cache makes so many"
    for row in range(len(texts)):
        for found, expected in zip(states_of(cache, row), states_of(fresh, row), strict=True):
            assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-6


def test_rows_that_leave_take_their_states_along() -> None:
    """And a round after that reaches the states of the rows that stay."""
    target = architecture("qwen3.5", dtype=torch.float32, scale=0.1)
    shape = TreeShape((-1, 0, 0, 1))
    tables = shape.tables(target.device)
    nodes = torch.tensor([[5, 9, 8, 4], [3, 6, 7, 12]])
    with torch.inference_mode():
        cache, texts = run_rounds(target, [4, 7, 2], [shape] * 2, [[3, -1, 2]] * 2)
        before = [states_of(cache, row) for row in (2, 0)]
        cache.keep([2, 0])
        for row, expected in enumerate(before):
            for found, state in zip(states_of(cache, row), expected, strict=True):
                assert torch.equal(found, state)
        target.forward(nodes, Pass(depths=tables.depths, visible=tables.ancestors), cache)
        paths = torch.tensor([[0, 2, -1], [0, 1, 3]])
        cache.commit(Counts([2, 3], torch.tensor([2, 3])), paths)
    compare(target, cache, [[*texts[2], 5, 8], [*texts[0], 3, 6, 12]])


def test_a_reset_forgets_states_at_the_same_place() -> None:
    states, course = RecurrentStates(), Pass(counts=torch.tensor([3]))
    state = states.of(0)
    state.convolve(torch.ones(1, 5, CHANNELS), torch.ones(WIDTH, CHANNELS), course)
    state.recur(random_terms(1, 5, False, 0), True, course)
    states.place()
    assert state.inputs is not None and state.matrix is not None
    places = state.inputs.data_ptr(), state.matrix.data_ptr()
    assert state.inputs.sum() == 3 * CHANNELS, "three positions, and padding changes nothing"
    states.reset()
    assert not state.inputs.any() and not state.matrix.any()
    assert (state.inputs.data_ptr(), state.matrix.data_ptr()) == places


def test_states_of_a_prefill_that_failed_are_forgotten_whole() -> None:
    """A layer may have inputs of its convolution and no matrix then: it is no convolution alone."""
    states, course = RecurrentStates(), Pass(counts=torch.tensor([3]))
    states.of(0).convolve(torch.ones(1, 5, CHANNELS), torch.ones(WIDTH, CHANNELS), course)
    states.reset()
    assert not states.layers


def test_a_node_off_the_path_may_have_decayed_to_nothing() -> None:
    """Differences of sums of decays are positive there, and their exponentials infinite."""
    shape = TreeShape((-1, 0, 0))
    terms = random_terms(1, 3, False, 1)
    terms = Terms(*(x.float() for x in vars(terms).values()))
    terms.decays[:, :, :, 1] = -200.0
    states = RecurrentStates()
    state = states.of(0)
    start = Pass(counts=torch.tensor([1]))
    state.convolve(torch.ones(1, 1, CHANNELS), torch.ones(WIDTH, CHANNELS), start)
    state.recur(Terms(*(x[:, :, :, :1] for x in vars(terms).values())), True, start)
    states.place()
    assert state.matrix is not None
    first = state.matrix.clone()
    tables = shape.tables(torch.device("cpu"))
    course = Pass(depths=tables.depths, visible=tables.ancestors, slot_depths=tables.depths)
    state.convolve(torch.ones(1, 3, CHANNELS), torch.ones(WIDTH, CHANNELS), course)
    found = state.recur(terms, True, course)
    read, matrix = step_by_step(first[0], terms, [0, 2], delta=True)
    torch.testing.assert_close(found[0, :, :, 2], read)
    states.commit(torch.tensor([2]), torch.tensor([[0, 2]]))
    torch.testing.assert_close(state.matrix[0], matrix)


def test_training_in_low_precision_keeps_sums_of_decays_in_float32() -> None:
    target = architecture("bamba", dtype=torch.float32)
    tables = TreeShape((-1, 0, 0, 1)).tables(target.device)
    cache = TreeCache(1, 16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        target.prefill(torch.tensor([[3, 4, 5]]), [3], cache)
        nodes = torch.tensor([[5, 9, 8, 4]])
        target.forward(nodes, Pass(depths=tables.depths, visible=tables.ancestors), cache)
    for state in cache.recurrent.layers.values():
        assert state.added is not None and state.added.sums.dtype == torch.float32
        assert state.matrix is not None and state.matrix.dtype == torch.float32


def test_another_threads_pass_without_a_cache_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins and ends within a layer of a decoding thread's pass."""
    target = architecture("qwen3.5", dtype=torch.float32)
    prompt = [5, 9, 33, 7]
    alone = generate_one(target, PlainDecoding(), prompt, 12).token_ids
    text = torch.tensor([prompt])
    features = target.forward(text).last
    found: list[Tensor] = []
    whole, decoding = Mixer.run, get_ident()

    def run(self: Mixer, *arguments: Any) -> Tensor:
        if get_ident() == decoding:
            other = Thread(target=lambda: found.append(target.forward(text).last))
            other.start()
            other.join()
        return whole(self, *arguments)

    monkeypatch.setattr(Mixer, "run", run)
    assert generate_one(target, PlainDecoding(), prompt, 12).token_ids == alone
    assert len(found) >= 12 * len(target.mixers)
    assert all(torch.equal(states, features) for states in found)


def test_two_threads_decode_with_one_target() -> None:
    target = architecture("qwen3.5", dtype=torch.float32)
    prompts = [[5, 9, 33, 7], [12, 4]]
    alone = [generate_one(target, PlainDecoding(), prompt, 20).token_ids for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda prompt: generate_one(target, PlainDecoding(), prompt, 20).token_ids, prompts * 3
        )
        assert list(found) == alone * 3
