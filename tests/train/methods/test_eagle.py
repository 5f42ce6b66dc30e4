"""How EAGLE learns, on sequences small enough to check by eye: rows, labels, teachers, weights,
metrics, and every option."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch

from draftsmith.distill.divergences import log_probs
from draftsmith.heads.eagle import EagleDrafter, drafter_of
from draftsmith.heads.errors import UserError
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.features import Features, LiveTarget
from draftsmith.train.losses.unroll import ShiftAhead, unroll
from draftsmith.train.losses.unrolled import TeacherPlaces, UnrolledObjective
from draftsmith.train.methods.dflash.loss import survival_weights
from draftsmith.train.methods.eagle.config import EagleConfig, EagleLoss
from draftsmith.train.methods.eagle.method import (
    METHOD,
    NOISE,
    first_weights,
    freeze_head,
    shape_for,
)
from draftsmith.train.objectives import acceptance_lengths, depth_metrics
from tests.conftest import tiny_target
from tests.helpers.alignment import batch_of, cut
from tests.helpers.random_eagles import random_eagle
from tests.helpers.trained import accepted_in_chains

TARGET = tiny_target(seed=4, dtype=torch.float64, num_hidden_layers=3)
STEPS = 3


def objective(drafter: EagleDrafter, **options: Any) -> UnrolledObjective:
    options = {"steps": STEPS, "rows_per_chunk": 2, **options}
    noise = options.pop("noise", 0.0)
    config = EagleLoss(**options).resolved(drafter.shape.version)
    return UnrolledObjective(config, drafter, TARGET.head, noise=noise)


def features_of(batch: Batch, drafter: EagleDrafter) -> Features:
    return LiveTarget(TARGET, drafter.taps).features(batch)


def pairs(batch: Batch, k: int) -> list[tuple[int, int]]:
    """(row, label position) with weight at step k."""
    return [(t, t + 2 + k) for t in batch.reply_run(1, 2 + k)[0].nonzero()[:, 0].tolist()]


def test_rows_and_labels_match_the_worked_example() -> None:
    """Prompt 0..3, reply 4..8: step 0 learns labels 5..8 at rows 3..6, step 1 labels 6..8 at rows
    3..5 (docs/objectives.md#index-tables)."""
    batch = batch_of((9, [(4, 9)]))
    assert [pairs(batch, k) for k in range(3)] == [
        [(3, 5), (4, 6), (5, 7), (6, 8)],
        [(3, 6), (4, 7), (5, 8)],
        [(3, 7), (4, 8)],
    ]


def test_tokens_are_read_further_along_at_each_step() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])[..., None].requires_grad_()
    ahead = ShiftAhead.apply(x, 4)
    assert [part[0, :, 0].tolist() for part in ahead] == [[2, 3, 0], [3, 0, 0], [0] * 3, [0] * 3]
    # Row 2 is read in row 1 of the first step and in row 0 of the second.
    weights = torch.tensor([[1.0, 10.0, 100.0], [1000.0, 1.0, 1.0], [1.0] * 3, [1.0] * 3])
    (torch.stack(ahead)[:, 0, :, 0] * weights).sum().backward()
    assert x.grad is not None and x.grad[0, :, 0].tolist() == [0, 1, 1010]


def test_sorting_rows_by_teacher_is_reversible() -> None:
    """The worked example: teachers 4..7 of labels 5..8; 6 teaches row 5 at step 0, row 4 at step 1,
    row 3 at step 2."""
    batch = batch_of((9, [(4, 9)]))
    valid = torch.stack([batch.reply_run(1, 2 + k) for k in range(STEPS)], dim=-1)
    places = TeacherPlaces(valid, torch.device("cpu"))
    assert places.teachers.tolist() == [4, 5, 6, 7]
    assert places.weights.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    outputs = [torch.arange(9.0).view(1, 9, 1) + 100 * k for k in range(STEPS)]
    assert places.by_teacher(outputs)[2, :, 0].tolist() == [5, 104, 203]
    by_teacher = (places.by_teacher(outputs)[..., 0] + 1) * places.weights
    by_root = places.by_root(by_teacher)
    assert by_root.tolist() == [[4, 104, 204], [5, 105, 205], [6, 106, 0], [7, 0, 0]]


def plain_loss(
    drafter: EagleDrafter, batch: Batch, features: Features, denominators: dict[str, float]
) -> float:
    """Step by step, row by row, straight from the index table; forward KL over the draft
    vocabulary."""
    normed = unroll(drafter, batch, features.taps, features.last, STEPS, "plain")
    weights, total = [0.8**k / sum(0.8**k for k in range(STEPS)) for k in range(STEPS)], 0.0
    kept = (
        drafter.draft_vocab_ids
        if drafter.draft_vocab_ids is not None
        else torch.arange(drafter.shape.vocab_size)
    )
    for b in range(len(batch.ids)):
        for k in range(STEPS):
            for t in range(batch.ids.shape[1] - 2 - k):
                run = range(t + 1, t + 3 + k)
                if not all(
                    batch.mask[b, j] and batch.documents[b, j] == batch.documents[b, t] for j in run
                ):
                    continue
                teacher = TARGET.head(features.last[b, t + 1 + k])
                if int(teacher.argmax()) not in kept.tolist():
                    continue
                p = teacher[kept].softmax(-1)
                q = log_probs(drafter.logits(normed[k][b, t]))
                total += float((p * (p.log() - q)).sum()) * weights[k] / denominators[f"depth{k}"]
    return total


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 draft vocabulary", "eagle3.1"])
def test_loss_is_the_sum_that_the_index_table_says(kind: str) -> None:
    drafter = random_eagle(TARGET, kind)
    row = batch_of((9, [(4, 9)]), (12, [(3, 6), (8, 12)]))
    other = batch_of((16, [(2, 16)]), pad=5)
    parts = [
        torch.cat([getattr(x, n) for x in (row, other)])
        for n in ("ids", "positions", "documents", "mask")
    ]
    batch = Batch(parts[0], parts[1], parts[2], parts[3])
    aim = objective(drafter)
    denominators = aim.weights(batch)
    features = features_of(batch, drafter)
    loss, _ = aim.forward(drafter, features, denominators)
    assert float(loss.detach()) == pytest.approx(
        plain_loss(drafter, batch, features, denominators), rel=1e-6
    )


def gradient_rows(drafter: EagleDrafter, batch: Batch, **options: Any) -> list[int]:
    """Positions of the head's input that carry gradient, by step."""
    aim = objective(drafter, **options)
    features = features_of(batch, drafter)
    seen: list[list[int]] = []
    kept: list[torch.Tensor] = []

    def probed(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        kept.extend(output.clone() for output in unroll(*arguments, **options))
        for probe in kept:
            probe.retain_grad()
        return kept

    with patch("draftsmith.train.losses.unrolled.unroll", probed):
        loss, _ = aim.forward(drafter, features, aim.weights(batch))
        loss.backward()
    for probe in kept:
        seen.append(
            [] if probe.grad is None else probe.grad[0].abs().sum(-1).nonzero()[:, 0].tolist()
        )
    return seen  # type: ignore[return-value]


@pytest.mark.parametrize("loss", ["kl", "ce", "lk-hybrid"])
def test_gradient_support_is_exactly_the_rows_with_weight(loss: str) -> None:
    """The first round of the reply is trained (row 3), and nothing past it."""
    drafter = random_eagle(TARGET, "eagle3").requires_grad_(True)
    batch = batch_of((9, [(4, 9)]), pad=3)
    assert gradient_rows(drafter, batch, loss=loss) == [
        [3, 4, 5, 6],
        [3, 4, 5],
        [3, 4],
    ]


@pytest.mark.parametrize("loss", ["kl", "ce", "tv"])
def test_measuring_metrics_changes_no_bit_of_loss_and_gradients(loss: str) -> None:
    """With a draft vocabulary, outside of which some of the target's best tokens lie."""
    drafter = random_eagle(TARGET, "eagle3 draft vocabulary").requires_grad_(True)
    batch = batch_of((40, [(4, 40)]))
    features, aim = features_of(batch, drafter), objective(drafter, loss=loss)
    found = []
    for measured in (True, False):
        value, sums = aim.forward(drafter, features, aim.weights(batch), measured)
        assert bool(sums) == measured
        found.append((value.detach(), *torch.autograd.grad(value, list(drafter.parameters()))))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_the_tail_of_the_features_is_never_a_teacher() -> None:
    """Garbage behind the text changes neither loss nor gradient; nor does padding."""
    drafter = random_eagle(TARGET, "eagle3").requires_grad_(True)
    found = []
    for pad, garbage in ((0, None), (6, 77.0), (6, -5.0)):
        batch = batch_of((9, [(4, 9)]), pad=pad)
        features = features_of(batch, drafter)
        if garbage is not None:
            features.last[:, 9:] = garbage
            for tap in features.taps:
                tap[:, 9:] = garbage
        aim = objective(drafter)
        loss, sums = aim.forward(drafter, features, aim.weights(batch))
        found.append(
            (
                loss.detach(),
                torch.autograd.grad(loss, list(drafter.parameters())),
                {n: v for n, (v, _) in sums.items()},
            )
        )
    for other in found[1:]:
        torch.testing.assert_close(found[0][0], other[0])
        for one, two in zip(found[0][1], other[1], strict=True):
            torch.testing.assert_close(one, two)
        assert all(torch.allclose(found[0][2][name], value) for name, value in other[2].items())


@pytest.mark.parametrize("kind", ["eagle1", "eagle3 draft vocabulary"])
def test_packed_loss_and_gradients_equal_sum_of_documents(kind: str) -> None:
    drafter = random_eagle(TARGET, kind).requires_grad_(True)
    packed = batch_of((9, [(4, 9)]), (7, [(2, 7)]))
    aim = objective(drafter, steps=None) if kind == "eagle1" else objective(drafter)
    denominators = aim.weights(packed)
    loss, _ = aim.forward(drafter, features_of(packed, drafter), denominators)
    gradients = torch.autograd.grad(loss, list(drafter.parameters()))
    parts: list[torch.Tensor] = []
    sums = [torch.zeros_like(g) for g in gradients]
    for start, end in ((0, 9), (9, 16)):
        part = cut(packed, start, end)
        value, _ = aim.forward(drafter, features_of(part, drafter), denominators)
        parts.append(value.detach())
        for total, grad in zip(
            sums, torch.autograd.grad(value, list(drafter.parameters())), strict=True
        ):
            total += grad
    torch.testing.assert_close(loss.detach(), sum(parts))
    for one, other in zip(gradients, sums, strict=True):
        torch.testing.assert_close(one, other)


def test_eagle1_learns_the_next_feature_and_a_tenth_of_the_distribution() -> None:
    drafter = random_eagle(TARGET, "eagle1")
    batch = batch_of((9, [(4, 9)]))
    features = features_of(batch, drafter)
    aim = objective(drafter, steps=None)
    assert aim.depths == 1
    loss, _ = aim.forward(drafter, features, aim.weights(batch))
    (output,) = unroll(drafter, batch, (), features.last, 1, "plain")
    total = 0.0
    for t in (3, 4, 5, 6):
        goal, p = features.last[0, t + 1], TARGET.head(features.last[0, t + 1]).softmax(-1)
        q = log_probs(TARGET.head(output[0, t]))
        off = (output[0, t] - goal).abs()
        smooth = torch.where(off < 1, 0.5 * off**2, off - 0.5).mean()
        total += float(smooth + 0.1 * (p * (p.log() - q)).sum())
    assert float(loss.detach()) == pytest.approx(total / 4, rel=1e-6)


def test_noise_is_of_the_stated_size_and_belongs_to_the_place_in_the_data() -> None:
    drafter = random_eagle(TARGET, "eagle1")
    batch = batch_of((8, [(4, 8)]), (16, [(4, 16)]))
    clean = features_of(batch, drafter)
    aim = objective(drafter, steps=None, noise=NOISE)
    noise = aim._disturbed(replace(batch, numbers=(7,)), clean)[1] - clean.last
    for span, length in ((slice(0, 8), 8), (slice(8, 24), 16)):
        largest = float(noise[0, span].abs().max())
        assert 0.9 < largest / (0.1 * 512 / length) <= 1
    again = aim._disturbed(replace(batch, numbers=(7,)), clean)[1] - clean.last
    other = aim._disturbed(replace(batch, numbers=(8,)), clean)[1] - clean.last
    assert torch.equal(noise, again) and not torch.equal(noise, other)


# Out-of-vocabulary targets, metrics, weights.


def test_targets_that_cannot_be_drafted_are_misses_and_teach_nothing_by_default() -> None:
    """A vocabulary of few tokens: agreement may not exceed the share of targets inside it, whatever
    the drafter learns there."""
    shape = shape_for(EagleConfig(taps=[0, 1], draft_vocab_size=20), TARGET.config)
    drafter = drafter_of(shape, TARGET.embedding_and_head).double()
    batch = batch_of((120, [(2, 120)]))
    features = features_of(batch, drafter)
    best = TARGET.head(features.last[0]).argmax(-1)
    inside = (
        torch.cat([best[4:40].unique(), torch.arange(300)]).unique(sorted=False)[:20].sort().values
    )
    first_weights(drafter, TARGET.head_weight, None, inside)
    aim = objective(drafter)
    _, sums = aim.forward(drafter, features, aim.weights(batch))
    teachers = best[2:119]  # of labels 3 .. 119
    share = float(torch.isin(teachers, inside).double().mean())
    assert share < 0.9
    total, count = sums["top1@1"]
    assert int(count) == 117 and float(total / count) <= share


def test_depth_metrics_equal_brute_force() -> None:
    torch.manual_seed(0)
    roots, depths = 40, 4
    right = torch.rand(roots, depths) < 0.6
    alpha = torch.rand(roots, depths)
    lengths = torch.randint(1, depths + 1, (roots,))
    valid = torch.arange(depths) < lengths[:, None]
    found = {
        n: float(a / b)
        for n, (a, b) in depth_metrics(alpha, right.float(), alpha, valid.float()).items()
    }
    for d in range(depths):
        there = [i for i in range(roots) if lengths[i] > d]
        before = [i for i in there if all(right[i, :d])]
        assert found[f"top1@{d + 1}"] == pytest.approx(
            sum(bool(right[i, d]) for i in there) / len(there)
        )
        assert found[f"cond@{d + 1}"] == pytest.approx(
            sum(bool(right[i, d]) for i in before) / len(before)
        )
        assert found[f"surv@{d + 1}"] == pytest.approx(
            sum(all(right[i, : d + 1]) for i in there) / len(there)
        )
        assert found[f"reach@{d + 1}"] == pytest.approx(
            sum(float(alpha[i, : d + 1].prod()) for i in there) / len(there)
        )
    lengths_found = acceptance_lengths(found)
    assert lengths_found == {
        "tau_rows": pytest.approx(1 + sum(found[f"surv@{d + 1}"] for d in range(depths)))
    }


def test_survival_weights_match_hand_computed_values() -> None:
    """Chances .5 .4 .2: prefixes .5 .2 .04; a better first depth earns .74, a second .24, a third
    .04; a masked one nothing."""
    chances = torch.tensor([[0.5, 0.4, 0.2], [0.5, 0.4, 0.9]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    weights = survival_weights(chances, valid)
    torch.testing.assert_close(weights, torch.tensor([[0.74, 0.24, 0.04], [0.7, 0.2, 0.0]]))


def test_weighted_log_overlaps_have_the_gradient_of_end_to_end_tv() -> None:
    """arXiv 2606.12370: fp64 autograd of 1 - (1/D) sum prod alpha against sum w_i / D (-log
    alpha_i) with constant weights."""
    torch.manual_seed(1)
    alphas = torch.rand(9, 5, dtype=torch.float64).clamp(0.05, 0.95).requires_grad_()
    valid = torch.arange(5) < torch.randint(1, 6, (9,))[:, None]
    survived = torch.where(valid, alphas, 1.0).cumprod(-1) * valid
    (whole,) = torch.autograd.grad((1 - survived.sum(-1) / 5).sum(), alphas)
    weighted = survival_weights(alphas, valid) * -torch.where(valid, alphas, 1.0).log()
    (parts,) = torch.autograd.grad(weighted.sum() / 5, alphas)
    torch.testing.assert_close(whole, parts)


def test_survival_weights_of_the_labels_give_the_gradient_of_the_expected_length() -> None:
    torch.manual_seed(2)
    z = torch.randn(6, 4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (6, 4))
    valid = torch.arange(4) < torch.randint(1, 5, (6,))[:, None]
    likely = z.softmax(-1).gather(-1, labels[..., None])[..., 0]
    expected = (torch.where(valid, likely, 1.0).cumprod(-1) * valid).sum()
    (whole,) = torch.autograd.grad(-expected, z, retain_graph=True)
    (parts,) = torch.autograd.grad((survival_weights(likely, valid) * -likely.log()).sum(), z)
    torch.testing.assert_close(whole, parts)


# Everything else.


CHANGES: dict[str, Any] = {
    "loss": "jsd", "steps": 2, "decay": 0.5, "feature_weight": 0.5,
    "token_weight": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_of_the_objective_changes_the_loss(name: str) -> None:
    drafter = random_eagle(TARGET, "eagle3")
    batch = batch_of((40, [(4, 40)]))
    losses = []
    for options in ({}, {name: CHANGES[name]}):
        aim = objective(drafter, **options)
        losses.append(
            float(aim.forward(drafter, features_of(batch, drafter), aim.weights(batch))[0].detach())
        )
    assert losses[0] != losses[1]


@pytest.mark.parametrize("options", [{"recompute": True}, {"rows_per_chunk": 7}])
def test_options_of_how_it_is_computed_change_nothing(options: dict[str, Any]) -> None:
    drafter = random_eagle(TARGET, "eagle3").requires_grad_(True)
    batch = batch_of((30, [(4, 30)]), (11, [(3, 11)]))
    found = []
    for more in ({}, options):
        aim = objective(drafter, **more)
        loss, _ = aim.forward(drafter, features_of(batch, drafter), aim.weights(batch))
        found.append(torch.autograd.grad(loss, list(drafter.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "kind", ["eagle1", "eagle3 draft vocabulary", "eagle3 of another width", "eagle3.1"]
)
def test_a_batch_with_nothing_to_learn_from_touches_every_parameter(kind: str) -> None:
    drafter = random_eagle(TARGET, kind).requires_grad_(True)
    batch = batch_of((5, []))
    aim = objective(drafter)
    loss, _ = aim.forward(
        drafter, features_of(batch, drafter), {f"depth{k}": 4.0 for k in range(STEPS)}
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0 for p in drafter.parameters())


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1, 2], [3, 1]])
def test_documents_too_short_to_teach_are_harmless(lengths: list[int]) -> None:
    drafter = random_eagle(TARGET, "eagle3").requires_grad_(True)
    batch = collate([[(np.arange(n) + 5, np.ones(n, bool)) for n in lengths]])
    aim = objective(drafter)
    loss, _ = aim.forward(drafter, features_of(batch, drafter), aim.weights(batch))
    assert all(
        torch.isfinite(g).all() for g in torch.autograd.grad(loss, list(drafter.parameters()))
    )


def test_the_target_stays_frozen() -> None:
    drafter = random_eagle(TARGET, "eagle1").requires_grad_(True)
    before = TARGET.fingerprint()
    batch = batch_of((9, [(4, 9)]))
    aim = objective(drafter)
    aim.forward(drafter, features_of(batch, drafter), aim.weights(batch))[0].backward()
    assert TARGET.fingerprint() == before
    assert all(p.grad is None and not p.requires_grad for p in TARGET.model.parameters())


def test_chains_by_the_training_pass_are_counted_from_the_root() -> None:
    ranks = torch.tensor([[-1, -1, -1], [0, 0, 1], [0, 0, 0], [2, 0, 0], [0, -1, 0]])
    assert accepted_in_chains(ranks, 3) == [0, 2, 3, 0, 1]
    assert accepted_in_chains(ranks, 1) == [0, 1, 1, 0, 1]
    drafter = random_eagle(TARGET, "eagle3")
    ids = torch.arange(9) + 5
    features = features_of(batch_of((9, [])), drafter)
    hidden = Hidden(features.last[0], tuple(t[0] for t in features.taps))
    found = METHOD.teacher_forced(drafter, hidden, ids, STEPS)
    assert (
        found.shape == (9, 3)
        and (found[0] == -1).all()
        and (found[8] == -1).all()
        and found[7, 1] == -1
    )


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"decay": 0.0},
        {"decay": 1.5},
        {"feature_weight": -1.0},
        {"rows_per_chunk": 0},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="objective"):
        EagleLoss(**options)


def test_the_feature_loss_of_version_3_is_about_the_state_before_its_final_norm() -> None:
    """And a frozen head stays as it is."""
    drafter = random_eagle(TARGET, "eagle3.1").requires_grad_(True)
    freeze_head(drafter, norm=True)
    batch = batch_of((9, [(4, 9)]))
    features = features_of(batch, drafter)
    aim = objective(drafter, steps=1, token_weight=0.0, feature_weight=1.0)
    loss, _ = aim.forward(drafter, features, aim.weights(batch))
    output = (
        unroll(drafter, batch, features.taps, features.last, 1, "plain")[0][0, [3, 4, 5, 6]]
        * drafter.norm.weight
    )
    expected = torch.nn.functional.smooth_l1_loss(output, features.last[0, [4, 5, 6, 7]])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    loss.backward()
    assert drafter.fc.weight.grad is not None
    aim = objective(drafter)
    aim.forward(drafter, features, aim.weights(batch))[0].backward()
    assert drafter.lm_head.weight.grad is None and drafter.norm.weight.grad is None


def test_a_frozen_head_leaves_the_final_norm_its_gradient() -> None:
    batch = batch_of((9, [(4, 9)]))
    norms = []
    for frozen in (False, True):
        drafter = random_eagle(TARGET, "eagle3.1").requires_grad_(True)
        if frozen:
            freeze_head(drafter, norm=False)
        features = features_of(batch, drafter)
        aim = objective(drafter)
        aim.forward(drafter, features, aim.weights(batch))[0].backward()
        assert (drafter.lm_head.weight.grad is None) == frozen
        assert drafter.norm.weight.grad is not None
        norms.append(drafter.norm.weight.grad)
    torch.testing.assert_close(*norms)


def test_a_shared_head_learns_as_a_frozen_copy_does() -> None:
    """The losses and the gradients of all that is trained are equal."""
    batch, found = batch_of((9, [(4, 9)])), []
    own = random_eagle(TARGET, "eagle3 draft vocabulary").requires_grad_(True)
    freeze_head(own, norm=False)
    shared = random_eagle(TARGET, "eagle3 shared head").requires_grad_(True)
    kept = {name: t for name, t in own.state_dict().items() if name != "lm_head.weight"}
    shared.load_state_dict(kept)
    freeze_head(shared, norm=False)
    for drafter in (own, shared):
        features, aim = features_of(batch, drafter), objective(drafter)
        loss = aim.forward(drafter, features, aim.weights(batch))[0]
        loss.backward()
        learned = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
        found.append((loss.detach(), learned))
    torch.testing.assert_close(*found)


def test_a_shared_head_with_a_bias_is_refused() -> None:
    """Phi-2 has one. Engines add none to an EAGLE-3's logits."""
    target = tiny_target()
    bias = torch.zeros(target.vocab_size)
    target.model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    run = cast(Any, SimpleNamespace(objective=EagleLoss(), init_from=None))
    with pytest.raises(UserError, match="has a bias, .* leave out heads.shared_head"):
        METHOD.make_objective(run, target, random_eagle(target, "eagle3 shared head"))


def test_a_head_that_begins_random_is_not_frozen() -> None:
    shape = shape_for(EagleConfig(taps=[0, 1], hidden_size=16), TARGET.config)
    drafter = drafter_of(shape, TARGET.embedding_and_head)
    run = cast(Any, SimpleNamespace(objective=EagleLoss(freeze_head=True), init_from=None))
    with pytest.raises(UserError, match="leave out heads.hidden_size or freeze_head"):
        METHOD.make_objective(run, TARGET, drafter)
