"""The table of measured figures in an export's card."""

from __future__ import annotations

import pytest
import torch
from draftsmith.heads.exchange.card import CardFigures, _table
from draftsmith.heads.exchange.layouts import ExportRequest


@pytest.mark.parametrize(
    "measured, stored, remark",
    [
        (["float32"], torch.bfloat16, "Measured before the weights were rounded to bfloat16."),
        (["bfloat16"], torch.bfloat16, None),
        (["float32"], torch.float32, None),
        (["float32", "bfloat16"], torch.bfloat16, "Rows without `dtype=` were measured before"),
    ],
)
def test_the_card_says_whether_other_weights_were_measured(
    measured: list[str], stored: torch.dtype, remark: str | None
) -> None:
    rows = [
        CardFigures("dspark", True, 0.0, 1, 2.0, (1.9, 2.1), (0.6, 0.4), 24, dtype, "a report")
        for dtype in measured
    ]
    table = _table(ExportRequest("vllm", "out", "target", 3, stored), rows)
    assert table.count("| 2.00 (1.90-2.10) | .60 .40 | 24 |") == len(measured)
    assert remark in table if remark else "before the weights" not in table
