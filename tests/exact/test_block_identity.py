"""Block drafters: training and decoding are one computation, and estimated tau counts what decoding
counts.

What a drafter that is right 98% of the time in training and 10% in serving cannot pass: a context
that reaches the anchor, positions off by one, another mask, or a cache that keeps a block's own
rows would show here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.heads.vocabulary import to_target
from draftsmith.inference.decode import Request, decode, generate, generate_one
from draftsmith.inference.metrics import emitted_per_round
from draftsmith.inference.proposers.contract import Accepted, Prompts
from draftsmith.inference.proposers.growth import Continue, Level
from draftsmith.inference.replay import replay, rounds_on_text
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import DraftTree, TreeShape
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.batches import collate
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.losses.blocks import contexts, run_blocks
from draftsmith.train.methods.dflash import method as dflash
from draftsmith.train.methods.dspark import method as dspark
from tests.conftest import tiny_target
from tests.helpers.eagle_texts import own_texts, text_of
from tests.helpers.random_blocks import KINDS, proposer_of, random_block
from tests.helpers.trained import accepted_in_chains


class Recorder:
    """Stands in for a proposer's plan: drafts the text's own next tokens, so many of them right,
    and notes the logits of every draft: `seen[row of the batch][position of the root]` `[D, V]`."""

    width = 1

    def __init__(self, texts: list[list[int]], drafts: int, right: int) -> None:
        self.length = self.nodes = drafts
        self.texts, self.right = texts, right
        self.rows, self.roots = list(range(len(texts))), [0] * len(texts)
        self.seen: list[dict[int, torch.Tensor]] = [{} for _ in texts]

    def draft(
        self, first: torch.Tensor, root: torch.Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, torch.Tensor]:
        texts = [self.texts[row] + [5] * (self.length + 1) for row in self.rows]
        tokens = torch.tensor(
            [t[r : r + self.length + 1] for t, r in zip(texts, self.roots, strict=True)]
        )
        assert torch.equal(tokens[:, 0], root)
        logits = [first]
        for depth in range(1, self.length):
            logits.append(
                go_on(
                    Level(
                        tokens[:, depth : depth + 1], torch.zeros_like(root)[:, None], None, depth
                    )
                )[:, 0]
            )
        for place, (row, at) in enumerate(zip(self.rows, self.roots, strict=True)):
            self.seen[row][at] = torch.stack(logits, dim=1)[place]
        drafted = tokens.clone()
        drafted[:, self.right + 1 :] = (drafted[:, self.right + 1 :] + 1) % 50
        return DraftTree(drafted, TreeShape.chain(self.length)), first.new_zeros(0)


def decoded(
    target: Target, drafter: Any, texts: list[tuple[list[int], int]], right: int
) -> list[dict[int, torch.Tensor]]:
    """Logits of every round of decoding the texts (whose replies are the target's own), all in one
    ragged batch."""
    proposer = proposer_of(drafter)
    recorder: Any = Recorder([ids for ids, _ in texts], drafter.drafts, right)
    prefill, commit, keep = proposer.prefill, proposer.commit, proposer.keep

    def prefilled(prompts: Prompts) -> None:
        prefill(prompts)
        recorder.roots = [len(tokens) - 1 for tokens in prompts.tokens]

    def committed(accepted: Accepted) -> None:
        commit(accepted)
        recorder.roots = [r + len(n) for r, n in zip(recorder.roots, accepted.tokens, strict=True)]

    def kept(rows: list[int]) -> None:
        keep(rows)
        recorder.rows, recorder.roots = (
            [recorder.rows[r] for r in rows],
            [recorder.roots[r] for r in rows],
        )

    proposer.plan, proposer.prefill, proposer.commit, proposer.keep = (
        recorder,
        prefilled,
        committed,
        kept,
    )  # type: ignore[method-assign]
    requests = [Request(ids[:start], i) for i, (ids, start) in enumerate(texts)]
    for _ in decode(
        target,
        proposer,
        requests,
        max(len(ids) - start for ids, start in texts),
        eos_ids=frozenset(),
    ):
        pass
    return recorder.seen


def trained(
    target: Target, drafter: Any, texts: list[tuple[list[int], int]]
) -> list[dict[int, torch.Tensor]]:
    """Logits `[D, V]` of a block at every root of each text, by the training pass, all texts in one
    row, beside another row."""
    rows = [(np.array(ids), np.arange(len(ids)) >= start) for ids, start in texts]
    total = sum(len(ids) for ids, _ in rows)
    batch = collate([rows, [(np.arange(total + 7) % 50, np.ones(total + 7, bool))]])
    features = LiveTarget(target, drafter.taps).features(batch)
    places = torch.arange(total).expand(2, -1)
    with torch.no_grad():
        outputs = run_blocks(drafter, batch, places, contexts(drafter, batch, features.taps))[0]
        before = batch.ids[0][
            (torch.arange(total)[:, None] + torch.arange(drafter.drafts)).clamp(max=total - 1)
        ]
        logits = drafter.logits(drafter.state(outputs, before))
    starts = np.cumsum([0, *(len(ids) for ids, _ in texts)])
    return [
        {n: logits[a + n] for n in range(len(ids))}
        for a, (ids, _) in zip(starts, texts, strict=False)
    ]


@pytest.mark.parametrize("right", [0, 1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_decoding_logits(kind: str, right: int) -> None:
    """Every draft of every round, in fp64: rounds that accept nothing, one draft, or all; prompts
    of one token, ragged rows."""
    target = tiny_target(seed=2, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind)
    texts = own_texts(target, [[7, 8, 9], [20, 21, 22, 23, 24, 25, 26], [40]], limit=14)
    compared = 0
    for (ids, start), there, here in zip(
        texts, trained(target, drafter, texts), decoded(target, drafter, texts, right), strict=True
    ):
        assert min(here) == start, "the first round of the reply is among them"
        for root, logits in here.items():
            # DSpark's later drafts would read past the text
            inside = min(drafter.drafts, len(ids) - root)
            named = to_target(there[root], drafter.draft_vocab_ids, target.vocab_size)
            torch.testing.assert_close(logits[:inside], named[:inside], atol=1e-9, rtol=1e-9)
            compared += inside
    assert compared >= 24


def check(target: Target, drafter: Any, prompts: list[list[int]], limit: int) -> float:
    """Chain: training pass, replay and decoding agree. Trees: replay and decoding agree. Returns
    the share of rounds that accepted."""
    method = dspark.METHOD if drafter.method == "dspark" else dflash.METHOD
    busy = rounds = 0
    for prompt in prompts:
        ids, hidden = text_of(target, prompt, drafter.taps, limit)
        ranks = method.teacher_forced(drafter, hidden, ids)
        accepted = accepted_in_chains(ranks, drafter.drafts)
        ways: list[dict[str, Any]] = [{}, {"width": 3, "nodes": 9}]
        for settings in ways:
            proposer = proposer_of(drafter, **settings)
            expanded = rounds_on_text(proposer, ids, len(prompt), hidden)
            found = emitted_per_round(generate_one(target, proposer, prompt, limit))
            assert expanded == found
            if not settings:
                assert replay(accepted, len(prompt), len(ids)) == found
                busy += sum(count > 1 for count in found)
                rounds += len(found)
    return busy / max(rounds, 1)


@pytest.mark.parametrize(
    "kind", ["dspark", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "dspark")]
)
def test_replay_counts_what_decoding_counts_where_replies_end_and_are_cut(kind: str) -> None:
    target = tiny_target(seed=5, num_hidden_layers=3)
    drafter = random_block(target, kind)
    prompts = [[4 + (i * j) % 200 for j in range(1, 5)] for i in range(8)]
    for limit in (1, 2, 3, 30):
        check(target, drafter, prompts, limit)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_ragged_batch_drafts_what_each_row_drafts_alone(kind: str) -> None:
    """Same rounds, not only the same text: the cache of every row follows its own commits."""
    target = tiny_target(seed=5, num_hidden_layers=3)
    drafter = random_block(target, kind)
    prompts = [[4 + (i * j) % 200 for j in range(1, 3 + 2 * i)] for i in range(5)]
    for settings in ({}, {"width": 3, "nodes": 9}):
        alone = [
            generate_one(target, proposer_of(drafter, **settings), prompt, 24) for prompt in prompts
        ]
        together = generate(target, proposer_of(drafter, **settings), prompts, 24)
        assert [emitted_per_round(g) for g in alone] == [emitted_per_round(g) for g in together]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_context_cache_after_any_rounds_is_that_of_a_fresh_prefill(kind: str) -> None:
    """Nothing of a block stays, and what was accepted has come again with the target's
    features."""
    target = tiny_target(seed=5, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind)
    texts = own_texts(target, [[7, 8, 9], [20, 21, 22, 23, 24]], limit=12)
    ids, start = texts[0]
    proposer = proposer_of(drafter)
    caches = []
    with torch.no_grad():
        hidden = target.forward(torch.tensor([ids]), taps=drafter.taps)

    def part(a, b):
        return type(hidden)(hidden.last[:, a:b], tuple(t[:, a:b] for t in hidden.taps))

    length, draws = torch.tensor([start]), draws_on(ids, start)
    for steps in ((start, [2, 1, 3]), (start + 6, [])):
        first, accepted = steps
        prompt = torch.tensor([ids[:first]])
        proposer.prefill(
            Prompts(
                tokens=[ids[: first + 1]],
                ids=prompt,
                lengths=length,
                hidden=part(0, first),
                cache=TreeCache(1, 1),
            )
        )
        at = first
        for count in accepted:
            proposer.propose(torch.tensor([ids[at]]), draws)
            nodes, counts = torch.arange(count)[None], torch.tensor([count])
            new = torch.tensor([ids[at : at + count]])
            proposer.commit(
                Accepted(
                    tokens=[ids[at + 1 : at + count + 1]],
                    path=nodes,
                    ids=new,
                    counts=counts,
                    hidden=part(at, at + count),
                )
            )
            at += count
        proposer._catch_up()
        cache = proposer._cache
        caches.append(
            [
                (state.keys[:, :, : cache.longest], state.values[:, :, : cache.longest])
                for state in cache.states.values()
            ]
        )
        assert cache.longest == at == start + 6
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def draws_on(ids: list[int], start: int) -> Draws:
    from draftsmith.inference.base.settings import GREEDY

    return Draws(
        GREEDY, torch.zeros(1, dtype=torch.long), torch.tensor([ids]), torch.tensor([start])
    )
