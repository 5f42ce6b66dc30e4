"""The model card of an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from draftsmith.heads.exchange.exporter import export
from tests.helpers.random_artifacts import eagle, heads, order


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
    """The hub's own library finds the target, the data sets and the tags in it."""
    artifact = eagle()
    artifact.provenance["data"] = {"datasets": ["openai/gsm8k"]}
    for engine in ("hf", "vllm"):
        request = replace(order(engine, tmp_path / engine), target="Qwen/Qwen3-8B")
        export(artifact, request, "mit")
        text = (tmp_path / engine / "README.md").read_text()
        data: Any = ModelCard(text).data
        assert (data.base_model, data.datasets) == ("Qwen/Qwen3-8B", ["openai/gsm8k"])
        assert data.pipeline_tag == "text-generation"
        in_transformers = engine == "hf"
        assert (data.library_name == "transformers") == in_transformers
        assert ("custom_generate" in data.tags) == in_transformers
        assert {"speculative-decoding", "eagle3"} <= {*data.tags}
        heading = "## Decode with transformers" if in_transformers else "## Serve with vLLM"
        assert f"{heading}\n\n```bash\n" in text
