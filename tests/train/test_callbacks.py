"""Callbacks, pushes to the hub and trackers of a training."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

import draftsmith
from draftsmith.train.config import Tracker
from draftsmith.train.reporting import accepted_name, flat
from tests.helpers.training import make_config


class Recorder(draftsmith.Callback):
    """Notes every event; ends the training after the step `last`."""

    def __init__(self, last: int = 0) -> None:
        self.events: list[tuple[str, int, Any]] = []
        self.last = last

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        self.events.append(("step", step, {**metrics}))
        return step == self.last

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("evaluate", step, {**metrics}))

    def on_checkpoint(self, step: int, folder: Path, best: bool) -> None:
        assert (folder / "draftsmith.json").is_file()
        self.events.append(("checkpoint", step, best))

    def on_end(self, best: Path) -> None:
        self.events.append(("end", 0, best))


SHORT: dict[str, Any] = {
    "max_steps": 4,
    "log_every": 2,
    "evaluation": {"every": 4, "limit": 2, "max_new_tokens": 4, "tree_nodes": 4},
    "checkpoints": {"every": 100},
}


def test_callbacks_get_the_numbers_of_the_metrics_file(tmp_path: Path, saved_tiny: Path) -> None:
    config, seen = make_config(tmp_path, saved_tiny, **SHORT), Recorder()
    best = draftsmith.train("medusa", config=config, callbacks=[seen])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    told = [(step, found) for name, step, found in seen.events if name in ("step", "evaluate")]
    assert [name for name, *_ in seen.events] == ["step", "step", "checkpoint", "evaluate", "end"]
    assert [step for step, _ in told] == [row.pop("step") for row in rows] == [2, 4, 4]
    for (_, metrics), row in zip(told, rows, strict=True):
        assert {k: v if math.isfinite(v) else None for k, v in metrics.items()} == row
    assert ("checkpoint", 4, True) in seen.events and seen.events[-1] == ("end", 0, best)


def test_training_ended_by_callback_can_be_resumed(tmp_path: Path, saved_tiny: Path) -> None:
    config, seen = make_config(tmp_path, saved_tiny, **SHORT), Recorder(last=2)
    best = draftsmith.train("medusa", config=config, callbacks=[seen])
    assert best.resolve().parent.name == "step-000002", "it was evaluated and saved"
    rest = Recorder()
    draftsmith.train("medusa", config=config, callbacks=[rest])
    assert [step for name, step, _ in rest.events if name == "step"] == [4]
    with pytest.raises(draftsmith.UserError, match=r"objects of draftsmith.Callback, not builtin"):
        draftsmith.train("medusa", config=config, callbacks=[print])  # type: ignore[list-item]


def test_trackers_are_those_of_accelerate() -> None:
    assert {*get_args(Tracker)} == {"none", *LOGGER_TYPE_TO_CLASS}


def test_missing_or_unknown_tracker_is_one_line(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, **SHORT)
    with pytest.raises(draftsmith.UserError, match="pip install swanlab, or leave it out"):
        draftsmith.train("medusa", config=config, tracker="swanlab")
    with pytest.raises(draftsmith.UserError, match="takes none, aim, .* or wandb, not mlfow"):
        draftsmith.train("medusa", config=config, tracker="mlfow")


def test_a_configuration_is_flat_for_trackers() -> None:
    nested = {"a": {"b": None, "c": [1, 2]}, "d": [{"path": "x"}], "e": {}, "f": 0.5, "g": True}
    assert flat(nested) == {
        "a.b": "null", "a.c": "[1, 2]", "d.0.path": "x", "e": "{}", "f": 0.5, "g": True,
    }  # fmt: skip


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_a_tracker_gets_every_metric_and_the_configuration(
    tracker: str, tmp_path: Path, saved_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker's files are read back by its package."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, saved_tiny, **SHORT)
    draftsmith.train("medusa", config=config, tracker=tracker)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    wanted = {(row["step"], name) for row in rows for name in row if name != "step"}
    if tracker == "mlflow":
        import mlflow  # type: ignore[import-not-found]

        (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
        params, client = run.data.params, mlflow.MlflowClient()
        names = {name for _, name in wanted}
        found = {
            (one.step, name)
            for name in names
            for one in client.get_metric_history(run.info.run_id, accepted_name(name, "mlflow"))
        }
    else:
        import trackio  # type: ignore[import-not-found]
        from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found]

        (run,) = trackio.Api().runs("draftsmith")
        params = run.config
        logs = SQLiteStorage.get_logs("draftsmith", run.name, run_id=run.id)
        found = {(row["step"], name) for row in logs for name in row}
    assert wanted <= found
    assert params["target.path"] == str(saved_tiny) and str(params["optim.lr"]) == "0.001"
    assert {"data.sources.0.path", "heads.num_heads", "data.held_out.sources"} <= {*params}
