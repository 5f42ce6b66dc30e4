"""Recorded rounds: the same texts and rounds, read from memory that nobody frees or moves.

A CUDA graph launches the kernels of one round again, over the same memory and without Python. A
`Tape` does that on a CPU, operator by operator.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from draftsmith.inference import decode as loop
from draftsmith.inference import recorded
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.medusa import MedusaProposer
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.proposers.with_lookup import WithLookup
from draftsmith.inference.recorded import traced
from draftsmith.inference.rounds import cache as cache_module
from draftsmith.inference.rounds import device, noise, tree
from draftsmith.inference.targets.target import Target, load_for_decoding
from tests.conftest import ROOT, random_heads
from tests.helpers.architectures import architecture, near_copy, proposers
from tests.helpers.fixed_shapes import SAMPLINGS, full, run, without_times
from tests.helpers.random_blocks import proposer_of, random_block
from tests.helpers.random_eagles import random_eagle
from tests.helpers.tape import Tape, storage

FEW = ("plain", "medusa", "eagle3 tree", "dspark tree", "draft-model chain", "ngram")


def models(
    ways: tuple[str, ...] | None = None, kind: str = "llama"
) -> tuple[Target, dict[str, Proposer]]:
    """A target with the proposers of these names; all if there are none."""
    target = architecture(kind)
    target.fuse(move=True)
    found = proposers(target, near_copy(target))
    return target, {way: found[way] for way in ways or found}


@pytest.mark.parametrize(
    "kind", ["qwen3.5", *(pytest.param(k, marks=full) for k in ("bamba", "lfm2"))]
)
def test_recorded_rounds_of_hybrids_equal_unrecorded_ones(kind: str, tapes: list[Tape]) -> None:
    target, drafters = models(kind=kind)
    for way in ("plain", "draft-model chain", "draft-model tree", "eagle3 tree"):
        target.static = False
        expected = without_times(run(target, drafters[way], SAMPLINGS["coupled"]))
        target.static = True
        assert without_times(run(target, drafters[way], SAMPLINGS["coupled"])) == expected, way
    assert sum(tape.replays for tape in tapes) > 10


@pytest.mark.parametrize(
    ("kind", "length", "lookup_length"),
    [("eagle3.1", 5, 4), *(pytest.param(*case, marks=full) for case in (
        ("dflash", 10, 8), ("eagle3.1", 8, 8), ("eagle3.1", 5, 8)))],
)  # fmt: skip
def test_recorded_trees_with_lookups_of_their_depth_equal_unrecorded_ones(
    kind: str, length: int, lookup_length: int, tapes: list[Tape]
) -> None:
    """A round of trees has scores; the next one, with a looked-up chain, has the form and none."""
    target = architecture("llama")
    target.fuse(move=True)
    texts = []
    for static in (False, True):
        target.static = static
        if kind == "dflash":
            block = random_block(target, kind, block_size=length)
            drafter: Proposer = proposer_of(block, width=16, nodes=16)
        else:
            settings = TreeSettings(length=length, width=3, nodes=24 if length == 8 else 12)
            drafter = EagleProposer(random_eagle(target, kind), settings)
        requests = [Request([5, 9, 33, 7]), Request([*range(11, 19)], 1)]
        proposer = WithLookup(drafter, 1, lookup_length)
        replies = generate(target, proposer, requests, 60, eos_ids=frozenset())
        texts.append([reply.token_ids for reply in replies])
    assert texts[0] == texts[1] and tapes


@pytest.mark.parametrize(
    ("name", "ahead", "ways"),
    [
        ("coupled", True, FEW),
        pytest.param("penalty", False, FEW, marks=full),
        *(pytest.param(*case, None, marks=full) for case in product(SAMPLINGS, (False, True))),
    ],
)
def test_recorded_rounds_are_those_of_growing_caches(
    name: str,
    ahead: bool,
    ways: tuple[str, ...] | None,
    tapes: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four requests of one batch, which end one by one; then a second batch in the same places."""
    monkeypatch.setattr(loop, "runs_ahead", lambda device: ahead)
    target, drafters = models(ways)
    for way, proposer in drafters.items():
        target.static = False
        expected = without_times(run(target, proposer, SAMPLINGS[name]))
        target.static = True
        before = sum(tape.replays for tape in tapes)
        for turn in range(2):
            assert without_times(run(target, proposer, SAMPLINGS[name])) == expected, (way, turn)
        # Proposers that are not part of a round share recordings.
        assert sum(tape.replays for tape in tapes) >= before + 10, way


@pytest.mark.parametrize(
    ("name", "ways"),
    [("rejection", FEW), *(pytest.param(name, None, marks=full) for name in SAMPLINGS)],
)
def test_requests_follow_one_another_in_one_recording(
    name: str, ways: tuple[str, ...] | None, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, one, three and eight at a time, as plain decoding has it."""
    monkeypatch.setattr(cache_module.Pool, "MOST", 9)
    target, drafters = models(ways)
    batches = [[[5, 9, 33, 7]], [[12, 6]], [[7, 7, 7, 8, 41]], [[40, 41, 42]]]
    batches += [[[5, 9, 33], [12], [8, 8, 8, 8]], [[3, 4], [5], [6, 7, 8]]]
    batches.append([list(range(3, 4 + row)) for row in range(8)])
    for way, proposer in drafters.items():
        tapes.clear()
        for number, prompts in enumerate(batches):
            requests = [Request(prompt, 10 * number + i) for i, prompt in enumerate(prompts)]
            texts = []
            for drafter in (drafters["plain"], proposer):
                target.static = drafter is proposer
                replies = generate(target, drafter, requests, 9, SAMPLINGS[name], frozenset())
                texts.append([reply.token_ids for reply in replies])
            if SAMPLINGS[name].rule != "rejection":  # which keeps the distribution, not the text
                assert texts[0] == texts[1], (way, prompts)
        if (part := traced(proposer)) is not None:
            owner = part.owner_of_rounds(target)
            kept = recorded.POOLS[target].items()
            sizes = [size for size, rounds in kept if owner in rounds.recorded]
            assert len(tapes) == len(sizes) < len(batches), (way, "one recording for each size")


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("coupled", FEW),
        *(pytest.param(name, None, marks=full) for name in ("coupled", "rejection")),
    ],
)
def test_memory_read_by_a_recording_is_neither_freed_nor_moved(
    name: str, ways: tuple[str, ...] | None, tapes: list[Tape]
) -> None:
    """Also where tables that it reads are dropped by everyone else."""
    target, drafters = models(ways)
    sampling = SAMPLINGS[name]
    for way, proposer in drafters.items():
        target.static = False
        expected = without_times(run(target, proposer, sampling))
        target.static = True
        run(target, proposer, sampling)
        for cached in (device._kept_row, tree._tables, noise._kept_indices):
            cached.cache_clear()
        gc.collect()
        assert without_times(run(target, proposer, sampling)) == expected, way
        part = traced(proposer)
        owner = target if part is None else part.owner_of_rounds(target)
        rounds = [
            (kept, found)
            for kept in recorded.POOLS[target].values()
            for found in kept.recorded.get(owner, {}).values()
            if found._result is not None
        ]
        assert rounds, way
        for kept, found in rounds:
            held = found.outside.kept.keys()
            assert found._recorder.outside <= held, way
            (draws,) = kept.draws.values()
            fixed = [draws.lengths, found._place.tokens, kept.cache.starts()]
            for state in kept.cache.states.values():
                fixed += [state.keys, state.values]
            assert {storage(x) for x in fixed} <= held, way


def drawn(rng: random.Random, target: Target) -> Proposer:
    """Return a drafter that mixes trees and looked-up chains, or drafts one of the two."""
    length, lookup = rng.randint(2, 8), rng.randint(1, 9)
    settings = rng.choice(
        [
            TreeSettings(length=length, width=1),
            TreeSettings(length=length, width=3, nodes=rng.randint(length, 3 * length)),
        ]
    )
    block = rng.choice(["dflash", "dspark"])
    blocks: dict[str, int] = rng.choice([{}, {"width": 3, "nodes": 9}, {"width": 16, "nodes": 16}])
    makes: list[Callable[[], Proposer]] = [
        lambda: EagleProposer(random_eagle(target, rng.choice(["eagle3.1", "eagle1"])), settings),
        lambda: proposer_of(random_block(target, block, block_size=length + 2), **blocks),
        lambda: MedusaProposer(random_heads(target), TreeSettings(nodes=rng.randint(4, 12))),
        lambda: NgramLookup(length=lookup),
    ]
    proposer = rng.choice(makes)()
    if rng.random() < 0.8 and not isinstance(proposer, NgramLookup):
        proposer = WithLookup(proposer, rng.randint(1, 2), lookup)
    return proposer


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 310), marks=full)], ids=["few", "many"]
)
def test_recording_random_batches_does_not_change_rounds(
    seeds: range, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 2 to 6 rows, one after the other with the same target and its kept caches."""
    target = architecture("llama")
    target.fuse(move=True)
    for seed in seeds:
        rng = random.Random(seed)
        ahead = rng.random() < 0.5
        monkeypatch.setattr(loop, "runs_ahead", lambda device, ahead=ahead: ahead)
        requests = [
            Request(rng.choices(range(5, rng.choice([8, 100])), k=rng.randint(1, 12)), row)
            for row in range(rng.randint(2, 6))
        ]
        sampling = SAMPLINGS[rng.choice(["greedy", "coupled", "penalty"])]
        proposer, ends = drawn(rng, target), frozenset(rng.sample(range(100), 2))
        texts = []
        for target.static in (False, True):
            texts.append(without_times(generate(target, proposer, requests, 40, sampling, ends)))
        assert texts[0] == texts[1], (seed, proposer.name, sampling)
    assert sum(tape.replays for tape in tapes) > 10 * len(seeds)


def test_a_cache_that_is_dropped_is_freed_at_once(tapes: list[Tape]) -> None:
    """Its memory, that of a GPU, does not wait for the collector of garbage."""
    target, drafters = models()
    target.static = True
    generate(target, drafters["eagle3 tree"], [[5, 6, 7]], 12, eos_ids=frozenset())
    (kept,) = recorded.POOLS[target].values()
    assert any(kept.recorded.values())
    gone = weakref.ref(kept.cache.states[0])
    tapes.clear()
    gc.disable()
    try:
        del kept
        recorded.POOLS[target].clear()
        assert gone() is None
    finally:
        gc.enable()


def test_rounds_that_synchronise_run_unrecorded(
    tapes: list[Tape], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafters = models()
    for way in ("eagle3 tree", "draft-model tree", "dflash chain"):
        proposer: Any = drafters[way]
        target.static = False
        expected = without_times(run(target, proposer, SAMPLINGS["coupled"]))
        target.static = True
        original = type(proposer).propose

        def asking(self: Any, root: torch.Tensor, draws: Any, original: Any = original) -> Any:
            found = original(self, root, draws)
            assert root[0].item() >= 0
            return found

        tapes.clear()
        with monkeypatch.context() as patched:
            patched.setattr(type(proposer), "propose", asking)
            assert without_times(run(target, proposer, SAMPLINGS["coupled"])) == expected, way
        assert not tapes and "rounds are not recorded" in caplog.text, way
        caplog.clear()


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_recorded_rounds_of_real_target_equal_unrecorded_ones(
    ahead: bool, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2-135M, where `scripts/smollm2/get.sh` has made it."""
    folder = ROOT / "models" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("run scripts/smollm2/get.sh first")
    monkeypatch.setattr(loop, "runs_ahead", lambda device: ahead)
    # Packed matrices, which only CPUs have, are no memory that a tape can follow.
    config = TargetConfig(str(folder), dtype="float32", device="cpu", attention="sdpa")
    target = load_for_decoding(config)
    prompts = ["Explain what a hash table is.", "def read_lines(path):", "List three rivers of"]
    requests = [Request(target.tokenizer(text)["input_ids"], i) for i, text in enumerate(prompts)]
    for spec in ("none", str(ROOT / "scripts/smollm2/drafter")):
        proposer = load_proposer(spec, target, pytest.fail)
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            target.static = False
            expected = without_times(generate(target, proposer, requests, 28, sampling))
            target.static = True
            for _ in range(2):
                found = generate(target, proposer, requests, 28, sampling)
                assert without_times(found) == expected
    assert sum(tape.replays for tape in tapes) > 60
