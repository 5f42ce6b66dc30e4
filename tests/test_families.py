"""Small random targets of twelve families, from doctor to import, as a user goes.

Each remark that training makes on engines has to be what the export and its card say, and each
engine either gets files that read back as the same drafter, or is refused with the reason.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import draftsmith
from draftsmith.commands.cli import main
from draftsmith.heads.exchange.engines import ENGINES, drafter_facts, engine_remarks, refusal
from draftsmith.heads.exchange.exporter import load_without_target
from tests.conftest import QUICKSTART, by_default

HEAD: dict[str, Any] = {"head_dim": 16}
WINDOW: dict[str, Any] = {"sliding_window": 32}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma3": (Gemma3TextConfig, HEAD | WINDOW | {"query_pre_attn_scalar": 16}),
    "phi3": (Phi3Config, {}),
    "gemma2": (Gemma2Config, HEAD | WINDOW | {"query_pre_attn_scalar": 16}),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    ),
    "qwen3": (Qwen3Config, HEAD),
    "qwen2": (Qwen2Config, {}),
    "gpt-oss": (
        GptOssConfig,
        HEAD | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "olmo2": (Olmo2Config, {}),
    "glm4": (Glm4Config, HEAD),
    "mistral": (MistralConfig, WINDOW),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 4}),
}
# No tokenizer here has a token that is known to be unused.
MASK = {"mask_token": 2047}
DSPARK = MASK | {"markov_rank": 8}
# The method, its heads, and the remarks on engines that have to be there, by family.
BY_FAMILY: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gemma3": ("eagle", {"version": 1}, ["not taken: its target's embedding multiplies rows by 8"]),
    "phi3": ("eagle", {"norm_taps": False, "norm_output": False}, []),
    "gemma2": ("dspark", DSPARK, ["(final_logit_softcapping 30)", "rows by 8"]),
    "granite": ("dspark", DSPARK, ["changes its logits (logits_scaling 8)"]),
    "cohere": ("dspark", DSPARK, ["changes its logits (logit_scale 0.25)"]),
    "qwen2": ("dflash", MASK, []),
}
TAPS = {"eagle": {"taps": [2, 4, 6]}, "dflash": {"num_layers": 2, "block_size": 4}}
OTHERS: list[Any] = [pytest.param(name, marks=pytest.mark.full) for name in [*FAMILIES][2:]]


def target_of(family: str, folder: Path) -> Path:
    make, own = FAMILIES[family]
    config = make(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*by_default(["gemma3", "phi3"], "gemma3"), *OTHERS])
def test_each_family_works_from_doctor_to_import(
    family: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, rows = target_of(family, tmp_path / "target"), tmp_path / "rows.jsonl"
    messages = [
        [
            {"role": "user", "content": f"def f{n}(x):"},
            {"role": "assistant", "content": f"return {n}"},
        ]
        for n in range(16)
    ]
    rows.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    main(["doctor", "--target", str(target), "--chat", str(rows), "--json", str(tmp_path / "d")])
    findings = json.loads((tmp_path / "d").read_text())
    assert {finding["status"] for finding in findings} <= {"ok", "warning"}

    method, heads, remarks = BY_FAMILY.get(family, ("eagle", {}, []))
    shape = {} if heads.get("version") == 1 else TAPS["eagle" if method == "eagle" else "dflash"]
    data = {"sources": str(rows), "max_length": 128, "decontaminate": False}
    with caplog.at_level(logging.INFO):
        best = draftsmith.train(
            method, target, out=tmp_path / "run", max_steps=2, device="cpu",
            data={**data, "held_out": {"share": 0.3}}, heads=heads | shape,
            evaluation={"limit": 2, "max_new_tokens": 4},
        )  # fmt: skip
    logged = [record.getMessage() for record in caplog.records]
    said = drafter_facts(load_without_target(best))
    assert [line for line in logged if line in engine_remarks(said)] == engine_remarks(said)
    for remark in remarks:
        assert any(remark in line for line in logged), remark

    report = draftsmith.evaluate(
        target, best, str(rows), limit=2, repeats=1, max_new_tokens=8, baselines=False
    )
    (setting,) = report.settings
    assert all(found.equal_to_ar == found.requests for found in setting.drafters.values())

    for engine in ENGINES:
        out = tmp_path / engine
        if (reason := refusal(engine, said)) is not None:
            with pytest.raises(draftsmith.UserError) as refused:
                draftsmith.export(best, engine, out)
            assert str(refused.value) == reason and not out.exists()
            continue
        draftsmith.export(best, engine, out)
        card = (out / "README.md").read_text()
        for remark in ENGINES[engine].recipes[said.kind].remarks_for(said):
            assert f"- {remark}" in card
        if engine == "hf":  # the artifact's own layout, which needs no import
            continue
        again = tmp_path / f"{engine}-again"
        capsys.readouterr()
        main(["import", "--from", str(out), "--target", str(target), "--out", str(again)])
        assert "warning" not in capsys.readouterr().out
        ours, theirs = load_without_target(best).drafter, load_without_target(again).drafter
        assert ours.facts() == theirs.facts()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name
