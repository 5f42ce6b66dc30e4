"""An engine is one file: a made-up one is exported to, imitated and listed with no other change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import ENGINES, TITLES, limits, recipe_for
from draftsmith.heads.exchange.engines.engine import EngineEmulation, Recipe, ServingEngine, chain
from draftsmith.heads.exchange.exporter import export
from draftsmith.inference.evaluation import engines
from tests.helpers.random_artifacts import also_read_by, eagle, heads, order

TOY = ServingEngine(
    name="toy",
    title="Toy",
    recipes={
        "eagle3": Recipe(
            lambda request, _: f"toy {request.target} {request.out}",
            ("A toy.", limits.DRAFTED_SHARE),
            limits=(limits.FC_BIAS,),
        )
    },
    like=EngineEmulation({"drafts": 2}, {"eagle3": chain}),
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", TOY)
    monkeypatch.setitem(engines.IMITATED, "toy", TOY.like)


def test_drafter_is_exported_to_added_engine(tmp_path: Path) -> None:
    written = export(eagle("eagle3 draft vocabulary"), order("toy", tmp_path / "drafter"))
    assert written.serve == f"toy the/target {tmp_path / 'drafter'}"
    assert written.notes[0] == "A toy." and "Drafts " in written.notes[1]
    assert not written.replaced
    own = json.loads((tmp_path / "drafter" / "draftsmith.json").read_text())
    assert (own["export"]["engine"], own["export"]["layout"]) == ("toy", "native")


def test_added_engine_refuses_unsupported_drafters() -> None:
    with pytest.raises(UserError, match="toy cannot serve this drafter: its fc has a bias"):
        recipe_for("toy", eagle(fc_bias=True))
    with pytest.raises(UserError, match="toy takes EAGLE-3, not Medusa heads; .* to vllm, .*hf"):
        recipe_for("toy", heads())


def test_added_engine_is_listed_for_compatible_exports() -> None:
    assert {"sglang", "trtllm", "llamacpp", "toy"} <= {*also_read_by("vllm", eagle())}


def test_added_engine_is_imitated_with_its_defaults() -> None:
    assert engines.ImitatedEngine("toy").settings == {"drafts": 2}
    with pytest.raises(UserError, match="toy has no setting 'draws' here; there are: drafts"):
        engines.ImitatedEngine("toy:draws=greedy")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_engine_tables_name_existing_drafter_kinds_only(engine: ServingEngine) -> None:
    assert engine.recipes.keys() <= TITLES.keys()
    if engine.like is not None:
        assert engine.like.shapes.keys() - {"ngram", "mtp"} <= engine.recipes.keys()
        assert engine.like.choices.keys() | engine.like.least.keys() <= engine.like.settings.keys()
