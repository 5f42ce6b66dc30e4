"""Untrained drafters begin unsure: no method starts far above log V, however large the target's
logits are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.heads.layers import RMSNorm
from draftsmith.heads.medusa import MedusaConfig, MedusaHeads
from draftsmith.train.data.batches import collate
from draftsmith.train.methods import medusa
from draftsmith.train.methods.first_weights import start_uncertain
from tests.conftest import tiny_target
from tests.train.test_loop import make_config, train


def test_a_norm_is_scaled_down_to_the_spread_asked_for_and_never_up() -> None:
    torch.manual_seed(0)
    norm, head, states = RMSNorm(64, 1e-6), torch.randn(500, 64), torch.randn(32, 64)
    start_uncertain(norm, norm(states) @ head.T)
    assert float((norm(states) @ head.T).std(-1).mean()) == pytest.approx(1.0, rel=0.02)
    before = norm.weight.detach().clone()
    start_uncertain(norm, norm(states) @ head.T, spread=4.0)
    assert torch.equal(norm.weight, before)


@pytest.mark.parametrize("method", ["medusa", "eagle", "dflash", "dspark", "distill"])
def test_every_method_begins_below_log_v_and_one(tmp_path: Path, method: str) -> None:
    """A target whose logits have a standard deviation of 8, of which a guess that is sure and wrong
    costs 15 and more."""
    target = tiny_target(num_hidden_layers=4)
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(4.0)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    logits = target.head(target.forward(torch.arange(4, 60)[None]).last[0])
    assert float(logits.std(-1).mean()) > 6, "what is tried here has to be hard"
    config = make_config(tmp_path, tmp_path / "target", method, max_steps=1)
    train(config, method=method)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    first = next(row for row in rows if "loss@1" in row)
    assert first["loss@1"] < math.log(target.vocab_size) + 1, first


def test_medusa_trains_all_heads_of_the_drafter_that_a_run_begins_with() -> None:
    """The run's own number of heads is the default, which a warm start does not look at."""
    target = tiny_target()
    drafter = MedusaHeads(MedusaConfig(num_heads=6), target.hidden_size, target.vocab_size, None)
    run: Any = SimpleNamespace(objective=medusa.MedusaLoss(), heads=MedusaConfig())
    batch = collate([[(np.arange(9), np.ones(9, bool))]])
    assert len(medusa.METHOD.make_objective(run, target, drafter).weights(batch)) == 6
