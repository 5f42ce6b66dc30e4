"""With the oldest transformers that pyproject.toml allows: taps, and what depends on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.conftest import ROOT

pytestmark = pytest.mark.full

CODE = """
import json, sys
import torch, transformers
from draftsmith.inference import load
from draftsmith.inference.targets.causal_model import run_decoder

quickstart, prompts = sys.argv[1], ["def add(self, value):", "class Stack:", "for item in items:"]
decoder = load(f"{quickstart}/target", f"{quickstart}/drafters/dspark", device="cpu")
target = decoder.target
ids = torch.arange(20)[None] % target.vocab_size
taps = (0, 1, target.num_layers)
found = run_decoder(target.decoder, ids, None, None, None, taps).taps
expected = target.decoder(input_ids=ids, output_hidden_states=True).hidden_states
replies = decoder.generate(prompts, 48)
print(json.dumps({
    "version": transformers.__version__,
    "taps": [bool(torch.equal(tap, expected[number])) for tap, number in zip(found, taps)],
    "fused": target.fused is not None,
    "texts": [reply.token_ids for reply in replies],
    "rounds": [len(reply.rounds) for reply in replies],
}))
"""


def run(path: Path | None) -> dict[str, object]:
    """Return what `CODE` prints with the packages in `path` before all others."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(ROOT / "scripts" / "quickstart")],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_oldest_transformers_gives_the_same_taps_texts_and_rounds(tmp_path: Path) -> None:
    """A list in `output_hidden_states` has another meaning before 5.23: every tap was one layer
    late, so that trained drafters accepted less and the fused pass was given up."""
    bound = re.search(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert bound is not None
    # The hub's package is older too; others are new enough for both.
    wanted = [f"transformers=={bound[1]}.0", "huggingface_hub>=1.5,<2"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    got = subprocess.run([*command, str(tmp_path), *wanted], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"the package registry does not give {wanted[0]}: {got.stderr[-200:]}")
    old, new = run(tmp_path), run(None)
    assert old.pop("version") == f"{bound[1]}.0"
    assert new.pop("version") == transformers.__version__
    assert old == new and old["taps"] == [True] * 3 and old["fused"]
