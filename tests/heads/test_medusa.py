"""Medusa heads: initialisation, layout on disk, shared head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.medusa import MedusaHeads, MedusaShape, ResidualBlock
from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.train.methods.medusa.method import copy_head
from tests.conftest import tiny_target


def test_untrained_heads_are_the_targets_own_head() -> None:
    target = tiny_target()
    heads = MedusaHeads(MedusaShape(3, 2), target.hidden_size, target.vocab_size)
    copy_head(heads, target.head_weight)
    hidden = torch.randn(5, target.hidden_size)
    for logits in heads(hidden):
        torch.testing.assert_close(logits, target.head(hidden))


def test_names_on_disk_are_the_original_ones() -> None:
    heads = MedusaHeads(MedusaShape(2, 2), 8, 16)
    state = heads.serving_state()
    assert {n: tuple(t.shape) for n, t in state.items()} == {
        **{f"{h}.{layer}.linear.weight": (8, 8) for h in range(2) for layer in range(2)},
        **{f"{h}.{layer}.linear.bias": (8,) for h in range(2) for layer in range(2)},
        **{f"{h}.2.weight": (16, 8) for h in range(2)},
    }
    config = heads.serving_config("base", "float32")
    assert "architectures" not in config and config["medusa_fc_bias"] is True
    assert [k for k in config if "num" in k] == ["medusa_num_heads", "medusa_num_layers"]


def test_blocks_of_a_head_are_distinct_modules() -> None:
    state = MedusaHeads(MedusaShape(1, 3), 8, 16).serving_state()
    assert len({t.data_ptr() for t in state.values()}) == len(state)


def test_a_shared_head_owns_no_output_matrix_and_follows_the_target() -> None:
    target = tiny_target()
    heads = MedusaHeads(
        MedusaShape(2, shared_head=True),
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
    )
    assert all("linear" in name for name in heads.serving_state())
    hidden = torch.randn(3, target.hidden_size)
    torch.testing.assert_close(heads.logits(hidden, 1), target.head(hidden))
    assert not any(p is target.head_weight for p in heads.parameters())


@pytest.mark.parametrize("shared", [False, True])
def test_low_precision_heads_keep_target_text(shared: bool, tmp_path: Path) -> None:
    """The text is the target's own."""
    target = tiny_target(dtype=torch.float32)
    heads = MedusaHeads(
        MedusaShape(2, 1, shared),
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    Artifact(heads, target.fingerprint()).save(tmp_path / "d")
    plain = generate_one(target, load_proposer("none", target, pytest.fail), [5, 6], 12)
    spec = f"{tmp_path / 'd'}:dtype=bfloat16,width=10,nodes=4"
    proposer: Any = load_proposer(spec, target, pytest.fail)
    assert generate_one(target, proposer, [5, 6], 12).token_ids == plain.token_ids
    blocks = [one for one in proposer.drafter.modules() if isinstance(one, ResidualBlock)]
    assert blocks and all(one.linear.weight.dtype == torch.bfloat16 for one in blocks)
