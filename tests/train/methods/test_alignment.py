"""Which row learns which label from which teacher with which weight, on sequences small enough to
check by eye."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.features import Features, LiveTarget
from draftsmith.train.methods.medusa.config import MedusaLoss
from draftsmith.train.methods.medusa.loss import MedusaObjective
from draftsmith.train.methods.medusa.method import copy_head
from tests.conftest import tiny_target
from tests.helpers.alignment import batch_of, cut

TARGET = tiny_target()


def rows(batch: Batch, head: int) -> list[int]:
    return batch.reply_run(1, 2 + head)[0].nonzero()[:, 0].tolist()


def test_rows_of_each_head_match_worked_example() -> None:
    """Prompt 0..3, reply 4..8 (8 = end of turn): head 0 learns labels 5..8 at rows 3..6, head 1
    labels 6..8 at rows 3..5."""
    batch = batch_of((9, [(4, 9)]))
    assert [rows(batch, h) for h in range(4)] == [[3, 4, 5, 6], [3, 4, 5], [3, 4], [3]]


def test_the_first_round_of_every_reply_is_trained_and_no_turn_gap_is_crossed() -> None:
    """Replies at 3..5 and 8..10 of 11 tokens: rows 2, 3 and 7, 8 for head 0; nothing at 4..6."""
    batch = batch_of((11, [(3, 6), (8, 11)]))
    assert [rows(batch, h) for h in range(3)] == [[2, 3, 7, 8], [2, 7], []]


def test_documents_of_a_packed_row_do_not_supervise_each_other() -> None:
    """The second document begins with a reply: its first token has no feature before it, and no row
    of the first reaches it."""
    batch = batch_of((4, [(2, 4)]), (4, [(0, 4)]))
    assert [rows(batch, h) for h in range(3)] == [[1, 4, 5], [4], []]


def loss_and_gradient(
    batch: Batch, last: torch.Tensor, loss: str = "kl"
) -> tuple[float, torch.Tensor, dict]:
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaShape(3), TARGET.hidden_size, TARGET.vocab_size)
    copy_head(heads, TARGET.head_weight)
    objective = MedusaObjective(MedusaLoss(loss=loss, rows_per_chunk=2), 3, TARGET.head)  # type: ignore[arg-type]
    last = last.detach().requires_grad_()
    value, sums = objective.forward(heads, Features(batch, last), objective.weights(batch))
    value.backward()
    assert last.grad is not None
    return float(value.detach()), last.grad, {k: float(a / b) for k, (a, b) in sums.items()}


def features_of(batch: Batch) -> torch.Tensor:
    return LiveTarget(TARGET).features(batch).last


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_gradient_support_is_exactly_the_rows_with_weight(loss: str) -> None:
    batch = batch_of((9, [(4, 9)]), pad=2)
    _, gradient, _ = loss_and_gradient(batch, features_of(batch), loss)
    assert gradient[0].abs().sum(-1).nonzero()[:, 0].tolist() == [3, 4, 5, 6]


def test_loss_is_the_sum_that_the_index_table_says() -> None:
    """The objective against plain loops over (head, row) of docs/objectives.md#index-tables."""
    batch = batch_of((9, [(4, 9)]), (6, [(3, 6)]))
    last = features_of(batch)
    heads = MedusaHeads(MedusaShape(3), TARGET.hidden_size, TARGET.vocab_size)
    copy_head(heads, TARGET.head_weight)
    for kind in ("kl", "ce"):
        expected, raw = 0.0, [0.8**i for i in range(3)]
        for i in range(3):
            total, count = 0.0, 0
            for t in range(batch.ids.shape[1]):
                run = range(t + 1, t + 3 + i)
                if run[-1] >= batch.ids.shape[1] or not all(batch.mask[0, j] for j in run):
                    continue
                if any(batch.documents[0, j] != batch.documents[0, t] for j in run):
                    continue
                log_q = torch.log_softmax(heads.logits(last[0, t], i), -1)
                log_p = torch.log_softmax(TARGET.head(last[0, t + 1 + i]), -1)
                label = batch.ids[0, t + 2 + i]
                loss = (log_p.exp() * (log_p - log_q)).sum() if kind == "kl" else -log_q[label]
                total += float(loss.detach())
                count += 1
            expected += raw[i] / sum(raw) * total / count
        value, _, _ = loss_and_gradient(batch, last, kind)
        assert value == pytest.approx(expected, rel=1e-5)


def test_padding_and_states_after_the_text_change_nothing() -> None:
    batch, padded = batch_of((9, [(4, 9)])), batch_of((9, [(4, 9)]), pad=5)
    last = features_of(batch)
    garbage = torch.full((1, 5, TARGET.hidden_size), 77.0)
    value, gradient, sums = loss_and_gradient(batch, last)
    other, longer, more = loss_and_gradient(padded, torch.cat([last, garbage], dim=1))
    assert value == pytest.approx(other, rel=1e-6) and sums == pytest.approx(more, nan_ok=True)
    torch.testing.assert_close(longer[:, :9], gradient)
    assert float(longer[:, 9:].abs().sum()) == 0


def test_packed_loss_equals_sum_of_separate_documents() -> None:
    """Features and loss of a packed row equal those of its documents alone, with the same
    denominators."""
    one, two = (9, [(4, 9)]), (7, [(2, 7)])
    packed = batch_of(one, two)
    objective = MedusaObjective(MedusaLoss(), 3, TARGET.head)
    heads = MedusaHeads(MedusaShape(3), TARGET.hidden_size, TARGET.vocab_size)
    copy_head(heads, TARGET.head_weight)
    source, weights = LiveTarget(TARGET), objective.weights(packed)
    whole = float(objective.forward(heads, source.features(packed), weights)[0].detach())
    parts = 0.0
    for start, end in ((0, 9), (9, 16)):
        part = cut(packed, start, end)
        parts += float(objective.forward(heads, source.features(part), weights)[0].detach())
    assert whole == pytest.approx(parts, rel=1e-5)


def test_a_batch_with_nothing_to_learn_from_touches_every_parameter() -> None:
    batch = batch_of((5, []))
    heads = MedusaHeads(MedusaShape(3), TARGET.hidden_size, TARGET.vocab_size)
    objective = MedusaObjective(MedusaLoss(), 3, TARGET.head)
    loss, _ = objective.forward(
        heads, Features(batch, features_of(batch)), {"depth0": 4.0, "depth1": 4.0, "depth2": 4.0}
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0 for p in heads.parameters())


def test_features_of_a_batch_equal_those_of_each_row_alone_twice() -> None:
    source = LiveTarget(TARGET)
    lengths = [5, 9, 12]
    documents = [[(np.arange(n) + 5, np.ones(n, bool))] for n in lengths]
    for _ in range(2):
        together = source.features(collate(documents)).last
        for i, n in enumerate(lengths):
            alone = source.features(collate([documents[i]])).last[0]
            torch.testing.assert_close(together[i, :n], alone, atol=1e-5, rtol=1e-5)


def test_features_are_hugging_face_hidden_states_bit_for_bit() -> None:
    source = LiveTarget(TARGET, taps=(0, 1))
    batch = collate([[(np.arange(9) + 5, np.ones(9, bool))]])
    features = source.features(batch)
    out = TARGET.model(
        batch.ids, position_ids=batch.positions, output_hidden_states=True, use_cache=False
    )
    assert torch.equal(features.last, out.hidden_states[-1])
    assert all(torch.equal(tap, out.hidden_states[i]) for i, tap in enumerate(features.taps))
    assert torch.equal(TARGET.head(features.last), out.logits)


def test_the_target_stays_frozen() -> None:
    before = TARGET.fingerprint()
    batch = batch_of((9, [(4, 9)]))
    loss_and_gradient(batch, features_of(batch))
    assert TARGET.fingerprint() == before
    assert all(p.grad is None and not p.requires_grad for p in TARGET.model.parameters())
