"""`data plan` by hand, and the numbers that a run logs of its own pace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

from draftsmith.commands import plan
from draftsmith.commands.plan import PlanOptions as Options
from draftsmith.commands.plan import plan_for
from draftsmith.heads.errors import UserError
from draftsmith.train.estimate import RunSizes, check_affordable, memory_of_step, run_sizes
from draftsmith.train.methods.registry import method_named
from draftsmith.train.trainer import STEP_PARTS
from tests.conftest import tiny_target
from tests.helpers.plans import run_of
from tests.helpers.training import make_config, train


def test_plan_figures_match_hand_computed_values(tmp_path: Path, saved_tiny: Path) -> None:
    """Three taps and the last state of 1,000 numbers in bf16 are 8,000 bytes; 1e9 tokens of a
    1e9-parameter target at 40% of 989 TFLOP/s are 2e18 FLOP in 1.40 hours."""
    _, _, config = run_of(tmp_path, saved_tiny, "eagle")
    shape = RunSizes(
        1000, 10**9, 10**9, 32000, 10**8, 3, False, operations=4e9, head_operations=2e8
    )
    options = Options("x", method="eagle", gpus=1, tokens=1e9)
    found = plan_for(shape, options, config)
    assert found["feature_bytes"] == 8e12 and found["feature_bytes_fp8"] == 4e12
    assert found["extract_gpu_hours"] == pytest.approx(1.404, abs=1e-3)
    assert found["train_gpu_hours"] == pytest.approx(
        4.2e9 * 1e9 / (0.4 * 989e12 * 3600) * config.epochs
    )
    stages = [found[f"{stage}_gpu_hours"] for stage in ("regenerate", "extract", "train")]
    config.epochs = 3.0  # live: the target runs over the data in each epoch
    live = plan_for(shape, options, config)
    assert live["total_gpu_hours"] == pytest.approx(
        stages[0] + 3 * stages[1] + live["train_gpu_hours"]
    )
    config.features.store = "store"
    assert plan_for(shape, options, config)["extractions"] == 1
    assert found["target_bytes"] == 2e9 and found["drafter_bytes"] == 1.6e9
    assert found["checkpoint_bytes"] == 1.2e9, "no gradients"
    half = plan_for(
        shape, Options("x", method="eagle", gpus=1, tokens=1e9, reply_share=0.5), config
    )
    assert (
        half["feature_bytes"] == 7e12
        and half["regenerate_gpu_hours"] == found["regenerate_gpu_hours"] / 2
        and half["train_gpu_hours"] == pytest.approx(live["train_gpu_hours"] * 4.1 / 4.2)
    )


def test_a_run_that_needs_far_too_much_memory_is_refused(tmp_path: Path, saved_tiny: Path) -> None:
    _, module, run = run_of(tmp_path, saved_tiny, "eagle")
    check_affordable(run, module, 1)
    run.rows_per_step = run.batch_rows = 10**6
    with pytest.raises(UserError, match="training needs about"):
        check_affordable(run, module, 1)


def test_a_key_and_a_target_are_given_once(tmp_path: Path, saved_tiny: Path) -> None:
    config = str(make_config(tmp_path, saved_tiny, "eagle"))
    with pytest.raises(UserError, match="--epochs is given twice; it takes one value"):
        plan.run(Options(config, set=["epochs=1", "epochs=2"]))
    with pytest.raises(UserError, match="--target-shape and --set target.path both name the targ"):
        plan.run(Options(config, target_shape="qwen3-8b", set=[f"target.path={saved_tiny}"]))


def test_a_32b_target_needs_41_terabytes_for_a_billion_tokens(
    tmp_path: Path, saved_tiny: Path, capsys
) -> None:
    folder = tmp_path / "target"
    LlamaConfig(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", folder, "eagle", heads={"draft_vocab_size": 32000})
    plan.run(Options(str(config), method="eagle", json=str(tmp_path / "plan.json")))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["plan"]["feature_bytes"] == pytest.approx(40.96e12)
    assert (
        30e9 < found["shape"]["target_params"] < 34e9
        and 2e8 < found["shape"]["drafter_params"] < 2e9
    )
    assert "41.0 TB of features are more than an ordinary disk holds" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_target_that_is_elsewhere_is_neither_spread_nor_sharded(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(make_config(tmp_path, saved_tiny))
    live = ("ordinary disk", "sharded", "live features")
    for setting, says in (
        ("precision=bf16", live),
        ("features.store=STORE", ("from a store", "embedding and head, bf16")),
        ("features.server=http://n:1/v1", ("from a server", "embedding and head, bf16")),
    ):
        plan.run(Options(config, method="medusa", gpus=1, tokens=1e12, set=[setting]))
        printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert {word for word in live if word in printed} == {*live} & {*says}
        assert all(word in printed for word in says)


def test_a_mixture_of_experts_costs_what_a_token_passes_through(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, vocab_size=100,
    ).save_pretrained(tmp_path / "target")  # fmt: skip
    (tmp_path / "run").mkdir()
    _, _, config = run_of(tmp_path / "run", tmp_path / "target", "medusa")
    shape = run_sizes(method_named("medusa"), config)
    experts = 2 * 8 * 3 * 64 * 32
    assert shape.target_params - shape.active_params == experts * 6 // 8
    assert AutoConfig.from_pretrained(tmp_path / "target").num_experts == 8


@pytest.mark.parametrize(
    "method",
    [
        *("eagle", "distill"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("medusa", "dflash", "dspark")),
    ],
)
def test_the_drafter_is_as_large_as_the_trained_one(
    tmp_path: Path, saved_tiny: Path, method: str
) -> None:
    config = make_config(tmp_path, saved_tiny, method, max_steps=1)
    done = train(config, method=method)
    size = float(done.stderr.split("drafter of ")[1].split("M")[0])
    plan.run(Options(str(config), method=method, json=str(tmp_path / "plan.json")))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "plan.json").read_text())["shape"][
        "drafter_params"
    ] / 1e6 == pytest.approx(size, abs=0.006)


@pytest.mark.parametrize(
    "draft_model",
    [
        {},
        {"layers": [1]},
    ],
)
def test_a_draft_model_is_as_large_as_the_one_that_is_cut(
    tmp_path: Path, saved_tiny: Path, draft_model: dict
) -> None:
    from draftsmith.distill.draft_models import DraftModelConfig, make_draft_model

    config = make_config(tmp_path, saved_tiny, "distill", draft_model=draft_model)
    _, shape, _ = plan.planned(Options(str(config), method="distill"))
    cut = make_draft_model(
        DraftModelConfig(**draft_model), tiny_target(), lambda: [torch.arange(3, 40)]
    )
    assert shape.drafter_params == sum(p.numel() for p in cut.model.parameters())


def test_a_borrowed_head_costs_no_gradient_of_its_weights(tmp_path: Path, saved_tiny: Path) -> None:
    """Three heads through the target's: 4 FLOP for each number and root, where own heads cost 6. A
    head's block has 32 x 32 numbers."""
    for shared, each in ((True, 4), (False, 6)):
        config = make_config(
            tmp_path, saved_tiny, "medusa", heads={"num_heads": 3, "shared_head": shared}
        )
        _, shape, _ = plan.planned(Options(str(config), method="medusa"))
        assert shape.operations == 0
        assert shape.head_operations == 3 * (each * 32 * shape.vocab + 6 * 32 * 32)


def test_a_block_drafter_runs_all_slots_of_all_blocks(
    tmp_path: Path, saved_tiny: Path, capsys, monkeypatch
) -> None:
    """20 blocks of 4 slots in rows of 160 positions: half a pass each, at 6 FLOP for a number of
    its own, and an eighth of the positions are roots, with 3 drafts at 4 FLOP for a number of the
    borrowed head. Every position has keys and values once, and is fused at 4 FLOP. Inputs and
    outputs of matrices wait for the backward pass: of the layers for half of the positions."""
    heads = {"taps": [1], "num_layers": 2, "block_size": 4}
    config = make_config(tmp_path, saved_tiny, "dflash", epochs=3, heads=heads)
    run, shape, found = plan.planned(Options(str(config), method="dflash", tokens=1e6))
    assert (shape.passes, shape.layers, shape.taps) == (0.5, 2, 1)
    assert shape.logit_rows == 3 * run.objective.rows_per_chunk
    # queries of 4 heads and keys and values of 2 have size 8; the MLP is 64 wide
    layer = (32 + 2 * 16) * 32 + 32 * 32 + 3 * 32 * 64
    flops = 4 * 32 * 32 + 6 * 2 * (2 * 16 * 32) + 6 * 2 * layer * 0.5
    flops += 3 * 4 * 32 * shape.vocab / 8
    assert found["train_gpu_hours"] == pytest.approx(flops * 1e6 * 3 / (0.4 * 989e12 * 3600))
    states = (32 + 64) + (32 + 32) + (32 + 128) + (64 + 32)
    context = (32 + 32) + 2 * (32 + 2 * 16)
    assert shape.kept == 2 * states * 0.5 + context and shape.recomputed == states * 0.25
    memory = memory_of_step(shape, run, 2)
    assert memory.features == 160 * 2 * 32 * 2
    assert memory.activations == pytest.approx(160 * shape.kept * 6, abs=1)
    assert run.objective.rows_per_chunk == 16 and run.batch_rows == 1
    monkeypatch.setenv("COLUMNS", "200")
    plan.run(Options(str(make_config(tmp_path, saved_tiny, "dspark")), method="dspark"))
    assert "0.375 passes a position" in capsys.readouterr().out, "20 blocks of 3 slots"


def test_plan_counts_all_tokens_as_replies_by_default(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(make_config(tmp_path, saved_tiny, "eagle"))
    plan.run(Options(config, method="eagle"))
    assert "All tokens are counted as replies" in " ".join(capsys.readouterr().out.split())
    plan.run(Options(config, method="eagle", reply_share=0.5))
    assert "counted as replies" not in " ".join(capsys.readouterr().out.split())


def test_a_run_logs_where_its_time_goes(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, "eagle", max_steps=8)
    train(config, method="eagle")
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for row in (row for row in rows if "loss" in row):
        shares = [row[f"share_{part}"] for part in STEP_PARTS]
        assert (
            all(share >= 0 for share in shares) and 0 < sum(shares) <= 1.0 and row["tokens_s"] > 0
        )
