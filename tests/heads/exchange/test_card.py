"""The table of measured figures in an export's card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from draftsmith.heads.exchange.card import CardFigures, _table
from draftsmith.heads.exchange.exporter import export
from draftsmith.heads.exchange.layouts import ExportRequest
from tests.heads.exchange.random_artifacts import heads, order


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


def test_the_card_names_a_licence_only_where_one_was_given(tmp_path: Path) -> None:
    """As huggingface_hub reads it; without one, a header that it takes and no word of a licence."""
    for name, licence in (("with", "apache-2.0"), ("without", None)):
        given: dict[str, Any] = {} if licence is None else {"licence": licence}
        export(heads(), order("tgi", tmp_path / name), **given)
        text = (tmp_path / name / "README.md").read_text()
        header = ModelCard(text).data.to_dict()
        assert header.get("license") == licence and header["library_name"] == "draftsmith"
        assert ("license" in text.lower()) == (licence is not None)
