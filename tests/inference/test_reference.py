"""The engine against its explanation, `inference/reference.py`, and the page that quotes it."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from draftsmith.inference import reference
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.base.tree_settings import Ranks, TreeSettings
from draftsmith.inference.decode import Request, generate_one
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT, tiny_target
from tests.helpers.architectures import near_copy
from tests.helpers.pages import blocks_of

TREES: dict[str, list[Ranks]] = {
    "chain": [(0,), (0, 0), (0, 0, 0)],
    "tree": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)],
}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]
LIMIT = 30


@lru_cache
def models() -> tuple[Target, Target]:
    target = tiny_target(seed=4, dtype=torch.float64)
    return target, near_copy(target)


def logits_of(target: Target) -> reference.Model:
    """The logits of transformers' own forward pass."""

    @torch.no_grad()
    def logits(ids: reference.Ids) -> torch.Tensor:
        return target.model(torch.tensor([ids]), use_cache=False).logits[0]

    return logits


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_loop_emits_the_tokens_and_rounds_of_the_reference(
    tree: str, temperature: float
) -> None:
    target, draft_model = models()
    settings = TreeSettings(shape=TREES[tree])
    proposer = DraftModelProposer(draft_model, target.vocab_size, settings)
    models_alone = logits_of(target), logits_of(draft_model)
    counts: set[int] = set()
    for seed, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=temperature, seed=seed)
        found = generate_one(
            target, proposer, Request(prompt), LIMIT, sampling=sampling, eos_ids=frozenset()
        )
        one, other = (
            reference.with_noise(model, temperature, seed) if temperature else model
            for model in models_alone
        )
        tokens, accepted = reference.decode(one, other, prompt, TREES[tree], LIMIT)
        assert found.token_ids == tokens
        assert [done.accepted for done in found.rounds] == accepted
        counts |= {*accepted}
    assert {0, 1, 2, 3} <= counts, "rounds of every length must occur"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_does_not_depend_on_the_drafts(temperature: float) -> None:
    target, draft_model = map(logits_of, models())
    if temperature:
        target = reference.with_noise(target, temperature, 1)
    plain, none = reference.decode(target, draft_model, [5, 6], [], LIMIT)
    assert none == [0] * (LIMIT - 1)
    # A drafter that does not know the noise of the target guesses worse.
    tokens, accepted = reference.decode(target, draft_model, [5, 6], TREES["tree"], LIMIT)
    assert tokens == plain and len(accepted) < LIMIT - 1


def test_the_page_quotes_the_file() -> None:
    source = (ROOT / "inference" / "reference.py").read_text()
    page = blocks_of(ROOT / "docs" / "how-it-works.md")
    quoted = [block.text for block in page if "reference.py" in block.mark]
    assert quoted and all(text in source for text in quoted)
