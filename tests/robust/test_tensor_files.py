"""Damaged files of tensors, which import reads: one line each, quickly, and with little memory. The
default run tries a few hundred mutations, `--all` thousands."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from draftsmith.heads.errors import UserError
from draftsmith.heads.stored_tensors import StoredTensors
from tests.helpers.mutations import TOTALS, damaged, outcome
from tests.helpers.public_checkpoints import LLAMA, store
from tests.helpers.random_artifacts import eagle

TENSORS = {
    "fc.weight": torch.ones(8, 4),
    "norm.weight": torch.ones(4).half(),
    "d2t": torch.arange(5),
}
GROWTH = 100 << 20

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.full)])
def test_a_damaged_file_is_read_or_refused_in_one_line(count: int, tmp_path: Path) -> None:
    sound = save(TENSORS)
    draw, refused = random.Random("safetensors"), 0
    for _ in range(count):
        (tmp_path / WEIGHTS).write_bytes(damaged(sound, draw))
        try:
            stored = StoredTensors(tmp_path)
            for tensor in stored.values():
                assert tensor.numel() <= len(sound)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    TOTALS.update(tried=count, accepted=count - refused)
    assert refused > count / 2


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_import_ends_with_status_2(count: int, tmp_path: Path, saved_tiny: Path) -> None:
    tensors = dict(eagle("eagle1").drafter.serving_state())
    folder = store(tmp_path / "e", LLAMA, tensors)
    out, draw, refused = tmp_path / "out", random.Random(5), 0
    sound = (folder / WEIGHTS).read_bytes()
    for _ in range(count):
        # The first kilobytes are the header; the rest is weights.
        (folder / WEIGHTS).write_bytes(damaged(sound[:4000], draw) + sound[4000:])
        found = outcome(
            ["import", "--from", str(folder), "--target", str(saved_tiny), "--out", str(out)]
        )
        assert found.wrong() is None and out.exists() == (found.code == 0), found
        shutil.rmtree(out, ignore_errors=True)
        refused += found.code == 2
    assert refused > count / 2
