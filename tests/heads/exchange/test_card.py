"""The table of measured figures in an export's card."""

from __future__ import annotations

import pytest
import torch
from draftsmith.heads.exchange.card import CardFigures, _table
from draftsmith.heads.exchange.layouts import ExportRequest


@pytest.mark.parametrize(
    "measured, stored, exported, rounded",
    [
        (["float32"], 4, torch.bfloat16, ["dspark 0"]),
        (["bfloat16"], 4, torch.bfloat16, []),
        (["float32"], 2, torch.bfloat16, []),
        (["float32"], 4, torch.float32, []),
        (["float32", "bfloat16", "float32"], 4, torch.bfloat16, ["dspark 0", "dspark 2"]),
    ],
)
def test_the_card_names_what_was_measured_with_wider_weights(
    measured: list[str], stored: int, exported: torch.dtype, rounded: list[str]
) -> None:
    rows = [
        CardFigures(f"dspark {i}", True, 0.0, 1, 2.0, (1.9, 2.1), (0.6, 0.4), 24, dtype, "a report")
        for i, dtype in enumerate(measured)
    ]
    table = _table(ExportRequest("vllm", "out", "target", 3, exported), rows, stored)
    assert table.count("| 2.00 (1.90-2.10) | .60 .40 | 24 |") == len(measured)
    remark = f"Measured before rounding to bfloat16: {', '.join(rounded)}."
    assert remark in table if rounded else "before rounding" not in table
