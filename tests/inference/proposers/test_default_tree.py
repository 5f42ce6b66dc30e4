"""Trees of trained drafters for which nobody has chosen a tree."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.inference.base.costs import pass_cost
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.proposers.default_tree import (
    chain_of,
    default_tree,
    draft_share,
    expected_gain,
    expected_tokens,
)
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.proposers.tree_plan import TreePlan
from draftsmith.inference.targets.causal_model import bytes_of
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT

DRAFTERS = ROOT / "scripts/quickstart/drafters"


def test_tokens_that_a_plan_is_expected_to_emit() -> None:
    """1 + 0.8 + 0.8 * 0.5 of a chain of two; a third node has 0.8 * 0.2 rather than the 0.1 of a
    second child of the root; nothing is known without accuracies."""
    calibration = {"rank_accuracy": [[0.8, 0.1], [0.5, 0.2]]}
    chain = TreePlan(TreeSettings(length=2, width=1))
    tree = TreePlan(TreeSettings(length=2, width=2, nodes=3))
    assert expected_tokens(calibration, chain) == pytest.approx(2.2)
    assert expected_tokens(calibration, tree) == pytest.approx(2.2 + 0.16)
    assert expected_tokens({}, chain) is None


def test_expected_gain_matches_hand_computed_values(quickstart: Target) -> None:
    """A draft that reads the share of an EAGLE layer, and three tokens to verify."""
    artifact = Artifact.load(
        DRAFTERS / "eagle3", quickstart.fingerprint(), quickstart.embedding_and_head, print
    )
    accuracies = [[0.8, 0.1], [0.5, 0.2]]
    share = draft_share(artifact.drafter, quickstart, 2)
    chain = artifact.drafter, quickstart, accuracies, chain_of(2), 2, 1
    found = expected_gain(*chain)
    assert found == pytest.approx(2.2 / (pass_cost(3) + share))
    in_batches = expected_gain(*chain, batch=8)
    assert in_batches == pytest.approx(2.2 * pass_cost(8) / (pass_cost(24) + share * pass_cost(8)))


def test_a_cpu_gets_few_nodes_and_a_gpu_the_tree_of_training(
    quickstart: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = quickstart
    for name in ("eagle3", "medusa", "dflash"):
        spec = str(DRAFTERS / name)
        artifact = Artifact.load(spec, target.fingerprint(), target.embedding_and_head, print)
        calibration = artifact.calibration
        chosen: Any = load_proposer(spec, target, pytest.fail, choose=True)
        assert 1 <= chosen.max_drafted < calibration["tree_nodes"], name
        assert "expected to be fastest on a cpu" in caplog.text
        as_in_training: Any = load_proposer(spec, target, pytest.fail)
        assert as_in_training.max_drafted == calibration["tree_nodes"]
        gpu: Any = SimpleNamespace(device=torch.device("cuda"))
        assert default_tree(artifact, gpu) is None
        given: Any = load_proposer(f"{spec}:nodes=20", target, pytest.fail, choose=True)
        assert given.max_drafted == 20, "what the user gives is taken"


def test_an_artifact_may_name_the_tree_of_a_type_of_device(
    quickstart: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = shutil.copytree(DRAFTERS / "eagle3", tmp_path / "eagle3")
    facts = json.loads((folder / "draftsmith.json").read_text())
    trees = {"cpu": {"length": 3, "width": 2, "nodes": 4}}
    facts["calibration"]["trees"] = trees
    (folder / "draftsmith.json").write_text(json.dumps(facts))

    def plan(settings: str) -> Any:
        proposer: Any = load_proposer(f"{folder}{settings}", quickstart, pytest.fail, choose=True)
        return getattr(proposer, "trained", proposer).plan

    by_default, explicit = plan(""), plan(":length=3,width=2,nodes=4")
    assert "length=3,width=2,nodes=4, the tree that it names for a cpu" in caplog.text
    sizes = [(of.length, of.width, of.nodes) for of in (by_default, explicit, plan(":lookup=3"))]
    assert sizes == [(3, 2, 4)] * 3
    assert plan(":nodes=9").nodes == 9, "what the user gives is taken"
    artifact = Artifact.load(folder, quickstart.fingerprint(), quickstart.embedding_and_head, print)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert default_tree(artifact, gpu) is None
    artifact.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/draftsmith.json").read_text())["calibration"][
        "trees"
    ] == trees  # fmt: skip


def test_a_draft_reads_a_share_of_the_weights(quickstart: Target) -> None:
    artifact = Artifact.load(
        DRAFTERS / "eagle3", quickstart.fingerprint(), quickstart.embedding_and_head, print
    )
    # One layer with a doubled input, fusion and head against 8 layers and a head: the bytes are
    # counted by hand from the sizes 192, 512 and 2048.
    layer = 384 * (192 + 2 * 96) + 192 * 192 + 3 * 192 * 512
    target_layer = 192 * (192 + 2 * 96) + 192 * 192 + 3 * 192 * 512
    head, fusion, norms = 2048 * 192, 3 * 192 * 192, (2 * 8 + 1) * 192
    of_target = 8 * target_layer + head + norms
    vocabulary: Any = artifact.drafter
    head_rows = vocabulary.shape.draft_vocab_size
    own = layer + fusion + head_rows * 192
    share = draft_share(vocabulary, quickstart, 1)
    assert share == pytest.approx(own / of_target, rel=1e-3)
    assert draft_share(vocabulary, quickstart, 3) == pytest.approx(3 * share)


def test_drafters_that_make_all_drafts_at_once_read_weights_too(quickstart: Target) -> None:
    of_target = bytes_of(quickstart.model) + quickstart.packed_bytes
    medusa, dflash, dspark = (
        Artifact.load(
            DRAFTERS / name, quickstart.fingerprint(), quickstart.embedding_and_head, print
        ).drafter
        for name in ("medusa", "dflash", "dspark")
    )
    # Each level of Medusa is a head of its own: a block of 192 x 192 and 2,048 tokens.
    assert draft_share(medusa, quickstart, 2) == pytest.approx(
        2 * 4 * (192 * 192 + 2048 * 192) / of_target
    )
    # All levels of a DFlash are one pass.
    share = draft_share(dflash, quickstart, 1)
    assert share > 0.3
    assert draft_share(dflash, quickstart, 5) == share
    # Its tree would be made level by level, like an EAGLE's, and costs more than it gains.
    spec = DRAFTERS / "dspark"
    artifact = Artifact.load(spec, quickstart.fingerprint(), quickstart.embedding_and_head, print)
    chosen = default_tree(artifact, quickstart)
    assert chosen is not None and chosen.settings == {"width": 1, "length": 5}
    # The transition of a DSpark is read for each draft.
    transition = dspark.transition_out.weight.nbytes / of_target
    shares = [draft_share(dspark, quickstart, levels) for levels in (1, 3)]
    assert shares[1] - shares[0] == pytest.approx(2 * transition)


def test_a_drafter_of_which_no_tree_pays_is_named(
    quickstart: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads that are hardly ever right, as over a vocabulary that is most of the target."""
    caplog.set_level(logging.INFO)
    folder = shutil.copytree(DRAFTERS / "medusa", tmp_path / "medusa")
    facts = json.loads((folder / "draftsmith.json").read_text())
    accuracy = facts["calibration"]["rank_accuracy"]
    facts["calibration"]["rank_accuracy"] = [[0.1 * share for share in row] for row in accuracy]
    (folder / "draftsmith.json").write_text(json.dumps(facts))
    warnings: list[str] = []
    load_proposer(folder, quickstart, warnings.append, choose=True)
    (line,) = warnings
    assert re.search(
        r"no tree of \S+ is expected to gain on a cpu: .* some 0\.\d\dx the speed", line
    )
    assert "expected to" not in caplog.text
