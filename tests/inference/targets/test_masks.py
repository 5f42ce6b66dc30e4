"""Packed rows: no document sees another, in every architecture, whether or not transformers sees to
it."""

from __future__ import annotations

import pytest
import torch
from draftsmith.heads.errors import UserError
from draftsmith.inference.targets.masks import packed_mask
from draftsmith.train.features import check_packing

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_that_see_each_other_are_found_in_any_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = architecture("llama", dtype=dtype)
    check_packing(target, "llama")
    plain = target.forward
    monkeypatch.setattr(
        target, "forward", lambda ids, positions=None, **options: plain(ids, **options)
    )
    with pytest.raises(UserError, match="lets packed documents see each other"):
        check_packing(target, "llama")
