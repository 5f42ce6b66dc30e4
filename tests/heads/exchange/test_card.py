"""The table of measured figures in an export's card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from draftsmith.heads.exchange.card import CardFigures, CardPrompts, _table
from draftsmith.heads.exchange.engines.engine import ExportRequest
from draftsmith.heads.exchange.exporter import export
from tests.heads.exchange.random_artifacts import eagle, heads, order


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
    assert table.count(" | 2.00 (1.90-2.10) | .60 .40 |") == len(measured)
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


def test_the_header_is_what_the_hub_reads(tmp_path: Path) -> None:
    """As huggingface_hub reads it back: data, tags, and tau in the form of a model index."""
    sums = CardPrompts("gsm8k", "openai/gsm8k", "main", "test")
    rows = [
        CardFigures("eagle3", True, t, 1, 2.5, (2, 3), (0.6,), 24, "float32", "a report", prompts)
        for t, prompts in ((0.0, sums), (0.7, sums), (0.0, CardPrompts("held_out.jsonl")))
    ]
    rows.append(
        CardFigures("tree", False, 0, 1, float("nan"), (2, 3), (), 9, "float32", "a report")
    )
    artifact = eagle()
    artifact.provenance["data"] = {"datasets": ["openai/gsm8k"]}
    for engine in ("hf", "vllm"):
        request = replace(order(engine, tmp_path / engine), target="Qwen/Qwen3-8B")
        export(artifact, request, "mit", rows)
        text = (tmp_path / engine / "README.md").read_text()
        data: Any = ModelCard(text).data
        assert (data.base_model, data.datasets) == ("Qwen/Qwen3-8B", ["openai/gsm8k"])
        assert data.pipeline_tag == "text-generation" and data.model_name == engine
        in_transformers = engine == "hf"
        assert (data.library_name == "transformers") == in_transformers
        assert ("custom_generate" in data.tags) == in_transformers
        assert {"speculative-decoding", "eagle3"} <= {*data.tags}
        heading = "## Decode with transformers" if in_transformers else "## Serve with vLLM"
        assert f"{heading}\n\n```bash\n" in text and "\n| 24 of gsm8k | eagle3 | 0.7 | 1 |" in text
        results = [
            (one.dataset_type, one.dataset_config, one.dataset_split, one.metric_value)
            for one in data.eval_results
        ]
        on_hub = ("openai/gsm8k", "main", "test", 2.5)
        assert results == [on_hub, on_hub, ("custom", None, None, 2.5)]
        assert [one.metric_args["temperature"] for one in data.eval_results] == [0.0, 0.7, 0.0]
