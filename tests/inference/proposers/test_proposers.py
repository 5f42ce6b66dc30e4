"""Drafters that need no training, and how drafters are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Request, decode, generate, generate_one
from draftsmith.inference.profile import key_of
from draftsmith.inference.proposers.contract import Accepted, Prompts
from draftsmith.inference.proposers.draft_model import DraftModelProposer, load_draft_model
from draftsmith.inference.proposers.kind import Settings
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.proposers.registry import load_proposer, parse_spec
from draftsmith.inference.proposers.with_lookup import WithLookup, replaced
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.rounds.tree import DraftTree, TreeShape
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, tiny_target
from tests.helpers.architectures import architecture, near_copy

DRAFTERS = QUICKSTART.parent / "drafters"
NONE: frozenset[int] = frozenset()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 2), st.integers(2, 4))
def test_ngram_lookup_is_the_latest_place_of_the_longest_ngram(
    text: list[int], shortest: int, longest: int
) -> None:
    index = NgramLookup(4, longest, shortest).new_index()
    index.extend(text)
    expected: list[int] = []
    for n in range(longest, shortest - 1, -1):
        places = [i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        if places:
            # goes on with its own copy behind the end of the text
            expected = (text[places[-1] :] * 4)[:4]
            break
    assert index.guess(4) == expected


def test_a_text_that_repeats_is_drafted_from_itself() -> None:
    """A target that loops: once the loop is in the text, lookups accept all their drafts."""
    target = tiny_target(seed=5, dtype=torch.float64)
    with torch.no_grad():  # the next token depends on the last one only, and soon returns
        for layer in target.decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
    plain = generate_one(target, load_proposer("none", target, print), [5], 80, eos_ids=NONE)
    assert len(set(plain.token_ids[40:])) < 20
    for spec in ("ngram:length=6", "ngram:length=6,longest=8"):
        found = generate_one(target, load_proposer(spec, target, print), [5], 80, eos_ids=NONE)
        assert found.token_ids == plain.token_ids
        assert len(found.rounds) < 45, spec


def test_lookups_draft_nothing_where_nothing_was_found() -> None:
    target = tiny_target(seed=5)
    found = generate_one(target, NgramLookup(shortest=3), [5, 6, 7, 8], 3)
    assert found.rounds[0].drafted == 0 and found.rounds[0].accepted == 0


def test_lookup_chain_replaces_the_tree_of_its_row() -> None:
    """Row 0 has found nothing, row 1 a chain that fits, row 2 one that is cut to three drafts."""
    shape = TreeShape((-1, 0, 0, 1))
    tree = DraftTree(torch.tensor([[9, 1, 2, 3]] * 3), shape)
    mixed = replaced(tree, [[], [7, 8], [4, 5, 6, 7]])
    assert mixed.tokens.tolist() == [[9, 1, 2, 3], [9, 7, 8, -1], [9, 4, 5, 6]]
    assert mixed.parents is not None and mixed.levels == 3
    assert mixed.parents.tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 2]]
    assert mixed.tables.depths.tolist() == [[0, 1, 1, 2], [0, 1, 2, 1], [0, 1, 2, 3]]
    chain = DraftTree(torch.tensor([[9, 1, 2]] * 2), TreeShape.chain(2))
    assert replaced(chain, [[7], []]).shape == TreeShape.chain(2)


def test_a_drafter_drafts_where_nothing_is_found_and_lookups_elsewhere() -> None:
    # any proposer is a drafter to it, here one with a token a round on held-out texts
    found = WithLookup(NgramLookup(length=2, longest=1), 3, 4, 1.0)
    twin = found.clone()
    draws: Any = None  # neither of the two asks for a choice
    for proposer, text, drafts in (
        (found, [5, 6, 7, 8, 9, 5, 6, 7, 8], [9, 5, 6, 7]),
        (twin, [5, 6, 7, 8, 9, 6, 4, 6], [4, 6]),  # one token alone was there before
    ):
        nothing: Any = None
        ids, lengths = torch.tensor([text[:-1]]), torch.tensor([len(text) - 1])
        proposer.prefill(
            Prompts(tokens=[text], ids=ids, lengths=lengths, hidden=nothing, cache=TreeCache(1, 0))
        )
        tree = proposer.propose(torch.tensor(text[-1:]), draws)
        assert tree.tokens.tolist() == [[text[-1], *drafts]]
    tree = found.propose(torch.tensor([8]), draws)
    assert tree.tokens.tolist() == [[8, 9, 5, 6, 7]], "the twin has a state of its own"


def test_joined_rounds_match_hand_computed_values() -> None:
    """Row 0 has accepted 2 and then 1 positions, row 1 has 1 and 3; a state is its token."""

    def accepted(ids: list[list[int]], counts: list[int]) -> Accepted:
        state = torch.tensor(ids)[..., None].float()
        return Accepted(
            tokens=[[row] * count for row, count in enumerate(counts)],
            path=torch.zeros(2, len(ids[0])),
            ids=torch.tensor(ids),
            counts=torch.tensor(counts),
            hidden=Hidden(state, (-state,)),
        )

    both = Accepted.joined(
        [accepted([[5, 6], [7, 7]], [2, 1]), accepted([[8, 8, 8], [1, 2, 3]], [1, 3])]
    )
    assert both.ids[0, :3].tolist() == [5, 6, 8] and both.ids[1].tolist() == [7, 1, 2, 3]
    assert both.counts.tolist() == [3, 4] and both.tokens == [[0] * 3, [1] * 4]
    assert torch.equal(both.hidden.last[..., 0], both.ids.float())
    assert torch.equal(both.hidden.taps[0], -both.hidden.last)
    alone = both.keep([0])
    assert alone.ids.tolist() == [[5, 6, 8]] and alone.counts.tolist() == [3]
    assert alone.hidden.taps[0].shape == (1, 3, 1)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "medusa"])
def test_a_drafter_that_missed_rounds_drafts_as_if_it_had_not(
    kind: str, quickstart: Target
) -> None:
    """The same drafts in every round as where the drafter is run in all of them."""

    class InEveryRound(WithLookup):
        def propose(self, root: torch.Tensor, draws: Any) -> DraftTree:
            self._can_skip = False
            return super().propose(root, draws)

    texts = ["for a in b:\n  c(a)\nfor a in d:\n  c(a)\n", "def __eq__(self, other):", "x = 1"]
    requests = [Request(quickstart.tokenizer(text).input_ids) for text in texts]
    trees: list[list[list[list[int]]]] = []
    passes: list[int] = []
    for way in (WithLookup, InEveryRound):
        drafter: Any = load_proposer(DRAFTERS / kind, quickstart, pytest.fail)
        proposer: Any = way(drafter, 2, 6)
        drafted, whole = noted(drafter), noted(proposer)
        for batch in (requests, requests[:1]):
            generate(quickstart, proposer, batch, 40)
        trees.append(whole)
        passes.append(len(drafted))
    assert trees[0] == trees[1] and 0 < passes[0] < passes[1]


def noted(proposer: Any) -> list[list[list[int]]]:
    """Return a list that gets the tokens of every tree that the proposer drafts."""
    trees: list[list[list[int]]] = []
    propose = proposer.propose

    def propose_and_note(root: torch.Tensor, draws: Any) -> DraftTree:
        tree = propose(root, draws)
        trees.append(tree.tokens.tolist())
        return tree

    proposer.propose = propose_and_note
    return trees


@pytest.mark.parametrize("settings_", [{}, {"width": 3, "nodes": 8}])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, rule="rejection")]
)
def test_a_draft_models_cache_holds_the_decided_text_after_every_round(
    settings_: dict, sampling: Sampling
) -> None:
    """Also right after a round that accepted everything, where a chain has not seen its last
    token."""
    target = architecture("llama")
    full = 0
    for noise in (0.0, 0.05):
        drafter = near_copy(target, noise)
        proposer = DraftModelProposer(
            drafter, target.vocab_size, TreeSettings(length=3, **settings_)
        )
        checked = 0

        def check(original, accepted, proposer=proposer, drafter=drafter) -> None:
            nonlocal checked, full
            original(accepted)
            full += any(len(tokens) == 4 for tokens in accepted.tokens)
            for row, (length, text) in enumerate(
                zip(proposer._cache.lengths, texts_of(accepted), strict=True)
            ):
                assert len(text) - 1 <= length <= len(text), "at most one token behind"
                fresh = drafter.forward(
                    torch.tensor([text[:length]]), cache=(cache := type(proposer._cache)(1, 64))
                )
                assert fresh is not None
                for ours, other in zip(
                    proposer._cache.states.values(), cache.states.values(), strict=True
                ):
                    torch.testing.assert_close(
                        ours.keys[row, :, :length], other.keys[0, :, :length], atol=1e-5, rtol=1e-5
                    )
                checked += 1

        texts = [[5, 6, 7], [8, 9, 10, 11, 12]]

        def texts_of(accepted, texts=texts) -> list[list[int]]:
            for row, tokens in enumerate(accepted.tokens):
                texts[row] += accepted.ids[row, : len(tokens)].tolist()
            return texts

        original = proposer.commit
        proposer.commit = lambda accepted, original=original: check(original, accepted)  # type: ignore[method-assign]
        requests = [Request(list(text), i) for i, text in enumerate(texts)]
        for steps in decode(target, proposer, requests, 13, sampling, NONE):
            if len(steps) < 2 or any(reason for _, _, reason in steps):
                break
        assert checked >= 4
    assert full, "rounds that accept everything must occur"


def test_a_draft_model_with_a_larger_or_smaller_head_drafts_the_targets_tokens_only() -> None:
    target = architecture("llama")
    for size in (80, 140):
        torch.manual_seed(1)
        other = near_copy(target, 0.0)
        other.model.resize_token_embeddings(size, mean_resizing=False)
        found = generate(
            target, DraftModelProposer(other, target.vocab_size), [[5, 6], [7]], 16, eos_ids=NONE
        )
        plain = generate(
            target, load_proposer("none", target, print), [[5, 6], [7]], 16, eos_ids=NONE
        )
        assert [g.token_ids for g in found] == [g.token_ids for g in plain]
        assert sum(r.accepted for g in found for r in g.rounds) > 4


def test_a_draft_model_with_fewer_positions_than_the_text_drafts_badly_and_not_wrongly() -> None:
    target, drafter = architecture("gpt2"), architecture("gpt2")
    drafter.model.config.max_position_embeddings = drafter.config.n_positions = 16
    drafter.model.transformer.wpe = torch.nn.Embedding.from_pretrained(
        drafter.model.transformer.wpe.weight[:16]
    )
    prompts = [list(range(3, 23)), [5, 6, 7]]
    both: tuple[dict[str, Any], ...] = ({}, {"width": 2})
    for settings_ in both:
        found = generate(
            target,
            DraftModelProposer(drafter, target.vocab_size, TreeSettings(**settings_)),
            prompts,
            30,
            eos_ids=NONE,
        )
        plain = generate(target, load_proposer("none", target, print), prompts, 30, eos_ids=NONE)
        assert [g.token_ids for g in found] == [g.token_ids for g in plain]


def test_a_draft_model_of_another_tokenizer_is_refused_with_the_reason(
    saved_tiny: Path, quickstart: Target
) -> None:
    with pytest.raises(UserError, match="has another tokenizer .* its token ids mean other text"):
        load_draft_model(str(saved_tiny), quickstart)


def test_drafter_specs_are_parsed_into_name_and_settings() -> None:
    assert parse_spec("ngram") == ("ngram", {})
    assert parse_spec("runs/a:nodes=8,dtype=bf16") == (
        "runs/a",
        {"nodes": 8, "dtype": "bfloat16"},
    )
    assert parse_spec("C:/models/x=1/y") == ("C:/models/x=1/y", {})
    with pytest.raises(UserError, match="'8' is not key=value"):
        parse_spec("ngram:length=8,8")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngram:size=8", "no setting .size.; there are: length, longest, shortest"),
        ("ngram:length=0", "length must be a whole number of at least 1, not 0"),
        ("ngram:longest=1,shortest=2", "must not be above longest"),
        ("ngram:length=--5", "length must be a whole number"),
        ("no/such/folder", "no/such/folder"),
        ("n-gram", "did you mean ngram"),
        ("ngram:length=100000", "1024 at most"),
        ("none:length=4", "there are: no settings"),
        ("ngram:lookup=4", "no setting .lookup."),
    ],
)
def test_a_spec_that_makes_no_sense_is_one_clear_error(
    spec: str, message: str, tiny: Target
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_proposer(spec, tiny, print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("distill:lookup=4", "no setting .lookup."),
        ("eagle3:lookup_length=4", "give lookup too"),
        ("eagle3:lookup=0", "lookup must be a whole number of at least 1, not 0"),
        ("eagle3:lookup=4,lookup_length=few", "lookup_length must be a whole number"),
    ],
)
def test_invalid_lookup_combined_with_drafter_is_refused(
    spec: str, message: str, quickstart: Target
) -> None:
    with pytest.raises(UserError, match=message):
        load_proposer(DRAFTERS / spec, quickstart, pytest.fail)


def test_a_tree_from_a_profile_keeps_its_lookup(quickstart: Target) -> None:
    spec = f"{DRAFTERS / 'eagle3'}:lookup=4"
    tuned: Settings = {"length": 3, "width": 2, "nodes": 6}
    proposer: Any = load_proposer(spec, quickstart, pytest.fail, tuned)
    assert proposer.name == "eagle3:lookup=4:tuned" and proposer.trained.plan.nodes == 6
    assert key_of(spec) == key_of(str(DRAFTERS / "eagle3"))
    alone = load_proposer(DRAFTERS / "eagle3", quickstart, pytest.fail)
    assert proposer.weight_bytes == alone.weight_bytes > 0
