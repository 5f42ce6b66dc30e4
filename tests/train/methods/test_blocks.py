"""Blocks of drafts in training: where they stand, what they see, what they are taught, three ways
of computing them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.train.config import Memory
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.features import Features, LiveTarget
from draftsmith.train.losses.backends import Backend
from draftsmith.train.losses.blocks import Anchors, BlockAttention, Pair, contexts, run_blocks
from draftsmith.train.methods.dflash.config import BlockLoss
from draftsmith.train.methods.dflash.loss import BlockObjective
from draftsmith.train.methods.dflash.method import choose_mask_token, unused_tokens
from draftsmith.train.methods.dspark.config import DSparkLoss
from draftsmith.train.methods.dspark.method import DSparkObjective
from tests.conftest import tiny_target
from tests.helpers.random_blocks import KINDS, random_block

CPU = torch.device("cpu")


def packed(rows: list[list[tuple[int, int]]], numbers: tuple[int, ...] = ()) -> Batch:
    """Rows of documents (length, prompt): all behind the prompt is reply."""
    return collate(
        [
            [(np.arange(n) % 40 + 5 + i, np.arange(n) >= p) for i, (n, p) in enumerate(row)]
            for row in rows
        ],
        numbers,
    )


def objective_for(drafter: Any, target: Any, **config: Any) -> BlockObjective:
    if drafter.method == "dspark":
        return DSparkObjective(DSparkLoss(**config), drafter, target.head)
    return BlockObjective(BlockLoss(**config), drafter, target.head)


def test_anchors_are_roots_and_weights_stop_where_the_reply_does() -> None:
    """A prompt of 0 .. 3 and a reply of 4 .. 8: roots 4 .. 7. Behind it a second document, 9 .. 13,
    that replies from 11 on."""
    batch = packed([[(9, 4), (5, 2)]])
    anchors = Anchors.drawn(batch, 8, 3, seed=0)
    assert anchors.places.tolist() == [[4, 5, 6, 7, 11, 12, 12, 12]]
    assert anchors.weights[0].tolist() == [
        [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0],  # the token 8 is the last of its reply
        [1, 1, 0], [1, 0, 0],
        [0, 0, 0], [0, 0, 0],  # left over
    ]  # fmt: skip
    blocks, teachers, text, weights = anchors.drafts(batch.ids)
    assert blocks.tolist() == [0, 1, 2, 3, 4, 5] and torch.equal(weights, anchors.weights[0, :6])
    assert torch.equal(text[0], batch.ids[0, 4:8]) and teachers[0].tolist() == [4, 5, 6]


def test_a_draft_across_a_turn_is_not_taught() -> None:
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    batch = collate([[(np.arange(9), mask)]])
    anchors = Anchors.drawn(batch, 4, 5, seed=0)
    assert anchors.places.tolist() == [[1, 2, 6, 7]]
    assert anchors.weights[0].sum(-1).tolist() == [2, 1, 2, 1]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(1, 20),
    drafts=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_anchors_are_distinct_supervised_and_as_many_as_there_can_be(
    rows: list[list[tuple[int, int]]], count: int, drafts: int, seed: int
) -> None:
    batch = packed(rows)
    anchors = Anchors.drawn(batch, count, drafts, seed)
    assert anchors.places.shape == (len(rows), count)
    for row in range(len(rows)):
        places, weights = anchors.places[row].tolist(), anchors.weights[row]
        taught = [place for place, weight in zip(places, weights, strict=True) if weight[0]]
        valid = [
            n
            for n in range(batch.ids.shape[1] - 1)
            if batch.mask[row, n]
            and batch.mask[row, n + 1]
            and batch.documents[row, n] == batch.documents[row, n + 1]
        ]
        assert (
            taught == sorted(set(taught))
            and set(taught) <= set(valid)
            and len(taught) == min(count, len(valid))
        )
        for place, weight in zip(places, weights, strict=True):
            for d in range(1, drafts + 1):
                inside = (
                    place + d < batch.ids.shape[1]
                    and batch.documents[row, place] == batch.documents[row, place + d]
                )
                reached = inside and bool(batch.mask[row, place : place + d + 1].all())
                assert not weight[d - 1] or reached
                assert weight[d - 1] or not reached or not weight[0]


def test_anchor_draws_depend_only_on_row_and_seed() -> None:
    documents = [[(60, 5)], [(60, 5)]]
    one, again = (Anchors.drawn(packed(documents, (4, 5)), 6, 2, 0).places for _ in range(2))
    assert torch.equal(one, again) and not torch.equal(one[0], one[1])
    assert torch.equal(Anchors.drawn(packed(documents[:1], (5,)), 6, 2, 0).places[0], one[1])
    assert not torch.equal(Anchors.drawn(packed(documents, (4, 5)), 6, 2, 1).places, one)
    counts = torch.zeros(60)
    for number in range(400):
        counts[Anchors.drawn(packed(documents[:1], (number,)), 6, 2, 0).places[0]] += 1
    # 44 expected
    assert (
        counts[:5].sum() == 0
        and counts[59] == 0
        and counts[5:59].min() > 20
        and counts[5:59].max() < 75
    )


def states(
    batch: Batch,
    anchors: int,
    size: int,
    seed: int,
    dtype: torch.dtype,
    heads: int = 4,
    shared: int = 2,
) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    rows, length = batch.ids.shape

    def make(h, n):
        return torch.randn(rows, h, n, 8, generator=generator, dtype=dtype)

    context, own = (
        (make(shared, length), make(shared, length)),
        (make(shared, anchors * size), make(shared, anchors * size)),
    )
    return make(heads, anchors * size), context, own


class Reference(BlockAttention):
    """One block after another."""

    def __call__(self, queries: torch.Tensor, context: Pair, own: Pair) -> torch.Tensor:
        """Return the output by a softmax for one block after another."""
        output = torch.zeros_like(queries)
        heads = queries.shape[1] // own[0].shape[1]

        def seen(states: torch.Tensor, block_states: torch.Tensor) -> torch.Tensor:
            """Return the keys or values of one block `[G, N, E]`, from `[Gkv, .., E]` of each."""
            return torch.cat([states, block_states], dim=1).repeat_interleave(heads, dim=0)

        for row, anchors in enumerate(self._places.tolist()):
            for block, anchor in enumerate(anchors):
                slots = slice(block * self._size, (block + 1) * self._size)
                # The anchor is excluded: while it is the root it has no feature.
                before = slice(int(self._first[row, block]), anchor)
                keys = seen(context[0][row, :, before], own[0][row, :, slots])
                values = seen(context[1][row, :, before], own[1][row, :, slots])
                block_queries = queries[row, :, slots]
                scores = block_queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
                output[row, :, slots] = scores.softmax(-1) @ values
        return output


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(1, 40),
    size=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_sdpa_and_flex_equal_the_block_by_block_reference(
    rows: list[list[tuple[int, int]]], count: int, size: int, seed: int
) -> None:
    """Outputs, and for sdpa gradients, to 1e-9 in fp64, with more anchors than the text has blocks,
    and left-over ones."""
    batch = packed(rows)
    places = Anchors.drawn(batch, count, size - 1, seed).places
    queries, context, own = states(batch, count, size, seed, torch.float64)
    leaves = [t.requires_grad_() for t in (queries, *context, *own)]
    found = []
    for attention in (
        Reference(batch, places, size, CPU),
        BlockAttention(batch, places, size, CPU),
    ):
        out = attention(queries, context, own)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad(
            (out * weight).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        found.append((out.detach(), *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    detached = [tuple(t.detach() for t in pair) for pair in (context, own)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow without a compiler
        flex = BlockAttention(batch, places, size, CPU, "flex")(queries.detach(), *detached)  # type: ignore[arg-type]
    torch.testing.assert_close(flex, found[0][0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_block_attends_only_to_itself_and_context_before_anchor(backend: Backend) -> None:
    """Two documents, 0 .. 5 and 6 .. 9, blocks of 2 at 2, 3 and 8: every forbidden key and value is
    disturbed, and no output may change in any bit."""
    batch, size = packed([[(6, 0), (4, 0)]]), 2
    places = torch.tensor([[2, 3, 8]])
    queries, context, own = states(batch, 3, size, 1, torch.float32, 2, 2)
    allowed = {0: [0, 1], 1: [0, 1, 2], 2: [6, 7]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def run(c, o):
            return BlockAttention(batch, places, size, CPU, backend)(queries, c, o)

        before = run(context, own)
        for block, seen in allowed.items():
            mine = slice(block * size, (block + 1) * size)
            hidden, others = (
                [t for t in range(10) if t not in seen],
                [r for r in range(6) if r // size != block],
            )
            disturbed = []
            for (keys, values), places_hidden in ((context, hidden), (own, others)):
                keys, values = keys.clone(), values.clone()
                keys[:, :, places_hidden] += 3.0
                values[:, :, places_hidden] -= 5.0
                disturbed.append((keys, values))
            assert torch.equal(run(*disturbed)[:, :, mine], before[:, :, mine])
            for place in seen:  # and what it may see, it does
                values = context[1].clone()
                values[:, :, place] += 1.0
                assert not torch.equal(
                    run((context[0], values), own)[:, :, mine], before[:, :, mine]
                )


@pytest.mark.parametrize("kind", KINDS)
def test_no_feature_at_or_after_an_anchor_has_a_gradient(kind: str) -> None:
    """With more anchors than S / b: the loss of one block at a time against every
    position's features."""
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind)
    batch = packed([[(12, 3), (10, 2)]])
    features = LiveTarget(target, drafter.taps).features(batch)
    taps = tuple(t.requires_grad_() for t in features.taps)
    anchors = Anchors.drawn(batch, 16, drafter.drafts, 0)
    assert anchors.places.shape[1] > 22 / drafter.shape.block_size
    outputs = run_blocks(drafter, batch, anchors.places, contexts(drafter, batch, taps))
    for block, place in enumerate(anchors.places[0].tolist()):
        grads = torch.autograd.grad(outputs[0, block].square().sum(), taps, retain_graph=True)
        start = 0 if place < 12 else 12
        for grad in grads:
            outside = torch.cat([grad[0, :start], grad[0, place:]])
            assert float(outside.abs().sum()) == 0
            assert float(grad[0, start:place].abs().sum(-1).min()) > 0, (
                "and everything before it counts"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_changes_its_own_draft_and_no_distribution(kind: str) -> None:
    """A token behind the anchor is a label, never an input, but for DSpark's bias, which knows the
    token before each draft."""
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind)
    batch = packed([[(12, 3)]])
    features = LiveTarget(target, drafter.taps).features(batch)
    places = torch.tensor([[5]])
    context = contexts(drafter, batch, features.taps)
    before = run_blocks(drafter, batch, places, context)
    other = Batch(batch.ids.clone(), batch.positions, batch.documents, batch.mask)
    other.ids[0, 6:] += 1
    assert torch.equal(run_blocks(drafter, other, places, context), before)
    other.ids[0, 5] += 1
    assert not torch.equal(run_blocks(drafter, other, places, context), before)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_packed_row_teaches_what_its_documents_teach(kind: str) -> None:
    """Loss and gradients: one packed row, the same documents each in a row of its own, and with
    padding behind."""
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind).requires_grad_(True)
    objective = objective_for(drafter, target, anchors=30)
    documents = [(12, 3), (9, 2), (15, 6)]
    whole, apart = packed([documents]), packed([[d] for d in documents])
    apart.ids[1, :9] += 1  # tokens of `packed` depend on the place in the row
    apart.ids[2, :15] += 2
    found = []
    for batch in (whole, apart):
        features = LiveTarget(target, drafter.taps).features(batch)
        loss, sums = objective.forward(drafter, features, objective.weights(batch))
        found.append(
            (
                loss,
                *torch.autograd.grad(loss, list(drafter.parameters())),
                *(t for pair in sums.values() for t in pair),
            )
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_batch_without_roots_touches_every_parameter_and_teaches_nothing(kind: str) -> None:
    target = tiny_target(num_hidden_layers=3)
    drafter = random_block(target, kind).requires_grad_(True)
    objective = objective_for(drafter, target, anchors=4)
    for batch in (packed([[(6, 6)]]), packed([[(1, 0)], [(1, 0)]])):
        features = LiveTarget(target, drafter.taps).features(batch)
        assert objective.weights(batch) == {"drafts": 0}
        loss, sums = objective.forward(drafter, features, {"drafts": 5.0})
        loss.backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) == 0, name
        assert float(loss.detach()) == 0 and all(float(count) == 0 for _, count in sums.values())
        drafter.zero_grad()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize(
    "config",
    [
        {"weighting": "decay", "loss": "ce-l1", "gamma": 2.0},
        {"weighting": "d-pace", "loss": "ce"},
        {"weighting": "survival", "loss": "lk-alpha"},
        {"weighting": "decay", "loss": "kl"},
    ],
)
def test_chunks_and_recomputing_change_nothing_and_the_loss_is_what_the_formulas_say(
    kind: str, config: dict[str, Any]
) -> None:
    """Against a dense loop over blocks and drafts, in fp64."""
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind).requires_grad_(True)
    batch = packed([[(14, 3), (9, 2)], [(20, 4)]])
    features = LiveTarget(target, drafter.taps).features(batch)
    found = []
    for more in (
        {"rows_per_chunk": 100},
        {"rows_per_chunk": 2},
        {"rows_per_chunk": 3, "recompute": True},
    ):
        objective = objective_for(drafter, target, anchors=9, **config, **more)
        loss, _ = objective.forward(drafter, features, objective.weights(batch))
        found.append((loss, *torch.autograd.grad(loss, list(drafter.parameters()))))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(
        found[0][0].double(),
        dense(drafter, target, batch, features, **config),
        atol=1e-8,
        rtol=1e-6,
    )


def dense(
    drafter: Any, target: Any, batch: Batch, features: Features, **config: Any
) -> torch.Tensor:
    """The objective, draft by draft, with nothing shared but the blocks' outputs."""
    spark = drafter.method == "dspark"
    weighting = config.get("weighting", "decay" if spark else "d-pace")
    name = config["loss"]
    gamma = config.get("gamma") or (drafter.shape.block_size + 1) // 2
    anchors = Anchors.drawn(batch, 9, drafter.drafts, 0)
    outputs = run_blocks(drafter, batch, anchors.places, contexts(drafter, batch, features.taps))
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row in range(len(batch.ids)):
        for block, a in enumerate(anchors.places[row].tolist()):
            drafts = int(anchors.weights[row, block].sum())
            losses, chances, alphas = [], [], []
            for d in range(1, drafts + 1):
                state = outputs[row, block, d - 1]
                logits = target.head(drafter.norm(state))
                if spark:
                    logits = logits + drafter.transition(batch.ids[row, a + d - 1])
                p, q = target.head(features.last[row, a + d - 1]).softmax(-1), logits.softmax(-1)
                label = batch.ids[row, a + d]
                alpha, ce = torch.minimum(p, q).sum(), -q[label].log()
                loss = {
                    "ce": ce,
                    "kl": (p * (p / q).log()).sum(),
                    "lk-alpha": -alpha.log(),
                    "ce-l1": 0.1 * ce + 0.9 * (p - q).abs().sum(),
                }[name]
                if spark:
                    said = drafter.confidence(
                        drafter.state(state, batch.ids[row, a + d - 1])
                    ).sigmoid()
                    goal = alpha.detach()
                    loss = loss - goal * said.log() - (1 - goal) * (1 - said).log()
                losses.append(loss)
                alphas.append(alpha.detach())
                chances.append(
                    (alpha if weighting == "survival" else 0.5 * q[label] + 0.5).detach()
                )
            for d, loss in enumerate(losses):
                if weighting == "decay":
                    scale, count = np.exp(-d / gamma), np.exp(-d / gamma)
                else:
                    reached = [torch.stack(chances[: m + 1]).prod() for m in range(d, drafts)]
                    scale, count = torch.stack(reached).sum(), 1.0
                total, weights = total + scale * loss, weights + float(count)
    return total / weights


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_recomputing_the_layers_gives_the_same_outputs(kind: str) -> None:
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, kind).requires_grad_(True)
    batch = packed([[(14, 3)]])
    features = LiveTarget(target, drafter.taps).features(batch)
    places = torch.tensor([[3, 4, 9]])
    plain, again = (
        run_blocks(
            drafter,
            batch,
            places,
            contexts(drafter, batch, features.taps),
            memory=Memory(recompute),
        )
        for recompute in (False, True)
    )
    assert torch.equal(plain, again)
    wanted = [
        p for name, p in drafter.named_parameters() if name.startswith(("fc", "layers", "hidden"))
    ]
    for one, other in zip(
        torch.autograd.grad(plain.square().sum(), wanted),
        torch.autograd.grad(again.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_on_a_gpu_has_the_gradients_of_the_reference(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    batch = packed([[(200, 20), (184, 30)], [(384, 10)]])
    places = Anchors.drawn(batch, 64, 7, 0).places
    generator = torch.Generator().manual_seed(0)

    def make(h, n):
        return torch.randn(2, h, n, 64, generator=generator).to(device).requires_grad_()

    queries, context, own = make(4, 512), (make(2, 384), make(2, 384)), (make(2, 512), make(2, 512))
    leaves = [queries, *context, *own]
    found = []
    for backend, kind in (("plain", torch.float32), ("sdpa", dtype), ("flex", dtype)):

        def cast(pair, kind=kind) -> Any:
            return tuple(t.to(kind) for t in pair)

        kind_of_attention: Any = Reference if backend == "plain" else BlockAttention
        attention = kind_of_attention(batch, places, 8, device, backend)
        out = attention(queries.to(kind), cast(context), cast(own))
        found.append((out.detach().float(), *torch.autograd.grad((out.float() ** 2).sum(), leaves)))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert float((one - two).norm() / one.norm()) < limit


class Counted:
    """Stands in for batches where only the replies' tokens are asked for."""

    def __init__(self, *held: int) -> None:
        self.held = held

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        return (
            torch.bincount(torch.tensor(self.held), minlength=vocab_size)
            if self.held
            else torch.zeros(vocab_size)
        )


def test_the_mask_is_a_token_that_no_text_holds_and_that_has_an_embedding() -> None:
    """The tiny target's padding has a row of zeros, as torch makes them: queries of such masks are
    zero, and learn nothing."""
    target = tiny_target()

    def find(asked, *held):
        return choose_mask_token(asked, target, Counted(*held))  # type: ignore[arg-type]

    with pytest.raises(UserError, match="no unused token is known to mask drafts with; name one"):
        find(None)
    for asked, message in (
        (0, "mask_token 0 has next to no embedding"),
        (1, "mask_token 1 ends replies"),
        (7, "mask_token 7 occurs 2 times in the training replies"),
        (9999, "mask_token 9999 is not a token: the target has 291"),
    ):
        with pytest.raises(UserError, match=message):
            find(asked, 7, 8, 7)
    assert find(2, 7, 8) == 2
    target.tokenizer.add_special_tokens({"extra_special_tokens": ["<reserved_5>", "<mask>"]})
    assert unused_tokens(target) == [0], "tokens that the model has no row for are none"
    wider = tiny_target(vocab_size=310)
    assert unused_tokens(wider) == [291, 0] and choose_mask_token(None, wider, Counted()) == 291  # type: ignore[arg-type]
    wider.tokenizer.add_special_tokens({"extra_special_tokens": ["<reserved_5>", "<unused0>"]})
    assert unused_tokens(wider) == [293, 291, 292, 0]
    assert choose_mask_token(None, wider, Counted(293)) == 291  # type: ignore[arg-type]


def test_options_that_would_change_nothing_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gamma": 3.0}, "gamma is of weighting decay, not d-pace"),
        ({"loss": "kl"}, "d-pace weighs ce, not kl"),
        ({"anchors": 0}, "anchors must be at least 1"),
    ]
    for config, message in cases:
        with pytest.raises(UserError, match=message):
            BlockLoss(**config)
    with pytest.raises(UserError, match="confidence_weight must not be negative"):
        DSparkLoss(confidence_weight=-1.0)
