"""Block drafters at work: trees of independent and of dependent drafts, chains that end where
confidence does, calibration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import GREEDY, Sampling
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.evaluation.candidates import candidates
from draftsmith.inference.proposers import registry as drafters
from draftsmith.inference.proposers.growth import Level, Slots
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import DraftTree
from draftsmith.train.methods.dflash import method as dflash
from tests.conftest import tiny_target
from tests.helpers.random_blocks import proposer_of, random_block


def draws_on(batch: int, sampling: Sampling = GREEDY) -> Draws:
    keys = torch.arange(batch)
    return Draws(sampling, keys, torch.zeros(batch, 4, dtype=torch.long), torch.full((batch,), 3))


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    return {tuple(t for t in path if t >= 0) for path in tree.path_tokens[row, 1:, 1:].tolist()} - {
        ()
    }


@pytest.mark.parametrize("nodes", [1, 4, 7, 16])
def test_the_tree_of_independent_drafts_is_the_best_of_all_paths(nodes: int) -> None:
    """Against every path there is: three depths of five tokens, 155 nodes."""
    logits = torch.randn(
        2, 3, 5, generator=torch.Generator().manual_seed(nodes), dtype=torch.float64
    )
    root = torch.tensor([0, 1])
    tree = Slots(logits).tree(root, draws_on(2), 5, nodes)
    probs = logits.log_softmax(-1)
    for row in range(2):
        scored = {
            path: float(sum(probs[row, d, t] for d, t in enumerate(path)))
            for depth in (1, 2, 3)
            for path in itertools.product(range(5), repeat=depth)
        }
        assert paths_of(tree, row) == set(sorted(scored, key=lambda path: -scored[path])[:nodes])


def test_slots_answer_by_depth_alone() -> None:
    slots = Slots(torch.arange(24.0).view(1, 3, 8))
    level = Level(torch.tensor([[5, 6, 7]]), torch.zeros(1, 3, dtype=torch.long), None, 2)
    assert torch.equal(slots(level), slots.logits[:, 2:3].expand(1, 3, 8))


def test_a_dspark_node_is_scored_with_the_bias_of_its_own_parent() -> None:
    """The tree against the distributions of all paths, computed one by one; wide enough that
    nothing is pruned on the way."""
    target = tiny_target(dtype=torch.float64, num_hidden_layers=3)
    drafter = random_block(target, "dspark", block_size=2)
    proposer = proposer_of(drafter, width=6, nodes=6)
    outputs = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root = torch.tensor([9])
    first_logits, go_on = proposer._logits(outputs, root, None)
    tree, _ = proposer.plan.draft(first_logits, root, draws_on(1), go_on)
    base = drafter.base_logits(outputs)[0]
    first = (base[0] + drafter.transition(root)[0]).log_softmax(-1)
    scored: dict[tuple[int, ...], float] = {
        (int(t),): float(first[t]) for t in first.topk(6).indices
    }
    for (t,) in list(scored):
        second = (base[1] + drafter.transition(torch.tensor(t))).log_softmax(-1)
        scored |= {(t, int(u)): float(first[t] + second[u]) for u in second.topk(6).indices}
    assert paths_of(tree, 0) == set(sorted(scored, key=lambda path: -scored[path])[:6])


def test_calibrations_record_evaluation_length_and_tree_size() -> None:
    ranks = torch.tensor([[0, 1], [0, 0], [-1, 0], [0, -1], [0, 0]])
    found = dflash.METHOD.calibrate([(ranks, 1)], tree_nodes=16)
    assert found["length"] == 2 and found["tree_nodes"] == 16 and found["roots"] == 2
    assert found["rank_accuracy"][0][0] == 0.5 and found["rank_accuracy"][1][0] == 1
    assert dflash.METHOD.calibrate([(ranks[:2], 2)], 16)["roots"] == 0, (
        "a reply too short to calibrate on is no failure"
    )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_omitted_spec_settings_default_to_evaluated_ones(kind: str) -> None:
    target = tiny_target(num_hidden_layers=3)
    artifact = Artifact(
        random_block(target, kind), target.fingerprint(), {"length": 3, "tree_nodes": 12}
    )
    shapes = {
        (): (3, 8 if kind == "dspark" else 12, 12),
        (("width", 1),): (3, 1, 3),
        (("nodes", 5),): (3, 5, 5),
        (("nodes", 2),): (2, 2, 2),
        (("length", 2), ("width", 2)): (2, 2, 6),  # two levels of two children have no more
    }
    for settings, expected in shapes.items():
        proposer: Any = drafters.proposer_of(artifact, **dict(settings))
        plan = proposer.plan
        assert (plan.length, plan.width, plan.nodes) == expected
    wrong: dict[str, Any]
    for wrong in (
        {"length": 9},
        {"width": 0},
        {"nodes": 0},
        {"nodes": 2, "length": 3},
        {"slots": 9},
        {"shape": [[0] * depth for depth in range(1, 6)]},
    ):
        with pytest.raises(UserError):
            drafters.proposer_of(artifact, **wrong)


@pytest.mark.parametrize(("kind", "size"), [("dflash", 5), ("dspark", 4)])
def test_tune_finds_no_tree_deeper_than_a_block(kind: str, size: int, tmp_path: Any) -> None:
    target = tiny_target(num_hidden_layers=3)
    drafter = random_block(target, kind, block_size=size)
    accuracy = [[0.5, 0.2, 0.1, 0.05]] * 3
    for calibration in ({"length": 3, "tree_nodes": 6}, {"rank_accuracy": accuracy}):
        artifact = Artifact(drafter, target.fingerprint(), calibration)
        artifact.save(tmp_path / "d")
        found = candidates(str(tmp_path / "d"), target, 1)
        assert {way.kind for way in found} >= {"chain", "dynamic"}
        for way in found:
            deepest = way.setting.get("length") or max(map(len, way.setting["shape"]))
            assert deepest <= drafter.drafts
            (reply,) = generate(target, way.make(), [Request([5, 6, 7], 0)], 8)
            assert len(reply.token_ids) == 8
