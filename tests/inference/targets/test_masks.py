"""Packed rows: no document sees another, in every architecture, whether or not transformers sees to
it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from draftsmith.heads.errors import UserError
from draftsmith.inference.rounds.tree import Pass
from draftsmith.inference.targets import masks as documents
from draftsmith.inference.targets.masks import NAME, packed_masks, spans_of
from draftsmith.train.data.features import check_packing
from tests.helpers.architectures import ARCHITECTURES, HYBRIDS, architecture


def test_packed_mask_matches_hand_computed_values() -> None:
    """Documents of three and two tokens; a window of two."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found = packed_masks(positions, torch.float32, 2)
    full = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    near = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert found.sliding is not None
    assert (found.full[0, 0] == 0).int().tolist() == full
    assert (found.sliding[0, 0] == 0).int().tolist() == near
    assert found.for_transformers(mixed=False) is found.sliding
    assert found.for_transformers(mixed=True) == {
        "full_attention": found.full,
        "sliding_attention": found.sliding,
    }
    whole = packed_masks(positions, torch.float32, None)
    assert torch.equal(whole.full, found.full) and whole.for_transformers(True) is whole.full


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in HYBRIDS])
def test_every_architecture_can_be_trained_in_packed_rows(kind: str) -> None:
    target = architecture(kind, dtype=torch.float32)
    check_packing(target, kind)
    positions = torch.tensor([[*range(11), *range(13)]])  # longer than the windows
    ids = torch.arange(24)[None] * 7 % 100
    by_positions = target.forward(ids, Pass(positions=positions)).last
    target.masks_packed_rows = True
    by_mask = target.forward(ids, Pass(positions=positions)).last
    assert float((by_positions - by_mask).norm() / by_mask.norm()) < 1e-4


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_layers_keep_documents_apart(kind: str) -> None:
    """Each document has the features that transformers' layers give it alone, across the borders of
    chunks; another one's tokens change none of them by a bit."""
    target = architecture(kind, dtype=torch.float32)
    check_packing(target, kind)
    lengths = [11, 70, 1, 40]
    numbers = torch.tensor([[n for n, count in enumerate(lengths) for _ in range(count)]])
    positions = torch.cat([torch.arange(count) for count in lengths])[None]
    ids = torch.arange(sum(lengths))[None] * 7 % 100
    layout = Pass(positions=positions, documents=numbers)
    packed = target.forward(ids, layout).last[0].split(lengths)
    for found, text in zip(packed, ids[0].split(lengths), strict=True):
        alone = target.forward(text[None]).last[0]
        assert float((found - alone).norm() / alone.norm()) < 1e-4
    changed = ids.clone()
    changed[0, 11:81] = (changed[0, 11:81] + 1) % 100
    others = target.forward(changed, layout).last[0].split(lengths)
    for place in (0, 2, 3):
        assert torch.equal(packed[place], others[place])


def test_document_spans_match_hand_computed_values() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, -1, -1]])
    assert spans_of(numbers).rows == [[(0, 3), (3, 5)], [(0, 1), (1, 2), (2, 3), (3, 5)]]


def test_attention_calls_match_hand_computed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    index, real = documents.tables_of([(3, 5), (7, 10)])
    assert index.tolist() == [[3, 4, 4], [7, 8, 9]] and real.tolist() == [0, 1, 3, 4, 5]
    spans = spans_of(torch.tensor([[0, 0, 0, 1, 1, 2, 2]]))
    assert spans.calls(torch.device("cpu")) == ([(0, 0, 3), (0, 3, 5), (0, 5, 7)], [], None)
    monkeypatch.setattr(documents, "SHARING", {"cpu"})
    monkeypatch.setattr(documents, "SHORT", 2)
    monkeypatch.setattr(documents, "FEWEST", 2)
    alone, ((index, real),), order = spans_of(torch.tensor([[1, 1, 0, 0, 0, 2, 2]])).calls(
        torch.device("cpu")
    )
    assert alone == [(0, 2, 5)] and index.tolist() == [[0, 1], [5, 6]]
    # Results are those of the positions 2, 3, 4, then 0, 1, 5, 6.
    assert order is not None and order.tolist() == [3, 4, 0, 1, 2, 5, 6]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_short_documents_share_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty documents of 1 to 30 positions and one of 60, in two rows: the same states."""
    target = architecture(kind)
    check_packing(target, kind)
    draw = random.Random(0)
    lengths = [
        [draw.randrange(1, 31) for _ in range(20)],
        [draw.randrange(1, 31) for _ in range(20)],
    ]
    total = max(map(sum, lengths)) + 60
    for row in lengths:
        row.append(total - sum(row))
    numbers = torch.tensor(
        [[n for n, count in enumerate(row) for _ in range(count)] for row in lengths]
    )
    positions = torch.tensor([[p for count in row for p in range(count)] for row in lengths])
    ids = torch.arange(2 * total).view(2, total) * 7 % 100
    layout = Pass(positions=positions, documents=numbers)
    expected = target.forward(ids, layout, taps=(1,))
    calls = Counter[int]()
    attend = documents.scaled_dot_product_attention

    def counted(queries: Tensor, *others: Any, **more: Any) -> Tensor:
        calls[len(queries)] += 1
        return attend(queries, *others, **more)

    monkeypatch.setattr(documents, "SHARING", {"cpu"})
    monkeypatch.setattr(documents, "SHORT", 31)
    monkeypatch.setattr(documents, "scaled_dot_product_attention", counted)
    found = target.forward(ids, layout, taps=(1,))
    # Of lengths 1, 2 to 3, 4 to 7, 8 to 15, 16 to 30, and the two longer ones by themselves.
    assert calls.total() <= 7 * target.num_layers and calls[1] >= 2 * target.num_layers
    for own, other in zip((found.last, *found.taps), (expected.last, *expected.taps), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in HYBRIDS])
def test_models_without_windows_attend_in_documents(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes no mask, states are those with one, and decoding is as before."""
    target = architecture(kind, dtype=torch.float32)
    check_packing(target, kind)
    assert target.attends_in_documents == (target.window is None)
    numbers = torch.tensor([[0] * 11 + [1] * 13, [0] * 5 + [1] * 12 + [-1] * 7])
    positions = torch.cat([torch.arange(n) for n in (11, 13, 5, 12, 7)]).view(2, 24)
    ids = torch.arange(48).view(2, 24) * 7 % 100
    masked = target.forward(ids, Pass(positions=positions), taps=(0, 1))
    if target.attends_in_documents:
        with monkeypatch.context() as patch:
            patch.setattr(masking_utils, "find_packed_sequence_indices", None)
            rows = Pass(positions=positions, documents=numbers)
            found = target.forward(ids, rows, taps=(0, 1))
        for own, other in zip((found.last, *found.taps), (masked.last, *masked.taps), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
    assert target.decoder.config._attn_implementation != NAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_that_see_each_other_are_found_in_any_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = architecture("llama", dtype=dtype)
    check_packing(target, "llama")
    plain = target.forward
    monkeypatch.setattr(target, "forward", lambda ids, layout: plain(ids))
    with pytest.raises(UserError, match="lets packed documents see each other"):
        check_packing(target, "llama")
