"""Packed rows: no document sees another, in every architecture, whether or not transformers sees to
it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import masking_utils

from draftsmith.heads.errors import UserError
from draftsmith.inference.targets.documents import NAME, spans_of
from draftsmith.inference.targets.masks import packed_mask
from draftsmith.train.data.features import check_packing
from tests.architectures import ARCHITECTURES, architecture


def test_a_packed_mask_that_can_be_checked_by_eye() -> None:
    """Documents of three and two tokens; a window of two."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found = packed_mask(positions, torch.float32, 2, mixed=True)
    full = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    near = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert (found["full_attention"][0, 0] == 0).int().tolist() == full
    assert (found["sliding_attention"][0, 0] == 0).int().tolist() == near
    assert torch.equal(
        packed_mask(positions, torch.float32, None, mixed=False), found["full_attention"]
    )
    assert torch.equal(
        packed_mask(positions, torch.float32, 2, mixed=False), found["sliding_attention"]
    )


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_every_architecture_can_be_trained_in_packed_rows(kind: str) -> None:
    target = architecture(kind, dtype=torch.float32)
    check_packing(target, kind)
    positions = torch.tensor([[*range(11), *range(13)]])  # longer than the windows
    ids = torch.arange(24)[None] * 7 % 100
    by_positions = target.forward(ids, positions).last
    target.masks_packed_rows = True
    by_mask = target.forward(ids, positions).last
    assert float((by_positions - by_mask).norm() / by_mask.norm()) < 1e-4


def test_spans_that_can_be_checked_by_eye() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, -1, -1]])
    assert spans_of(documents) == [[(0, 3), (3, 5)], [(0, 1), (1, 2), (2, 3), (3, 5)]]


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_models_without_windows_attend_in_documents(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes no mask, states are those with one, and decoding is as before."""
    target = architecture(kind, dtype=torch.float32)
    check_packing(target, kind)
    assert target.attends_in_documents == (target.window is None)
    documents = torch.tensor([[0] * 11 + [1] * 13, [0] * 5 + [1] * 12 + [-1] * 7])
    positions = torch.cat([torch.arange(n) for n in (11, 13, 5, 12, 7)]).view(2, 24)
    ids = torch.arange(48).view(2, 24) * 7 % 100
    packed_row = partial(target.forward, ids, positions, taps=(0, 1))
    masked = packed_row()
    if target.attends_in_documents:
        with monkeypatch.context() as patch:
            patch.setattr(masking_utils, "find_packed_sequence_indices", None)
            found = packed_row(documents=documents)
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
    monkeypatch.setattr(target, "forward", lambda ids, positions=None, documents=None: plain(ids))
    with pytest.raises(UserError, match="lets packed documents see each other"):
        check_packing(target, "llama")
