"""Every command on a target whose embedding is as large as a real one's: what
`scripts/check_target.sh` does, in short."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.fingerprint import LARGEST_EXACT
from tests.conftest import PYTHON, ROOT, tiny_target
from tests.helpers.training import environment

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.mark.full
def test_every_command_works_on_a_real_vocabulary(tmp_path: Path) -> None:
    """Two layers of SmolLM2's sizes with random weights: its embedding has more elements than
    float32 can count."""
    target = tiny_target(
        **SMOLLM2, tie_word_embeddings=True, initializer_range=0.04, max_position_embeddings=1024
    )
    assert target.head_weight.numel() > LARGEST_EXACT
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    # Stopping, tuning and exactness have tests of their own, and cost more with a large head than
    # they would add here.
    parts = "doctor,generate,data,train,evaluate,simulate,report,export,import"
    short = ["--quick", "--only", parts, "--tokens", "2", "--steps", "2", "--timeout", "120"]
    done = subprocess.run(
        [PYTHON, "scripts/check_target/main.py", str(tmp_path / "target"), "--out",
        str(tmp_path / "out"), *short],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    logs = (
        "".join(path.read_text()[-2000:] for path in (tmp_path / "out" / "logs").iterdir())
        if done.returncode
        else ""
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "12 of 12 passed" in done.stdout, done.stdout
