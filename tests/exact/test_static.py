"""Rounds over static caches, the form that is compiled: the same text and the same rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from draftsmith.inference import decode as loop
from draftsmith.inference import recorded as compiling
from draftsmith.inference.decode import generate
from tests.helpers.architectures import architecture, near_copy, proposers
from tests.helpers.fixed_shapes import SAMPLINGS, full, run, without_times

# Heads on the target's states, and a drafter with layers; the others with `--all`.
TRACED = ("medusa",)
OTHERS = (
    *("eagle3 tree", "eagle3 chain", "eagle1 tree", "dflash chain", "dspark tree"),
    *("draft-model chain", "draft-model tree"),
)


def use(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]) -> None:
    """Have the loop call `make(function)` in place of the compiled functions."""
    monkeypatch.setattr(compiling, "_FUNCTIONS", {})
    monkeypatch.setattr(loop, "static_pays", lambda device, rows: True)
    monkeypatch.setattr(compiling, "compile_function", make)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2", "penalty"),
        pytest.param("gemma2", "coupled", marks=full),
        pytest.param("qwen3.5", "coupled", marks=full),
        *(
            pytest.param(kind, name, marks=full)
            for kind, name in product(("llama", "qwen2", "gemma2"), SAMPLINGS)
        ),
    ],
)
def test_static_rounds_are_those_of_growing_caches(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = architecture(kind)
    target.fuse(move=True)
    drafters = proposers(target, near_copy(target))
    expected = {}
    for way, proposer in drafters.items():
        expected[way] = without_times(run(target, proposer, SAMPLINGS[name]))
    use(monkeypatch, lambda function: function)
    target.static = True
    for way, proposer in drafters.items():
        found = without_times(run(target, proposer, SAMPLINGS[name]))
        assert found == expected[way], way


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("llama", way) for way in TRACED),
        *(pytest.param("llama", way, marks=full) for way in OTHERS),
        pytest.param("qwen3.5", "medusa", marks=full),
    ],
)
def test_a_compiler_finds_whole_functions(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = architecture(kind)
    target.fuse(move=True)
    known = proposers(target, near_copy(target))[way]
    expected = without_times(run(target, known, SAMPLINGS["greedy"]))
    # What a drafter keeps at its first use is not to be made within a compiled function.
    proposer = proposers(target, near_copy(target))[way]
    graphs = Counter[str]()

    def trace(function: Any) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            graphs[function.__name__.split("_")[0]] += 1
            return module.forward

        # The same filter of conditions as in use. `fullgraph` raises where a function has to be
        # left, for Python or for the host.
        options: Any = {"guard_filter_fn": compiling.may_change}
        return torch.compile(function, backend=backend, fullgraph=True, options=options)

    use(monkeypatch, trace)
    target.static = True
    assert without_times(run(target, proposer, SAMPLINGS["greedy"])) == expected
    # Rows that end idle, so that a batch has one size; one of a single row is a class of its own.
    for length in (3, 100):
        generate(target, proposer, [[7] * length], 60, eos_ids=frozenset())
    # Of a draft model's first rounds the host knows more than of later ones.
    assert graphs["propose"] <= 6 and graphs["verify"] <= 3, graphs
    before = graphs.total()
    assert without_times(run(target, proposer, SAMPLINGS["greedy"])) == expected
    assert graphs.total() == before, "a second batch compiles nothing"
    # One row, prompts of different lengths, caches of 64 to 256 slots.
    rounds = 0
    for length in range(3, 150, 20):
        prompt = [(7 * place + length) % 90 + 3 for place in range(length)]
        rounds += len(generate(target, proposer, [prompt], 60, eos_ids=frozenset())[0].rounds)
    assert rounds >= 200 and graphs.total() == before, (rounds, graphs)


def test_caches_keep_their_addresses_over_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads and writes where it was captured."""
    use(monkeypatch, lambda function: function)
    target = architecture("llama")
    target.static = True
    drafters = proposers(target, near_copy(target))
    for way in ("plain", "eagle3 tree", "dflash chain", "draft-model tree"):
        proposer: Any = drafters[way]
        addresses = []
        for prompt in ([5, 9, 33, 7], [12, 6, 6, 12], [7, 7, 7, 8]):  # of one length
            generate(target, proposer, [prompt], 8)
            kept = [rounds.cache for rounds in compiling.POOLS[target].values()]
            if hasattr(proposer, "_pool"):
                kept += proposer._pool.values()
            for cache in kept:
                assert cache is not None, way
                tensors = [cache.starts()]
                for state in cache.states.values():
                    tensors += [state.keys, state.values]
                addresses.append([tensor.data_ptr() for tensor in tensors])
        assert addresses[: len(kept)] == addresses[-len(kept) :], way
