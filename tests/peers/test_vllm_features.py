"""Features from a real vLLM against the live target's. Not in the default run:

VLLM_PYTHON=/path/to/venv/bin/python python -m pytest -m peers tests/peers/test_vllm_features.py
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.stored import HeldOutPrompt, embedding_and_head_in
from draftsmith.inference.targets.target import load_target
from draftsmith.train.data.batches import PADDING, collate
from draftsmith.train.data.config import Evaluation
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.data.served import Client, ServedFeatures, ServedTarget, served_texts
from draftsmith.train.evaluation import write_text
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.faults import curve
from tests.helpers.stores import config_for, extract
from tests.helpers.training import launch, make_config, train

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM"
    ),
]
TAPS, LAYERS = (2, 4, 5), [2, 4, 5, 8]
FP32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a server in fp32, and the folder of its files."""
    folder = tmp_path_factory.mktemp("states")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
    ]
    command = [
        ROOT / "scripts" / "vllm" / "hidden_states.sh",
        QUICKSTART,
        str(port),
        "2,4,5,8",
        folder,
        *options,
    ]
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < until
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield f"{url}/v1", folder
    finally:
        process.terminate()
        process.wait(30)


def test_states_are_those_of_the_live_target(server: tuple[str, Path]) -> None:
    """Packed rows, fp32: relative error below 1e-5 (taps reach 150). Nothing is left behind."""
    url, folder = server
    live = load_target(TargetConfig(str(QUICKSTART), device="cpu"))
    target = embedding_and_head_in(str(QUICKSTART), ServedTarget)
    assert target.fingerprint() == live.fingerprint()
    target.client = Client(url, "target", LAYERS)
    generator = torch.Generator().manual_seed(0)

    def document(n):
        return (
            torch.randint(5, 2000, (n,), generator=generator).numpy(),
            torch.ones(n, dtype=torch.bool).numpy(),
        )

    batch = collate([[document(60), document(7), document(2)], [document(150)]])
    one, other = (
        LiveTarget(live, TAPS).features(batch),
        ServedFeatures(target, TAPS).features(batch),
    )
    there = batch.documents != PADDING
    for mine, theirs in zip((one.last, *one.taps), (other.last, *other.taps), strict=True):
        assert float((mine[there] - theirs[there]).norm() / mine[there].norm()) < 1e-5
    for mine, theirs in zip(live.tap_sizes(TAPS), target.tap_sizes(TAPS), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert not list(folder.iterdir())


def test_responses_come_with_their_features_in_one_pass(server: tuple[str, Path]) -> None:
    """Greedy replies and the states of prompt and reply: what the live target writes, and its
    features, one request each."""
    url, folder = server
    live = load_target(TargetConfig(str(QUICKSTART), device="cpu"))
    target = embedding_and_head_in(str(QUICKSTART), ServedTarget)
    target.client = Client(url, "target", LAYERS)
    asked: list[int] = []
    post = target.client._http.post
    target.client._http.post = lambda *args, **more: (asked.append(1), post(*args, **more))[1]  # type: ignore[method-assign]
    ids = [[3, 306, 341, 984, 1306, 12], [3, 306, 286, 1214], [5]]
    prompts = [HeldOutPrompt(prompt, unit) for unit, prompt in enumerate(ids)]
    config = Evaluation(max_new_tokens=12)
    texts = served_texts(target, prompts, TAPS, config)
    assert len(asked) == len(prompts) and not list(folder.iterdir())
    for prompt, text in zip(prompts, texts, strict=True):
        own = write_text(live, prompt, TAPS, config)
        assert (text.ids, text.start) == (own.ids, own.start) and len(text.hidden.last) == len(
            text.ids
        )
        for mine, theirs in zip(
            (own.hidden.last, *own.hidden.taps), (text.hidden.last, *text.hidden.taps), strict=True
        ):
            assert float((mine[:-1] - theirs[:-1]).norm() / mine[:-1].norm()) < 1e-5


def test_a_store_from_the_server_teaches_what_the_target_teaches(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    """What extracts has no decoder layers that could be read: they are zeros in its copy of the
    target."""
    ends = tmp_path / "ends"
    shutil.copytree(QUICKSTART, ends)
    weights = load_file(ends / "model.safetensors")
    save_file(
        {n: torch.zeros_like(w) if ".layers." in n else w for n, w in weights.items()},
        ends / "model.safetensors",
    )
    features = {"server": server[0], "server_layers": LAYERS}
    more: dict[str, Any] = {"heads": {"taps": list(TAPS), "draft_vocab_size": 500}}
    extract(
        config_for(tmp_path / "served", ends, "eagle", features=features, **more),
        tmp_path / "store",
        "eagle",
        *FP32,
    )
    train(
        config_for(tmp_path / "stored", QUICKSTART, "eagle", **more),
        "--features.store",
        tmp_path / "store",
        method="eagle",
    )
    train(config_for(tmp_path / "live", QUICKSTART, "eagle", **more), method="eagle")
    one, other = curve(tmp_path / "live"), curve(tmp_path / "stored")
    assert one.keys() == other.keys() == set(range(1, 21))
    for step in one:
        assert one[step] == pytest.approx(other[step], rel=1e-3), step


def test_training_from_the_server_is_training_from_the_target(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    """20 steps of EAGLE-3 on the quickstart target: the same losses within 1e-3, the same estimate
    of tau."""
    for name in ("live", "served"):
        (tmp_path / name).mkdir()
        more = (
            {} if name == "live" else {"features": {"server": server[0], "server_layers": LAYERS}}
        )
        config = make_config(
            tmp_path / name,
            QUICKSTART,
            "eagle",
            heads={"taps": list(TAPS), "draft_vocab_size": 500},
            errors={},
            **more,
        )
        done = train(config, method="eagle")
        assert ("held-out prompts" in done.stdout) == (name == "live")
    one, other = curve(tmp_path / "live"), curve(tmp_path / "served")
    assert one.keys() == other.keys() == set(range(1, 21))
    for step in one:
        assert one[step] == pytest.approx(other[step], rel=1e-3), step


def test_missing_layers_and_oversized_requests_are_refused(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, _ = server
    config = make_config(tmp_path, QUICKSTART, "eagle", heads={"taps": [1, 4, 5]}, errors={})
    options = ["--features.server", url, "--features.server-layers", "[2,4,5,8]"]
    done = launch("-m", "draftsmith.train", "eagle", "--config", config, *options)
    assert done.returncode != 0 and "which this run reads" in done.stderr
    target = embedding_and_head_in(str(QUICKSTART), ServedTarget)
    target.client = Client(url, "target", [2, 8])
    with pytest.raises(UserError, match="gives states of 4 layers, features.server_layers names 2"):
        list(target.client.ask([[5, 6, 7]]))
    with pytest.raises(UserError, match="refuses 600 tokens"):
        Client(url, "target", LAYERS)._one([5] * 600, 1)
    with pytest.raises(UserError, match="does not answer"):
        Client("http://127.0.0.1:9", "target", LAYERS)._one([5], 1)
