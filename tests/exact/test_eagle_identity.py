"""Training and decoding are one computation: a packed training batch and a decode of the same text
give the same draft logits.

This is what a drafter that is right 98% of the time in training and 10% in serving cannot pass:
another mask shift, another rotary position, another norm, other features or another recycled state
would show here, at step 0 or at a later one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.heads.eagle import EagleDrafter
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Request, decode
from draftsmith.inference.proposers.contract import Accepted, Prompts
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.growth import Continue, Level
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import DraftTree, TreeShape
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.batches import collate
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.losses.unroll import unroll
from tests.conftest import tiny_target
from tests.helpers.eagle_texts import own_texts
from tests.helpers.random_eagles import KINDS, committed, random_eagle
from tests.helpers.trained import chat_prompts, story_prompts

STEPS = 4


class TextRecorder(EagleProposer):
    """Drafts the text's own next tokens, whatever it thinks of them, and notes its logits:
    `seen[position of root][step]`.

    With `wrong` it drafts a false token after so many true ones, so that rounds end early and
    everything is drafted again.
    """

    def __init__(
        self, drafter: EagleDrafter, texts: list[list[int]], steps: int, right: int
    ) -> None:
        super().__init__(drafter, TreeSettings(length=steps, width=1))
        plan: Any = SimpleNamespace(**vars(self.plan), draft=self.draft)
        self.plan = plan  # not a `TreePlan`: it knows tokens by their ids
        self._texts, self._steps, self._right = texts, steps, right
        self.seen: list[dict[int, list[torch.Tensor]]] = [{} for _ in texts]
        self._rows = list(range(len(texts)))
        self._roots: list[int] = []

    def prefill(self, prompts: Prompts) -> None:
        super().prefill(prompts)
        self._roots = [len(tokens) - 1 for tokens in prompts.tokens]

    def draft(
        self, first: torch.Tensor, root: torch.Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, torch.Tensor]:
        """In place of the plan's: `propose` itself is what is tested."""
        logits = [first]
        padded = [self._texts[row] + [5] * self._steps for row in self._rows]
        tokens = torch.tensor(
            [t[r : r + self._steps + 1] for t, r in zip(padded, self._roots, strict=True)]
        )
        for depth in range(1, self._steps):
            logits.append(
                go_on(
                    Level(
                        tokens[:, depth : depth + 1], torch.zeros_like(root)[:, None], None, depth
                    )
                )[:, 0]
            )
        for i, (row, at) in enumerate(zip(self._rows, self._roots, strict=True)):
            self.seen[row][at] = [x[i] for x in logits]
        drafted = tokens.clone()
        drafted[:, self._right + 1 :] = (drafted[:, self._right + 1 :] + 1) % 50
        return DraftTree(drafted, TreeShape.chain(self._steps)), root.new_zeros(0)

    def commit(self, accepted: Accepted) -> None:
        super().commit(accepted)
        self._roots = [r + len(n) for r, n in zip(self._roots, accepted.tokens, strict=True)]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self._rows, self._roots = [self._rows[r] for r in rows], [self._roots[r] for r in rows]


def decoded(
    target: Target, drafter: EagleDrafter, texts: list[tuple[list[int], int]], right: int
) -> list[dict]:
    """Logits of every round of decoding the texts (whose replies are the target's own), all in one
    ragged batch."""
    recorder = TextRecorder(drafter, [ids for ids, _ in texts], STEPS, right)
    longest = max(len(ids) - start for ids, start in texts)
    requests = [Request(ids[:start], i) for i, (ids, start) in enumerate(texts)]
    for _ in decode(target, recorder, requests, longest, eos_ids=frozenset()):
        pass
    return recorder.seen


def trained(
    target: Target, drafter: EagleDrafter, texts: list[tuple[list[int], int]], packed: bool
) -> list[list[torch.Tensor]]:
    """Logits `[S, V]` of each text at each step, by the training pass: all texts in one packed row
    and padding, or one by one."""
    rows = [(np.array(ids), np.arange(len(ids)) >= start) for ids, start in texts]
    source = LiveTarget(target, drafter.taps)
    if packed:
        filler = (
            np.arange(sum(len(ids) for ids, _ in rows) + 7) % 50,
            np.ones(sum(len(ids) for ids, _ in rows) + 7, bool),
        )
        batches = [collate([rows, [filler]])]
    else:
        batches = [collate([[row]]) for row in rows]
    found: list[list[torch.Tensor]] = []
    for batch in batches:
        features = source.features(batch)
        with torch.no_grad():
            outputs = unroll(drafter, batch, features.taps, features.last, STEPS)
            recorder = EagleProposer(drafter, TreeSettings(length=2, width=1))
            logits = [recorder._named(drafter.logits(x[0]), None) for x in outputs]
        starts = np.cumsum([0, *(len(ids) for ids, _ in rows)]) if packed else [0]
        lengths = [len(ids) for ids, _ in rows] if packed else [batch.ids.shape[1]]
        found += [[x[a : a + n] for x in logits] for a, n in zip(starts, lengths, strict=False)]
    return found


def compare(
    target: Target,
    drafter: EagleDrafter,
    texts: list[tuple[list[int], int]],
    packed: bool,
    right: int,
    steps: int = STEPS,
) -> int:
    """How many logits were compared, at step 0 and at recycled steps.

    In fp32 within 1e-4. Recycling random weights magnifies rounding a thousandfold, so they are
    compared in fp64, to 1e-9.
    """
    tolerance = 1e-4 if target.dtype == torch.float32 else 1e-9
    compared = 0
    for (ids, start), there, here in zip(
        texts,
        trained(target, drafter, texts, packed),
        decoded(target, drafter, texts, right),
        strict=True,
    ):
        for root, logits in here.items():
            for k in range(min(steps, len(ids) - 1 - root)):
                # Row t of docs/objectives.md#index-tables is the root's position less one.
                one, other = there[k][root - 1], logits[k]
                assert torch.equal(one.isinf(), other.isinf()), "the same tokens can be drafted"
                one, other = one[~one.isinf()], other[~other.isinf()]
                torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
                compared += 1
        assert min(here) == start, "the first round of the reply is among them"
    return compared


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_decoding_logits(kind: str, packed: bool) -> None:
    target = tiny_target(seed=2, dtype=torch.float64, num_hidden_layers=3)
    texts = own_texts(target, [[7, 8, 9], [20, 21, 22, 23, 24, 25, 26], [40]], limit=14)
    # Rounds in which nothing, something and everything is accepted end at different roots and
    # refill the cache differently.
    counts = [
        compare(target, random_eagle(target, kind), texts, packed, right) for right in (0, 2, STEPS)
    ]
    assert counts[0] > counts[2] > 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_training_logits_are_decoding_logits_of_trained_drafters(
    name: str, packed: bool, quickstart: Target
) -> None:
    """fp32, the committed drafters on the target that they were trained for."""
    texts = own_texts(quickstart, chat_prompts(quickstart, "test", 3), 24)
    for right in (1, STEPS):
        assert compare(quickstart, committed(name, quickstart).drafter, texts, packed, right) > 20


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_training_logits_are_decoding_logits_on_a_pretrained_target(
    kind: str, stories: Target
) -> None:
    """One step only: what random weights recycle grows past what fp32 can compare."""
    texts = own_texts(stories, story_prompts(stories, 4), 24)
    assert compare(stories, random_eagle(stories, kind), texts, True, right=1, steps=1) > 20


def test_scaled_and_partial_rotary_positions_are_the_same_in_training_and_decoding() -> None:
    for rope in (
        {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
        "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ):  # fmt: skip
        target = tiny_target(seed=2, dtype=torch.float64, rope_parameters=rope)
        texts = own_texts(target, [[7, 8, 9], [20, 21, 22, 23, 24]], limit=14)
        assert compare(target, random_eagle(target), texts, True, right=1) > 0


def test_a_cache_of_many_rounds_equals_one_of_a_fresh_prefill() -> None:
    """Whatever was drafted in between, the drafter's cache holds the target's features of the
    accepted text and nothing else."""
    target = tiny_target(seed=2)
    drafter = random_eagle(target)
    ((ids, start),) = own_texts(target, [[7, 8, 9, 10]], limit=20)
    kept: list[tuple[list[int], TreeCache]] = []

    class Watched(EagleProposer):
        def commit(self, accepted: Accepted) -> None:
            kept.append((list(self._cache.lengths), self._cache))
            super().commit(accepted)

    proposer = Watched(drafter, TreeSettings(length=3, width=3, nodes=8))
    for _ in decode(
        target, proposer, [Request(ids[:start])], len(ids) - start, eos_ids=frozenset()
    ):
        pass
    (length,), cache = kept[-1]
    features = LiveTarget(target, drafter.taps).features(
        collate([[(np.array(ids[:length]), np.ones(length, bool))]])
    )
    fresh = EagleProposer(drafter, TreeSettings(length=3, width=1))
    hidden = Hidden(features.last, features.taps)
    fresh.prefill(
        Prompts(
            tokens=[ids[: length + 1]],
            ids=features.batch.ids,
            lengths=torch.tensor([length]),
            hidden=hidden,
            cache=TreeCache(0, 0),
        )
    )
    fresh._catch_up(torch.tensor([ids[length]]))
    assert length > start + 8
    for ours, other in zip(cache.states.values(), fresh._cache.states.values(), strict=True):
        for one, another in ((ours.keys, other.keys), (ours.values, other.values)):
            torch.testing.assert_close(
                one[:, :, :length], another[:, :, :length], atol=1e-5, rtol=1e-5
            )
