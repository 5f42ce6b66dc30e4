"""One pass over all roots shows what every tree accepts: the rounds it predicts are those that
decoding takes, one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.drafters import load_proposer
from draftsmith.inference.evaluation.tuning.candidates import (
    Candidate,
    along,
    candidates,
    cut,
    fitted_score_temperature,
    rank_table,
    runs,
)
from draftsmith.inference.evaluation.tuning.replay_roots import (
    BEST,
    NEVER,
    KnownText,
    KnownTexts,
    nodes_needed,
)
from draftsmith.inference.metrics import emitted_per_round
from draftsmith.inference.proposers.plain import PlainDecoding
from draftsmith.inference.replay import replay
from draftsmith.inference.rounds.tree import DraftTree
from draftsmith.inference.settings import Sampling
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART
from tests.trained import chat_prompts

DRAFTERS = QUICKSTART.parent / "drafters"
SPECS = [
    str(DRAFTERS / "eagle3"),
    str(DRAFTERS / "eagle1") + ":length=4,width=3,nodes=9",
    str(DRAFTERS / "medusa"),
    str(QUICKSTART.parent / "draft_model"),
    str(DRAFTERS / "distill"),
    "ngram",
]
SAMPLE = [SPECS[0], SPECS[2], SPECS[4], "ngram"]


def check(target: Target, spec: str, probs: Sampling, limit: int, count: int, tried: int) -> None:
    """Prompts of unequal length as one batch; `tried` candidates drawn, the default always."""
    prompts = chat_prompts(target, "valid", count)
    requests = [Request(prompt, 7 * i, i) for i, prompt in enumerate(prompts)]
    plain = generate(target, PlainDecoding(), requests, limit, probs)
    texts = [
        KnownText.of(reply, (r.id, r.sample)) for reply, r in zip(plain, requests, strict=True)
    ]
    found, _ = candidates(spec, KnownTexts(target, texts), probs, lambda what: None)
    draw = random.Random(0)
    drawn: list[Candidate] = [found[0]]
    for kind in ("chain", "fixed", "dynamic"):
        those = [c for c in found if c.kind == kind]
        drawn += draw.sample(those, min(tried, len(those)))
    accepted = 0
    for candidate in drawn:
        predicted = [
            replay([0] * text.start + own, text.start, len(text.ids))
            for text, own in zip(texts, candidate.accepted, strict=True)
        ]
        decoded = generate(target, candidate.make(), requests, limit, probs)
        assert predicted == [emitted_per_round(g) for g in decoded], candidate.label
        assert [g.token_ids for g in decoded] == [g.token_ids for g in plain]
        assert max(r.drafted or 0 for g in decoded for r in g.rounds) <= candidate.nodes
        accepted += sum(r.accepted for g in decoded for r in g.rounds)
    assert accepted, "a drafter that is never right proves nothing"


@pytest.mark.parametrize("spec", SAMPLE[:2], ids=lambda spec: spec.split("/")[-1])
def test_predicted_rounds_are_the_decoded_ones(quickstart: Target, spec: str) -> None:
    check(quickstart, spec, Sampling(temperature=1.0, seed=3), 16, 3, 2)


@pytest.mark.parametrize(
    "spec", [pytest.param(SPECS[0], marks=pytest.mark.full), SPECS[2]], ids=["eagle3", "medusa"]
)
def test_predicted_greedy_rounds_are_the_decoded_ones(quickstart: Target, spec: str) -> None:
    check(quickstart, spec, Sampling(), 16, 3, 2)


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.split("/")[-1])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)],
    ids=["greedy", "sampled"],
)
def test_predicted_rounds_are_the_decoded_ones_full(
    quickstart: Target, spec: str, sampling: Sampling
) -> None:
    check(quickstart, spec, sampling, 96, 12, 12)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("ngram:length=9", marks=pytest.mark.full),
        "ngram:length=20,longest=5",
        f"{DRAFTERS / 'medusa'}:width=10,nodes=12",
        pytest.param(f"{DRAFTERS / 'medusa'}:width=1", marks=pytest.mark.full),
        pytest.param(f"{DRAFTERS / 'eagle3'}:length=1,width=8,nodes=8", marks=pytest.mark.full),
        f"{DRAFTERS / 'eagle3'}:length=9,width=2,nodes=20,score_temperature=0.6",
        pytest.param(f"{DRAFTERS / 'distill'}:length=9", marks=pytest.mark.full),
        str(DRAFTERS / "eagle3"),
        str(DRAFTERS / "medusa"),
        pytest.param(str(DRAFTERS / "distill"), marks=pytest.mark.full),
    ],
    ids=lambda spec: spec.split("/")[-1],
)
def test_the_tree_that_users_get_is_the_first_candidate(quickstart: Target, spec: str) -> None:
    """Whatever it is: what tune finds is compared with it. `evaluate`, `generate` and the API load
    a drafter in this way."""
    prompts = chat_prompts(quickstart, "valid", 2)
    plain = generate(quickstart, PlainDecoding(), prompts, 12)
    texts = [KnownText.of(reply, (i, 0)) for i, reply in enumerate(plain)]
    found, _ = candidates(spec, KnownTexts(quickstart, texts), Sampling(), lambda what: None)
    own = found[0]
    predicted = [
        replay([0] * t.start + a, t.start, len(t.ids))
        for t, a in zip(texts, own.accepted, strict=True)
    ]
    proposer = load_proposer(spec, quickstart, print, choose=True)
    decoded = generate(quickstart, proposer, prompts, 12)
    assert predicted == [emitted_per_round(g) for g in decoded], own.label
    again = generate(quickstart, load_proposer(spec, quickstart, print, own.setting), prompts, 12)
    assert [[(r.drafted, r.accepted) for r in g.rounds] for g in again] == [
        [(r.drafted, r.accepted) for r in g.rounds] for g in decoded
    ]


def test_a_fixed_tree_is_the_same_alone_and_in_a_batch(quickstart: Target) -> None:
    """Its deep levels have one node each, which must not see the other branches of the levels
    above."""
    shape = [[0], [1], [2], [0, 0], [1, 0], [2, 0], [1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0, 0]]
    prompts = chat_prompts(quickstart, "valid", 3)
    drafted: list[list[list[int]]] = []
    for batches in ([prompts], [[prompt] for prompt in prompts]):
        proposer = load_proposer(SPECS[0], quickstart, print, {"shape": shape})
        trees: list[list[int]] = []
        propose = proposer.propose

        def spy(
            root: torch.Tensor, draws: Any, propose: Any = propose, trees: list[list[int]] = trees
        ) -> DraftTree:
            tree = propose(root, draws)
            trees.extend(tree.tokens.tolist())
            return tree

        proposer.propose = spy  # type: ignore[method-assign]
        for batch in batches:
            generate(quickstart, proposer, batch, 24)
        drafted.append(sorted(trees))
    assert drafted[0] == drafted[1] and len(drafted[0]) > 9


def test_the_fitted_score_temperature_is_the_one_that_accepts_most() -> None:
    """Pools of one root, whose one path needs so many nodes at each score temperature; of equals
    the one nearest to 1."""
    need = {0.3: 30, 0.5: 16, 0.7: 9, 1.0: 40, 1.4: 17}

    def one(nodes):
        return [[[[nodes]] * 8]]

    score_temperature, taken = fitted_score_temperature(
        lambda score_temperature: one(need[score_temperature])
    )
    assert score_temperature == 0.7 and taken == {"0.3": 0, "0.5": 1, "0.7": 1, "1.0": 0, "1.4": 0}
    assert (
        fitted_score_temperature(
            lambda score_temperature: one({0.3: 1}.get(score_temperature, 99))
        )[0]
        == 0.3
    )


def test_beginnings_of_texts_have_the_counts_of_whole_ones_and_share_their_states(
    quickstart: Target,
) -> None:
    """Drafts at a root depend on the text before it; the counts stop at the last known token."""
    plain = generate(quickstart, PlainDecoding(), chat_prompts(quickstart, "valid", 2), 16)
    known = KnownTexts(quickstart, [KnownText.of(reply, (i, 0)) for i, reply in enumerate(plain)])
    begun = known.begin(6)
    assert begun.states((1, 3)) is known.states((1, 3)) is not known.states((1,))
    found, _ = candidates(SPECS[0], begun, Sampling(), lambda what: None)
    whole, _ = candidates(SPECS[0], known, Sampling(), lambda what: None)
    chains = {c.label: c.accepted for c in whole if c.kind == "chain"}
    for few in (c for c in found if c.kind == "chain"):
        for some, all_ in zip(few.accepted, chains[few.label], strict=True):
            assert len(some) == 6
            # root i has 6 - i known tokens behind it
            assert some == [min(count, 6 - i) for i, count in enumerate(all_[:6])]


@pytest.mark.parametrize("spec", ["none"])
def test_what_cannot_be_replayed_is_refused(quickstart: Target, spec: str) -> None:
    with pytest.raises(UserError, match="cannot be tuned"):
        candidates(spec, KnownTexts(quickstart, []), Sampling(), lambda what: None)


def test_a_lookup_beside_a_drafter_is_refused(quickstart: Target) -> None:
    spec = str(QUICKSTART.parent / "drafters" / "eagle3:lookup=4")
    with pytest.raises(UserError, match="leave out lookup"):
        candidates(spec, KnownTexts(quickstart, []), Sampling(), lambda what: None)


def test_an_adaptive_chain_is_refused(quickstart: Target) -> None:
    with pytest.raises(UserError, match="leave out threshold"):
        candidates(
            f"{DRAFTERS / 'distill'}:threshold=auto",
            KnownTexts(quickstart, []),
            Sampling(),
            lambda what: None,
        )


def pool(seed: int, count: int, levels: int, vocab: int) -> tuple[DraftTree, torch.Tensor]:
    """A random tree in level order whose scores never rise along a path, with ties; and a text to
    come."""
    draw = random.Random(seed)
    parents, depths, tokens, scores = [0], [0], [99], [0.0]
    for _ in range(count):
        above = draw.choice([n for n, d in enumerate(depths) if d < levels])
        parents.append(above)
        depths.append(depths[above] + 1)
        scores.append(scores[above] - draw.choice([0, 1, 1, 2]))
    order = sorted(range(len(parents)), key=lambda n: (depths[n], n))
    place = {n: i for i, n in enumerate(order)}
    taken: dict[int, set[int]] = {}
    for n in order[1:]:
        free = [t for t in range(vocab) if t not in taken.setdefault(parents[n], set())]
        token = draw.choice(free) if free else -1
        taken[parents[n]].add(token)
        tokens.append(token)
    tree = DraftTree(
        torch.tensor([tokens]),
        parents=torch.tensor([[place[parents[n]] for n in order]]),
        levels=levels,
        scores=torch.tensor([[float("inf"), *(scores[n] for n in order[1:])]], dtype=torch.float64),
    )
    return tree, torch.tensor([[draw.randrange(vocab) for _ in range(levels)]])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 14), st.integers(1, 4))
def test_nodes_needed_is_what_cutting_the_pool_by_hand_gives(
    seed: int, count: int, levels: int
) -> None:
    tree, coming = pool(seed, count, levels, 3)
    needed = nodes_needed(tree, coming)
    assert tree.scores is not None
    scores, tokens = tree.scores[0].tolist(), tree.tokens[0].tolist()
    parents, depths = tree.tables.parents[0].tolist(), tree.tables.depths[0].tolist()
    for limit in range(1, levels + 1):
        among = [n for n in range(1, tree.nodes) if depths[n] <= limit and tokens[n] >= 0]
        ranked = sorted(among, key=lambda n: (-scores[n], n))
        for size in range(1, len(ranked) + 1):
            kept = {0, *ranked[:size]}
            node, depth = 0, 0
            while (
                child := next(
                    (n for n in kept if n and parents[n] == node and tokens[n] == coming[0, depth]),
                    None,
                )
            ) is not None:
                node, depth = child, depth + 1
                if depth == limit:
                    break
            assert sum(int(need) <= size for need in needed[limit - 1][0]) == depth
    assert all(int(need) == NEVER or int(need) <= count for part in needed for need in part[0])


def test_ranks_by_hand() -> None:
    """One text of three roots: the ranks of the next three tokens."""
    ranks = [[[0, 0, 2], [0, 1, 0], [BEST, 0, 0]]]
    assert runs(ranks, 3) == [[2, 1, 0]] and runs(ranks, 1) == [[1, 1, 0]]
    assert along(ranks, [(0,), (0, 1), (0, 1, 0), (1,)]) == [[1, 3, 0]]
    table = rank_table(ranks)
    assert table[0][:2] == [2 / 3, 0] and table[1][:3] == [1 / 2, 1 / 2, 0], (
        "of the two roots whose first token was a candidate"
    )
    assert table[2][0] == 1 / 2 and table[2][2] == 1 / 2, (
        "never rising: rank 1 is offered before rank 2"
    )
    assert table[2][1] == 1 / 2
    assert (
        cut([[[[2], [3, 7]]]], 1, 2) == [[1]]
        and cut([[[[2], [3, 7]]]], 2, 6) == [[1]]
        and cut([[[[2], [3, 7]]]], 2, 7) == [[2]]
    )
