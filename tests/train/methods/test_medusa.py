"""Medusa heads with a draft vocabulary: their loss, training, files, exports and texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.distill.divergences import divergence, log_probs
from draftsmith.distill.settings import NEEDS_LABELS
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines import recipe_for
from draftsmith.heads.exchange.exporter import export
from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import load_target
from draftsmith.train.data.batches import collate
from draftsmith.train.data.features import Features
from draftsmith.train.losses.calibration import ranks_in
from draftsmith.train.losses.initialization import apply_init_from
from draftsmith.train.methods.medusa.config import MedusaConfig, MedusaLoss
from draftsmith.train.methods.medusa.loss import MedusaObjective
from draftsmith.train.methods.medusa.method import METHOD
from tests.conftest import tiny_target
from tests.helpers.random_artifacts import TARGET as EXPORTED_TARGET
from tests.helpers.random_artifacts import heads as exported_heads
from tests.helpers.random_artifacts import order
from tests.helpers.training import make_config, train

TARGET = tiny_target()
V, DRAFTED, DEPTH = TARGET.vocab_size, TARGET.vocab_size // 2, 3


def some_heads(shared: bool = False, drafted: int = DRAFTED) -> MedusaHeads:
    torch.manual_seed(5)
    config = MedusaShape(DEPTH, shared_head=shared, draft_vocab_size=drafted)
    heads = MedusaHeads(config, TARGET.hidden_size, V, TARGET.embedding_and_head)
    if heads.d2t is not None:
        heads.set_maps(torch.randperm(V)[:drafted].sort().values)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def slow_loss(
    heads: MedusaHeads, ids: torch.Tensor, last: torch.Tensor, loss: Any, start: int
) -> tuple[torch.Tensor, list[float], list[float]]:
    """The objective by loops over heads and rows: the loss, and the rate of right best tokens and
    the mean overlap of each head. All but the first `start` tokens are a reply."""
    drafted, weights = heads.draft_vocab_ids, [0.8**i for i in range(DEPTH)]
    assert drafted is not None
    column = {token: i for i, token in enumerate(drafted.tolist())}
    total, right, overlaps = torch.zeros(()), [], []
    for i, weight in enumerate(weights):
        rows = range(start - 1, len(ids) - 2 - i)
        hits, alphas, losses = [], [], []
        for t in rows:
            target_logits = TARGET.head(last[t + 1 + i])
            p = torch.softmax(target_logits, -1)[drafted]
            logits = heads.logits(last[t], i)
            q = torch.softmax(logits, -1)
            best, label = int(target_logits.argmax()), int(ids[t + 2 + i])
            hits.append(int(drafted[logits.argmax()]) == best)
            alphas.append(float(torch.minimum(p, q.detach()).sum()))
            taught = best in column and (loss not in NEEDS_LABELS or label in column)
            labels = torch.tensor([column.get(label, 0)])
            found = divergence(loss, log_probs(logits)[None], p.log()[None], labels)
            losses.append(found[0] if taught else torch.zeros(()))
        total = total + weight / sum(weights) * torch.stack(losses).sum() / len(rows)
        right.append(sum(hits) / len(hits))
        overlaps.append(sum(alphas) / len(alphas))
    return total, right, overlaps


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", ["kl", "ce", "ce-l1", "tv", "lk-hybrid", "top-k-kl"])
def test_the_objective_is_that_of_slow_loops(loss: Any, shared: bool) -> None:
    heads, start = some_heads(shared), 3
    ids = torch.randint(0, V, (24,), generator=torch.Generator().manual_seed(1))
    last = torch.randn(24, TARGET.hidden_size, generator=torch.Generator().manual_seed(2))
    batch = collate([[(ids.numpy(), np.arange(24) >= start)]])
    expected, right, overlaps = slow_loss(heads, ids, last, loss, start)
    wanted = torch.autograd.grad(expected, list(heads.parameters()))
    objective = MedusaObjective(MedusaLoss(loss=loss, rows_per_chunk=7), DEPTH, TARGET.head)
    for measured in (True, False):
        found, sums = objective.forward(
            heads, Features(batch, last[None]), objective.weights(batch), measured
        )
        grads = torch.autograd.grad(found, list(heads.parameters()))
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
        if measured:
            means = {name: float(total / count) for name, (total, count) in sums.items()}
            for i in range(DEPTH):
                assert means[f"top1@{i + 1}"] == pytest.approx(right[i])
                assert means[f"alpha@{i + 1}"] == pytest.approx(overlaps[i], rel=1e-5)
    drafted: Any = heads.draft_vocab_ids
    missed = sum(int(TARGET.head(state).argmax()) not in drafted for state in last)
    assert 3 < missed < 21, "some positions have to be of each kind"


def test_draft_vocabulary_of_all_tokens_is_dropped() -> None:
    for size in (V, 10 * V):
        heads = some_heads(drafted=size)
        assert heads.config.draft_vocab_size is None and heads.draft_vocab_ids is None
        assert "draft_vocab_size" not in heads.facts() | heads.serving_config("t", "float32")
        assert not {"d2t", "t2d"} & heads.serving_state().keys()


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_with_draft_vocabulary_writes_the_targets_text(shared: bool, tmp_path: Path) -> None:
    """Greedy and coupled, in batches, as a tree and as a chain; what cannot be drafted is not."""
    heads = some_heads(shared)
    Artifact(heads, TARGET.fingerprint()).save(tmp_path / "d")
    again = Artifact.load(tmp_path / "d", TARGET.fingerprint(), TARGET.embedding_and_head).drafter
    assert again.facts() == heads.facts() and again.facts()["draft_vocab_size"] == DRAFTED
    states = torch.randn(4, TARGET.hidden_size)
    assert torch.equal(again(states), heads(states)) and again(states).shape[-1] == DRAFTED
    if shared:
        ids = heads.draft_vocab_ids
        assert ids is not None
        whole = TARGET.head(heads.blocks[1](states))
        torch.testing.assert_close(heads.logits(states, 1), whole[:, ids])
    drafted = set(heads.draft_vocab_ids.tolist())  # type: ignore[union-attr]
    prompts = [[5, 9, 33, 7], [12], [40, 41, 42, 43]]
    for sampling in (Sampling(), Sampling(1.0, seed=3), Sampling(repetition_penalty=1.3)):
        plain = generate(TARGET, load_proposer("none", TARGET, pytest.fail), prompts, 24, sampling)
        for shape in ("width=10,nodes=12", "width=1"):
            proposer: Any = load_proposer(f"{tmp_path / 'd'}:{shape}", TARGET, pytest.fail)
            seen, propose = [], proposer.propose

            def noted(root: Any, draws: Any, propose: Any = propose, seen: Any = seen) -> Any:
                tree = propose(root, draws)
                seen.append(tree.tokens[:, 1:])
                return tree

            proposer.propose = noted
            found = generate(TARGET, proposer, prompts, 24, sampling)
            assert [r.token_ids for r in found] == [r.token_ids for r in plain]
            assert {token for tokens in seen for token in tokens.flatten().tolist()} <= drafted


def test_ranks_of_a_text_are_those_among_the_drafted_tokens() -> None:
    heads, ids = some_heads(), torch.randint(0, V, (12,))
    last = torch.randn(12, TARGET.hidden_size)
    hidden: Any = type("Hidden", (), {"last": last})
    ranks, drafted = METHOD.teacher_forced(heads, hidden, ids), heads.draft_vocab_ids
    assert drafted is not None
    for t in range(9):
        full = torch.full((V,), -torch.inf)
        full[drafted] = heads.logits(last[t], 1).detach()
        expected = ranks_in(full[None], ids[t + 3 : t + 4])
        outside = int(ids[t + 3]) not in drafted.tolist()
        assert int(ranks[t + 1, 1]) == (-1 if outside else int(expected))


@pytest.mark.parametrize("shared", [False, True])
def test_draft_vocabulary_heads_export_to_hf_only(shared: bool, tmp_path: Path) -> None:
    """transformers decodes with them by draftsmith; engines read no such heads."""
    artifact = exported_heads(draft_vocab_size=DRAFTED, shared_head=shared)
    for engine in ("vllm", "tgi"):
        says = rf"heads draft {DRAFTED} of the target's .* no draft vocabulary"
        with pytest.raises(UserError, match=says):
            recipe_for(engine, artifact)  # type: ignore[arg-type]
    export(artifact, order("hf", tmp_path / "hf"))
    target = EXPORTED_TARGET
    again = Artifact.load(tmp_path / "hf", target.fingerprint(), target.embedding_and_head).drafter
    assert torch.equal(again.draft_vocab_ids, artifact.drafter.draft_vocab_ids)
    states = torch.randn(3, target.hidden_size)
    torch.testing.assert_close(again(states), artifact.drafter(states))


def test_run_with_draft_vocabulary_is_saved_and_continued(tmp_path: Path) -> None:
    """It trains, is evaluated by replay and by decoding, and another run may begin with it."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    shape = {"num_heads": 2, "draft_vocab_size": 60}
    evaluation = {"every": 2, "limit": 2, "max_new_tokens": 8, "tree_nodes": 6}
    changes = {"heads": shape, "max_steps": 2, "evaluation": evaluation}
    train(make_config(tmp_path, tmp_path / "target", **changes))
    folder = tmp_path / "run" / "best"
    written = json.loads((folder / "draftsmith.json").read_text())
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 60
    assert 0 < written["provenance"]["data"]["vocabulary_coverage"] <= 1
    assert written["calibration"]["rank_accuracy"]
    loaded = load_target(TargetConfig(str(tmp_path / "target"), dtype="float32", device="cpu"))
    heads = Artifact.load(folder, loaded.fingerprint()).drafter
    assert loaded.eos_ids <= set(heads.draft_vocab_ids.tolist())
    assert load_file(folder / heads.weights_file)["0.1.weight"].shape == (60, 32)
    run: Any = SimpleNamespace(init_from=str(folder), heads=MedusaConfig())
    apply_init_from(run)
    before, batches = Artifact.load(folder, loaded.fingerprint()), cast(Any, None)
    again = METHOD.make_drafter(run, loaded, batches, before)
    again.load_state_dict(heads.state_dict())
    assert run.heads == MedusaConfig(2, draft_vocab_size=60)
    assert again.config == MedusaShape(2, draft_vocab_size=60)
    run.heads = MedusaConfig(2, draft_vocab_size=50)
    with pytest.raises(UserError, match="draft_vocab_size 60, heads.draft_vocab_size says 50"):
        apply_init_from(run)
