"""A target shared between ranks teaches what a whole one teaches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from tests.helpers.architectures import architecture
from tests.helpers.faults import curve
from tests.helpers.stores import config_for, extract
from tests.helpers.training import launch, logged, make_config, train


@pytest.mark.parametrize(
    ("method", "spread"),
    [
        pytest.param("medusa", "fsdp", marks=pytest.mark.full),
        *(pytest.param("eagle", s, marks=pytest.mark.full) for s in ("fsdp", "devices")),
    ],
)
def test_shared_target_gives_same_losses_and_tau(
    tmp_path: Path, saved_tiny: Path, method: str, spread: str
) -> None:
    """Two ranks, texts written on the way by target and drafter together, evaluation by decoding:
    the same losses and tau."""
    found = []
    for kind in ("whole", spread):
        (tmp_path / kind).mkdir()
        config = make_config(tmp_path / kind, saved_tiny, method, rows_per_step=4)
        ranks = 1 if kind == "devices" else 2
        done = train(config, "--target.spread", kind, ranks=ranks, method=method)
        found.append((curve(tmp_path / kind), logged(done.stdout, "tau_measured")))
    (one, tau), (other, others_tau) = found
    assert one.keys() == other.keys() == set(range(1, 21)) and tau.keys() == {10, 20}
    assert all(one[step] == pytest.approx(other[step], abs=1e-4) for step in one)
    assert tau == pytest.approx(others_tau, abs=1e-6)


def test_each_rank_holds_its_share_and_no_gradients(tmp_path: Path, saved_tiny: Path) -> None:
    script = tmp_path / "share.py"
    script.write_text(
        "import os, sys, torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "from draftsmith.inference.targets.target import TargetConfig, load_target\n"
        "for spread in ('fsdp',):\n"
        "    target = load_target(TargetConfig(sys.argv[1], spread=spread))\n"
        "    whole = load_target(TargetConfig(sys.argv[1]))\n"
        "    size = lambda layers: sum(getattr(p, '_local_tensor', p).numel() for p in "
        "layers.parameters())\n"
        "    from draftsmith.inference.targets.spread import decoder_layers\n"
        "    share = size(decoder_layers(target.decoder, 2)[1]) / "
        "size(decoder_layers(whole.decoder, 2)[1])\n"
        "    assert 0.45 < share < 0.56, share\n"
        "    ids = torch.arange(24)[None] % 50\n"
        "    mine, theirs = target.forward(ids, taps=(0, 1)), whole.forward(ids, taps=(0, 1))\n"
        "    for a, b in zip((mine.last, *mine.taps), (theirs.last, *theirs.taps)):\n"
        "        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)\n"
        "    torch.testing.assert_close(target.head(mine.last), whole.head(theirs.last), "
        "atol=1e-4, rtol=1e-4)\n"
        "    assert target.fingerprint() == whole.fingerprint()\n"
        "    assert not any(p.requires_grad or p.grad is not None for p in "
        "target.model.parameters())\n"
        "print('fine')\n"
        "sys.stdout.flush()\n"
        "accelerator.wait_for_everyone()\n"
        "os._exit(0)\n"
    )
    done = launch(script, saved_tiny, ranks=2)
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stderr[-3000:]


def test_a_shared_target_extracts_what_a_whole_one_does(tmp_path: Path, saved_tiny: Path) -> None:
    config = config_for(tmp_path / "run", saved_tiny, "eagle")
    extract(config, tmp_path / "one", "eagle", "--dtype", "float32")
    shared = tmp_path / "shared.yaml"
    shared.write_text(config.read_text().replace("target:\n", "target:\n  spread: fsdp\n"))
    arguments: list[Any] = [
        "data",
        "extract",
        "--method",
        "eagle",
        "--config",
        shared,
        "--out",
        tmp_path / "two",
    ]
    done = launch(
        "-m", "draftsmith.train", *arguments, "--rows-per-shard", "3", "--dtype", "float32", ranks=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (
        sorted((tmp_path / name / "shards").glob("*.safetensors")) for name in ("one", "two")
    )
    assert [p.name for p in one] == [p.name for p in two]
    for a, b in zip(one, two, strict=True):
        mine, theirs = load_file(a), load_file(b)
        assert mine.keys() == theirs.keys()
        assert all(float((mine[name] - theirs[name]).abs().max()) < 1e-4 for name in mine)


def test_a_shared_target_needs_ranks(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny)
    done = launch("-m", "draftsmith.train", "medusa", "--config", config, "--target.spread", "fsdp")
    assert (
        done.returncode != 0
        and "shares the target between ranks; start it with accelerate launch" in done.stderr
    )


def test_recurrent_layers_do_not_run_on_several_devices(tmp_path: Path, saved_tiny: Path) -> None:
    shutil.copytree(saved_tiny, tmp_path, dirs_exist_ok=True)
    architecture("qwen3.5").model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"target\.spread=devices does not run recurrent layers"):
        load_target(TargetConfig(str(tmp_path), spread="devices"))
