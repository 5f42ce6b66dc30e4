"""Untrained drafters begin unsure: no method starts far above log V, however large the target's
logits are."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.layers import RMSNorm
from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.train.data.batches import collate
from draftsmith.train.losses.initialization import apply_init_from, shrink_logits
from draftsmith.train.methods.dflash.method import warn_of_mask_token
from draftsmith.train.methods.eagle import method as eagle
from draftsmith.train.methods.eagle.config import EagleConfig
from draftsmith.train.methods.medusa import method as medusa
from draftsmith.train.methods.medusa.config import MedusaConfig, MedusaLoss
from tests.conftest import by_default, tiny_target
from tests.helpers.random_eagles import random_eagle
from tests.helpers.training import launch, make_config, train


def test_a_norm_is_scaled_down_to_the_spread_asked_for_and_never_up() -> None:
    torch.manual_seed(0)
    norm, head, states = RMSNorm(64, 1e-6), torch.randn(500, 64), torch.randn(32, 64)
    shrink_logits(norm, norm(states) @ head.T)
    assert float((norm(states) @ head.T).std(-1).mean()) == pytest.approx(1.0, rel=0.02)
    before = norm.weight.detach().clone()
    shrink_logits(norm, norm(states) @ head.T, spread=4.0)
    assert torch.equal(norm.weight, before)


@pytest.mark.parametrize(
    "method", by_default(["medusa", "eagle", "dflash", "dspark", "distill"], "eagle", "dspark")
)
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


def test_a_medusa_run_may_repeat_some_of_what_its_drafter_has(tmp_path: Path) -> None:
    target, config = tiny_target(), MedusaShape(num_heads=2, shared_head=True)
    lender = target.embedding_and_head
    drafter = MedusaHeads(config, target.hidden_size, target.vocab_size, lender)
    Artifact(drafter, target.fingerprint()).save(tmp_path / "x")
    run: Any = SimpleNamespace(init_from=str(tmp_path / "x"), heads=MedusaConfig(num_heads=2))
    apply_init_from(run)
    before: Any = SimpleNamespace(drafter=drafter)
    batches: Any = None
    made = medusa.METHOD.make_drafter(run, target, batches, before)
    assert made.config == config and asdict(config) == asdict(run.heads)
    run.heads = MedusaConfig(num_heads=3)
    with pytest.raises(
        UserError, match="x has num_heads 2, heads.num_heads says 3; set heads.num_heads to 2"
    ):
        apply_init_from(run)


@pytest.mark.parametrize("method", by_default(["eagle1", "dflash", "medusa"], "dflash"))
def test_run_for_target_with_added_tokens_keeps_base_vocabulary(
    tmp_path: Path, method: str
) -> None:
    """It goes on from a drafter of the base model, which keeps drafting that model's tokens."""
    target = tiny_target(num_hidden_layers=4)
    base, known = tmp_path / "base", target.vocab_size
    target.model.save_pretrained(base)
    target.tokenizer.save_pretrained(base)
    train(make_config(tmp_path, base, method, max_steps=1), method=method)
    target.tokenizer.add_tokens(["<tool>", "</tool>"])
    target.model.resize_token_embeddings(known + 2, mean_resizing=False)
    target.model.save_pretrained(tmp_path / "tuned")
    target.tokenizer.save_pretrained(tmp_path / "tuned")
    begun = {"init_from": str(tmp_path / "run" / "best"), "out": str(tmp_path / "next")}
    config = make_config(tmp_path, tmp_path / "tuned", method, max_steps=1, retarget=True, **begun)
    command = ("-m", "draftsmith.train", method.rstrip("1"), "--config", config)
    done = launch(*command)
    assert done.returncode and "give --allow-added-tokens" in done.stderr
    done = launch(*command, "--allow-added-tokens")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "next" / "best" / "config.json").read_text())
    assert (written["vocab_size"], written["draft_vocab_size"]) == (known + 2, known)


def test_features_are_those_of_the_drafter_that_a_run_begins_with(tmp_path: Path) -> None:
    target = tiny_target()
    run: Any = SimpleNamespace(init_from=str(tmp_path / "one"), heads=EagleConfig())
    Artifact(random_eagle(target, "eagle1"), target.fingerprint()).save(tmp_path / "one")
    apply_init_from(run)
    assert eagle.METHOD.features_of(run, target) == ((), True)
    run.heads, run.init_from = EagleConfig(taps=[0, 1]), None
    apply_init_from(run)
    assert eagle.METHOD.features_of(run, target) == ((0, 1), False)


def test_learned_mask_token_in_new_texts_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, batches = tiny_target(), cast(Any, SimpleNamespace())
    batches.token_counts = lambda size: torch.arange(size)
    warn_of_mask_token(7, target, batches)
    assert "mask token, 7, occurs 7 times in the training replies" in caplog.text


def test_medusa_trains_all_heads_of_the_drafter_that_a_run_begins_with() -> None:
    """The run's own number of heads is the default, which a warm start does not look at."""
    target = tiny_target()
    drafter = MedusaHeads(MedusaShape(num_heads=6), target.hidden_size, target.vocab_size, None)
    run: Any = SimpleNamespace(objective=MedusaLoss(), heads=MedusaConfig())
    batch = collate([[(np.arange(9), np.ones(9, bool))]])
    assert len(medusa.METHOD.make_objective(run, target, drafter).weights(batch)) == 6
