"""Greedy output equals `target.generate(do_sample=False)` token for token: every proposer, every
architecture, alone and in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Generation, generate, generate_one
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.medusa import make_proposer
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds.tree import TreeShape
from draftsmith.inference.targets.target import Target, load_target
from tests.conftest import ROOT, wrong_heads
from tests.helpers.architectures import (
    ARCHITECTURES,
    HYBRIDS,
    TEN_NODES,
    FromTheFuture,
    architecture,
    near_copy,
    proposers,
)
from tests.helpers.random_eagles import random_eagle
from tests.helpers.trained import chat_prompts, story_prompts, trained_artifact
from tests.helpers.trees import wide_tree

BATCH = 8
SAMPLED = ("llama", "gpt2")
"""Architectures with every drafter in the default tests; `test_families.py` samples others."""

SIXTEEN_NODES = wide_tree((3, 2, 1))
SIXTY_NODES = TreeShape(wide_tree((4, 3, 2, 1)).parents[:60])
DRAFT_MODEL = ROOT / "scripts" / "quickstart" / "draft_model"


def reference(
    target: Target, prompt: list[int], max_new_tokens: int, **options: object
) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def random_prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def check(
    target: Target,
    drafters: dict[str, Proposer],
    prompts: list[list[int]],
    max_new_tokens: int,
    alone: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    shapes: Sequence[TreeShape] = (TEN_NODES,),
) -> dict[str, list[Generation]]:
    """Decode in ragged batches of 8, and the first `alone` prompts by themselves; compare with
    transformers. `shapes` are the trees of an oracle and of its opposite."""
    options = (
        {}
        if sampling.repetition_penalty is None
        else {"repetition_penalty": sampling.repetition_penalty}
    )
    expected = [reference(target, prompt, max_new_tokens, **options) for prompt in prompts]
    texts = {tuple(prompt): reply for prompt, reply in zip(prompts, expected, strict=True)}
    future = {
        (n, shape): FromTheFuture(texts, n == "oracle", target.vocab_size, shape)
        for n, shape in product(("oracle", "adversary"), shapes)
    }
    named = {f"{n} {shape.nodes}": proposer for (n, shape), proposer in future.items()}
    found: dict[str, list[Generation]] = {}
    for name, proposer in {**drafters, **named}.items():
        results = []
        for start in range(0, len(prompts), BATCH):
            results += generate(
                target, proposer, prompts[start : start + BATCH], max_new_tokens, sampling
            )
        single = [
            generate_one(target, proposer, prompt, max_new_tokens, sampling=sampling)
            for prompt in prompts[:alone]
        ]
        for place, (result, reply) in enumerate(
            zip([*results, *single], [*expected, *expected[:alone]], strict=True)
        ):
            assert result.token_ids == reply, f"{name}, prompt {place}"
            assert sum(len(r.tokens) for r in result.rounds) == len(reply) - 1
            assert result.finish_reason == ("eos" if reply[-1] in target.eos_ids else "length")
        found[name] = results + single
    for n, shape in future:
        # The last two rounds reach over the end of a reply.
        rounds = [r for g in found[f"{n} {shape.nodes}"] for r in g.rounds[:-2]]
        right = shape.levels if n == "oracle" else 0
        assert all(r.accepted == right for r in rounds), "right drafts always, wrong ones never"
    return found


def accepted(results: Sequence[Generation]) -> int:
    return sum(r.accepted for g in results for r in g.rounds)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, BATCH) for kind in SAMPLED),
        *(pytest.param(kind, 24, marks=pytest.mark.full) for kind in ARCHITECTURES),
    ],
)
def test_every_architecture_matches_greedy_generate(kind: str, count: int) -> None:
    target = architecture(kind)
    target.check_head()
    target.check_tree()
    target.fuse(move=True)  # as loading does; the reference is transformers' own loop
    drafters = proposers(target, near_copy(target))
    found = check(
        target,
        drafters,
        random_prompts(count, target.vocab_size),
        24,
        alone=2 if count == BATCH else count,
    )
    for name in ("draft-model chain", "draft-model tree"):
        assert accepted(found[name]) > len(found[name]), (
            f"{name}: a drafter that is never right proves nothing"
        )


@pytest.mark.full
@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_verify_large_trees(kind: str) -> None:
    """A hundred prompts alone and in ragged batches, with trees of 16 and 60 nodes."""
    target, loose = architecture(kind), TreeSettings(length=4, width=4)
    drafter = near_copy(target)
    drafters: dict[str, Proposer] = {"ngram": NgramLookup(length=5)}
    for nodes in (15, 59):
        tree = replace(loose, nodes=nodes)
        drafters |= {
            f"draft model {nodes}": DraftModelProposer(drafter, target.vocab_size, tree),
            f"eagle3 {nodes}": EagleProposer(random_eagle(target, "eagle3.1"), tree),
        }
    drawn = random_prompts(110, target.vocab_size)
    # Recurrent layers compute in float32, where two tokens can be best to the last digit.
    prompts = [prompt for prompt in drawn if least_gap(target, prompt, 24) > 1e-5]
    print(f"{kind}: {len(drawn) - len(prompts)} of {len(drawn)} replies have a near-tie")
    check(target, drafters, prompts[:100], 24, 100, shapes=(SIXTEEN_NODES, SIXTY_NODES))


@torch.no_grad()
def least_gap(target: Target, prompt: list[int], max_new_tokens: int) -> float:
    """Return the least difference of the two best logits along transformers' reply."""
    reply = reference(target, prompt, max_new_tokens)
    logits = target.model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("gemma3", "gpt2"))],
)
def test_a_repetition_penalty_counts_each_nodes_own_path(kind: str) -> None:
    target = architecture(kind)
    penalised = Sampling(repetition_penalty=1.4)
    found = check(
        target,
        proposers(target, near_copy(target)),
        random_prompts(BATCH, target.vocab_size),
        24,
        2,
        penalised,
    )
    assert accepted(found["draft-model tree"]) > 10
    assert (
        found["plain"][0].token_ids
        != generate_one(target, load_proposer("none", target, print), [3], 24).token_ids
    )


def real_drafters(target: Target) -> dict[str, Proposer]:
    artifact = trained_artifact(target)
    found: dict[str, Proposer] = {
        spec: load_proposer(spec, target, print)
        for spec in ("none", "ngram", "ngram:longest=8,shortest=2")
    }
    return found | {
        "medusa": make_proposer(artifact, TreeSettings(nodes=10)),
        "medusa best-first": make_proposer(artifact, TreeSettings(nodes=10, width=10)),
        "medusa wrong": type(make_proposer(artifact))(wrong_heads(target), TreeSettings(nodes=6)),
    }


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 56])
def test_quickstart_target_matches_greedy_generate(quickstart: Target, count: int) -> None:
    drafters = real_drafters(quickstart)
    for settings in ("length=4", "length=4,width=2,nodes=8"):
        drafters[f"draft-model {settings}"] = load_proposer(
            f"{DRAFT_MODEL}:{settings}", quickstart, print
        )
    trained = {}
    for name in ("medusa", "eagle1", "eagle3"):
        folder = ROOT / "scripts" / "quickstart" / "drafters" / name
        trained[f"committed {name}"] = load_proposer(f"{folder}:nodes=12", quickstart, print)
        if name != "medusa":
            trained[f"committed {name} chain"] = load_proposer(
                f"{folder}:length=4,width=1", quickstart, print
            )
    folder = ROOT / "scripts" / "quickstart" / "drafters" / "distill"
    for settings in ("length=4", "length=4,width=3,nodes=9"):
        trained[f"committed distill {settings}"] = load_proposer(
            f"{folder}:{settings}", quickstart, print
        )
    drafters |= trained
    found = check(quickstart, drafters, chat_prompts(quickstart, "test", count), 32, alone=1)
    assert all(
        accepted(found[name]) > count for name in ("draft-model length=4", "medusa", "ngram")
    )
    assert all(accepted(found[name]) > count for name in trained)


@pytest.mark.parametrize("count", [BATCH // 2, pytest.param(48, marks=pytest.mark.full)])
def test_pretrained_target_matches_greedy_generate(stories: Target, count: int) -> None:
    found = check(stories, real_drafters(stories), story_prompts(stories, count), 48, alone=2)
    assert accepted(found["medusa"]) > count


def test_stop_strings_end_where_transformers_ends(quickstart: Target) -> None:
    prompts = chat_prompts(quickstart, "test", 6)
    drafter = load_proposer(f"{DRAFT_MODEL}:length=6", quickstart, print)
    stopped, inside = 0, 0
    for stops in (["\n"], ["return", "self."], ["):\n    "]):
        options = {"stop_strings": stops, "tokenizer": quickstart.tokenizer}
        expected = [reference(quickstart, prompt, 48, **options) for prompt in prompts]
        found = generate(quickstart, drafter, prompts, 48, stop=stops)
        assert [g.token_ids for g in found] == expected
        stopped += sum(g.finish_reason == "stop" for g in found)
        last = [g.rounds[-1] for g in found if g.finish_reason == "stop" and g.rounds]
        inside += sum(len(r.tokens) <= r.accepted for r in last)
    assert stopped > 6 and inside, "a stop string inside an accepted run must occur"


@pytest.mark.gpu
def test_greedy_text_on_gpu_matches_cpu(quickstart: Target) -> None:
    target = load_target(
        TargetConfig(str(ROOT / "scripts/quickstart/target"), dtype="float32", device="cuda")
    )
    prompts = chat_prompts(quickstart, "test", BATCH)
    drafter = load_proposer(f"{DRAFT_MODEL}:length=4,width=2,nodes=8", target, print)
    here = generate(quickstart, load_proposer("none", quickstart, print), prompts, 48)
    there = generate(target, drafter, prompts, 48)
    assert sum(a.token_ids == b.token_ids for a, b in zip(here, there, strict=True)) >= BATCH - 1
