"""`--print-config` prints the complete configuration, which trains the same drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import draftsmith
from draftsmith.command_line.parse import options_from
from draftsmith.commands.cli import main
from draftsmith.heads.files import CHECKSUMS, write_checksums
from draftsmith.train.methods.registry import method_named
from draftsmith.train.outline import target_of_run
from tests.conftest import QUICKSTART
from tests.helpers.training import METHODS, make_config, weights

# Without the options that METHODS sets for speed: what is left to the target has to be found.
DERIVED = {
    "medusa": {},
    "eagle": {"objective.steps": 7, "objective.feature_weight": 0.0, "heads.norm_taps": True},
    "eagle1": {"objective.steps": 1, "objective.token_weight": 0.1, "heads.norm_taps": False},
    "mtp": {"objective.steps": 3},
    "dflash": {"objective.gamma": None},
    "dspark": {"objective.gamma": 4.0},
    "distill": {"draft_model.layers": 1},
}


def printed(capsys: pytest.CaptureFixture[str], method: str, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", method.rstrip("1"), *words, "--print-config"])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("method", DERIVED)
def test_what_is_derived_is_printed(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(QUICKSTART), "--data.sources", "a.jsonl", "--out", str(tmp_path / "o")]
    words += ["--heads.version", "1"] * (method == "eagle1")
    text = printed(capsys, method, *words)
    values, file = yaml.safe_load(text), tmp_path / "c.yaml"
    for name, value in DERIVED[method].items():
        section, key = name.split(".")
        assert values[section][key] == value, name
    if method in ("eagle", "dflash", "dspark"):
        assert values["heads"]["taps"] and values["heads"]["intermediate_size"]
    file.write_text(text)
    assert printed(capsys, method, "--config", str(file)) == text
    chosen = method_named(method.rstrip("1"))
    run = options_from(chosen.run_class, {}, file)
    before = run.as_json()
    chosen.resolve(run, target_of_run(run))
    assert run.as_json() == before, "nothing is left to fill in"


def test_what_cannot_be_resolved_is_printed_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(
        capsys, "eagle", "--target", "owner/unknown", "--data.sources", "a", "--out", "o"
    )
    assert text.startswith("# Not resolved: target 'owner/unknown' is no folder here")
    assert yaml.safe_load(text)["heads"]["taps"] is None
    assert printed(capsys, "eagle").startswith("# Not resolved: --out, --target and --data.sources")


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_the_printed_config_trains_the_same(
    method: str, tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit; and each config continues a run of the other."""
    config = make_config(tmp_path, saved_tiny, method, max_steps=2)
    text = printed(capsys, method, "--config", str(config))
    file, name = tmp_path / "printed.yaml", method.rstrip("1")
    file.write_text(text)
    draftsmith.train(name, config=config)
    draftsmith.train(name, config=file, out=tmp_path / "again")
    first, second = weights(tmp_path / "run", 2), weights(tmp_path / "again", 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    # The folder of a run from before it was resolved has nulls in its config.
    for stored in (tmp_path / "run" / "checkpoints").glob("*/config.yaml"):
        nulls = yaml.safe_load(stored.read_text())
        nulls["objective"] = yaml.safe_load(config.read_text()).get("objective", {})
        stored.write_text(yaml.safe_dump(nulls))
        (stored.parent / CHECKSUMS).unlink()
        write_checksums(stored.parent)
    best = draftsmith.train(name, config=file)
    assert best == tmp_path / "run" / "best"
