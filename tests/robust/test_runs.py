"""Damaged runs, feature stores and exports: refused in one line, or what comes of them is what
would have come without."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from draftsmith.heads.files import CHECKSUMS, write_checksums
from draftsmith.train.checkpoint import RunFolder
from tests.conftest import QUICKSTART, by_default
from tests.helpers.faults import command_of, disturb
from tests.helpers.mutations import MANY, complaints, forked, outcome, trials
from tests.helpers.stores import config_for, extract
from tests.helpers.training import make_config, train, weights

DRAFTERS = QUICKSTART.parent / "drafters"
SAMPLE = pytest.param(6, id="sample")
ALL = pytest.param(MANY, marks=pytest.mark.full, id="all")


@pytest.fixture(scope="session")
def run(
    tmp_path_factory: pytest.TempPathFactory, saved_tiny: Path
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A copy of a run that was killed behind its second checkpoint, its config, and the weights at
    its end."""
    folder = tmp_path_factory.mktemp("run")
    config = make_config(
        folder,
        saved_tiny,
        evaluation={"every": 10, "limit": 2, "max_new_tokens": 8, "tree_nodes": 6},
    )
    disturb(command_of(config), 12, signal.SIGKILL)
    assert RunFolder(str(folder / "run")).steps() == [5, 10]
    shutil.copytree(folder / "run", folder / "sound", symlinks=True)
    train(config)
    return folder / "sound", config, weights(folder / "run", 20)


def resealed(folder: Path) -> None:
    """With the checksums of what is there now."""
    for step in (folder / "checkpoints").iterdir():
        (step / CHECKSUMS).unlink(missing_ok=True)
        write_checksums(step)


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize(
    "after",
    [pytest.param(lambda folder: None, marks=pytest.mark.full), resealed],
    ids=["as written", "sealed"],
)
def test_damaged_run_resumes_to_same_weights_or_is_refused(
    run: tuple[Path, Path, dict[str, torch.Tensor]],
    after: Callable[[Path], None],
    count: int,
    tmp_path: Path,
) -> None:
    """Bit for bit; or, where no sound checkpoint is left or a sealed one says something else, one
    line."""
    sound, config, end = run
    scratch = config.parent / "run"

    def as_undamaged(folder: Path) -> str | None:
        found = weights(folder, 20)
        return (
            None
            if all(torch.equal(end[name], found[name]) for name in end)
            else "it ended in other weights"
        )

    chosen = trials(sound, 0, count)
    if after is resealed:  # of what may be read: other weights are other weights
        chosen = [
            m
            for m in trials(sound, 1, 100_000)
            if re.search(r"step-000010/(trainer.json|config.yaml)", m.name)
        ]
        chosen = chosen[:: max(len(chosen) // count, 1)][:count]

    def command(folder):
        return ["draftsmith.train", "medusa", "--config", str(config)]

    check = as_undamaged if after is not resealed else lambda folder: None
    wrong, accepted = complaints(
        sound, scratch, chosen, command, after, partial(forked, usage=tmp_path / "usage"), check
    )
    assert not wrong, "\n".join(wrong)
    assert after is resealed or len(accepted) > 0.9 * count, (
        "one damaged file of a run is no reason to stop"
    )


@pytest.fixture(scope="session")
def store(
    tmp_path_factory: pytest.TempPathFactory, saved_tiny: Path
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A feature store, the config of a run from a copy of it, and the weights that it ends in."""
    folder = tmp_path_factory.mktemp("store")
    extract(
        config_for(folder / "live", saved_tiny, "medusa"),
        folder / "sound",
        "medusa",
        "--dtype",
        "float32",
    )
    shutil.copytree(folder / "sound", folder / "store")
    config = config_for(
        folder / "from",
        saved_tiny,
        "medusa",
        max_steps=6,
        features={"store": str(folder / "store")},
    )
    train(config)
    return folder / "sound", config, weights(folder / "from" / "run", 6)


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_damaged_store_teaches_the_same_or_is_refused(
    store: tuple[Path, Path, dict[str, torch.Tensor]], count: int, tmp_path: Path
) -> None:
    sound, config, end = store

    def command(folder: Path) -> list[str]:
        shutil.rmtree(config.parent / "run", ignore_errors=True)
        return ["draftsmith.train", "medusa", "--config", str(config)]

    def as_undamaged(folder: Path) -> str | None:
        found = weights(config.parent / "run", 6)
        return (
            None
            if all(torch.equal(end[name], found[name]) for name in end)
            else "it taught something else"
        )

    used = [m for m in trials(sound, 2, count) if not m.name.startswith("held_out")]
    scratch = config.parent.parent / "store"
    wrong, _ = complaints(
        sound,
        scratch,
        used,
        command,
        run=partial(forked, usage=tmp_path / "usage"),
        accepted_is=as_undamaged,
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize(
    ("drafter", "engine"), by_default([("dflash", "vllm"), ("eagle3", "vllm")], ("eagle3", "vllm"))
)
def test_damaged_export_imports_unchanged_or_is_refused(
    drafter: str, engine: str, count: int, tmp_path: Path
) -> None:
    """Read back by import: what it accepts has the weights and the flags of the drafter."""
    sound, out = tmp_path / "sound", tmp_path / "imported"
    export = ["export", "--drafter", str(DRAFTERS / drafter), "--to", engine, "--out", str(sound)]
    assert outcome(export).code == 0
    base = ["import", "--target", str(QUICKSTART), "--out", str(out)]
    assert outcome([*base, "--from", str(sound)]).code == 0
    whole = {
        path.name: path.read_bytes() for path in out.iterdir() if path.name != "draftsmith.json"
    }

    def command(folder: Path) -> list[str]:
        shutil.rmtree(out, ignore_errors=True)
        return [*base, "--from", str(folder)]

    def as_undamaged(folder: Path) -> str | None:
        same = all((out / name).read_bytes() == data for name, data in whole.items())
        return None if same else "it was read as another drafter"

    chosen = trials(sound, 3, count)
    wrong, accepted = complaints(sound, tmp_path / "d", chosen, command, accepted_is=as_undamaged)
    assert not wrong, "\n".join(wrong)
    assert not any(name.startswith("model") for name in accepted), accepted
