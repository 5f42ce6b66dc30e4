"""How a draft language model learns, on sequences small enough to check by eye; what decoding
logs of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from draftsmith.distill.divergences import divergence, log_probs
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.errors import UserError
from draftsmith.heads.layout import place
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.draft_model import make_proposer
from draftsmith.inference.targets.stored import StoredTarget
from draftsmith.inference.targets.target import Target
from draftsmith.train.config import TargetConfig
from draftsmith.train.data.batches import Batch
from draftsmith.train.data.config import Data, Source
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.data.rollouts import Rollouts
from draftsmith.train.methods.distill.config import DistillLoss, DistillRun
from draftsmith.train.methods.distill.loss import DistillObjective
from draftsmith.train.methods.distill.method import METHOD, check_draft_model, runner_of
from tests.conftest import ROOT
from tests.helpers.alignment import batch_of
from tests.helpers.architectures import architecture
from tests.helpers.draft_models import TARGET, draft_model_of

DISTILLED = ROOT / "scripts" / "quickstart" / "drafters" / "distill"


def objective(draft_model: DraftModel, **options: Any) -> DistillObjective:
    options = {"rows_per_chunk": 2, **options}
    return DistillObjective(DistillLoss(**options), runner_of(draft_model), TARGET)


def loss_of(draft_model: DraftModel, batch: Batch, **options: object) -> torch.Tensor:
    aim = objective(draft_model, **options)  # type: ignore[arg-type]
    return aim.forward(draft_model, LiveTarget(TARGET).features(batch), aim.weights(batch))[0]


def test_weighted_rows_match_the_worked_example() -> None:
    """Prompt 0..3, reply 4..8: rows 3..7 predict the reply; a second document's rows do not predict
    the first's."""
    aim = objective(draft_model_of())
    assert aim.weights(batch_of((9, [(4, 9)]))) == {"rows": 5.0}
    # Row 3 of the first document, and rows 1, 2 of it and 0 to 2 of the second one.
    assert aim.weights(batch_of((4, [(2, 4)]), (4, [(0, 4)]))) == {"rows": 5.0}


@pytest.mark.parametrize("loss", ["kl", "ce", "lk-hybrid"])
def test_loss_is_the_mean_over_reply_rows_of_draft_model_against_target(loss: str) -> None:
    draft_model, batch = draft_model_of(), batch_of((9, [(4, 9)]), (6, [(2, 6)]), pad=2)
    found = loss_of(draft_model, batch, loss=loss)
    terms = []
    for start, end, first in ((0, 9, 4), (9, 15, 2)):
        ids = batch.ids[:, start:end]
        log_p = log_probs(TARGET.model(ids).logits[0])
        log_q = log_probs(draft_model.model(ids).logits[0])
        for row in range(first - 1, end - start - 1):
            one = slice(row, row + 1)
            terms.append(divergence(loss, log_q[one], log_p[one], ids[0, row + 1 : row + 2]))  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.cat(terms).mean())


def test_every_weight_learns_and_a_batch_without_replies_still_takes_part() -> None:
    draft_model = draft_model_of()
    loss_of(draft_model, batch_of((9, [(4, 9)]))).backward()
    assert all(
        p.grad is not None and float(p.grad.abs().sum()) > 0 for p in draft_model.parameters()
    )
    draft_model.zero_grad(set_to_none=True)
    aim = objective(draft_model)
    loss, _ = aim.forward(
        draft_model, LiveTarget(TARGET).features(batch_of((6, []))), {"rows": 3.0}
    )
    loss.backward()
    assert float(loss.detach()) == 0 and all(p.grad is not None for p in draft_model.parameters())


def test_a_trimmed_draft_model_counts_what_it_cannot_say_as_missed() -> None:
    draft_model = draft_model_of(vocab_size=20)
    batch = batch_of((9, [(4, 9)]))
    features = LiveTarget(TARGET).features(batch)
    aim = objective(draft_model)
    _, sums = aim.forward(draft_model, features, aim.weights(batch))
    p = TARGET.head(features.last[0, 3:8]).softmax(-1)
    q = draft_model.model(batch.ids.clamp(max=19)).logits[0, 3:8].softmax(-1)
    torch.testing.assert_close(sums["alpha@1"][0], torch.minimum(p[:, :20], q).sum().double())


def test_a_draft_models_padding_rows_are_not_part_of_its_distribution() -> None:
    draft_model = draft_model_of()
    batch = batch_of((9, [(4, 9)]))
    plain = loss_of(draft_model, batch)
    draft_model.model.resize_token_embeddings(TARGET.vocab_size + 8, mean_resizing=False)
    torch.testing.assert_close(loss_of(draft_model, batch), plain)


def test_what_cannot_work_is_refused_before_training() -> None:
    with pytest.raises(UserError, match="lower it"):
        check_draft_model(runner_of(draft_model_of()), 257)
    config = {"out": "x", "target": TargetConfig("x"), "data": Data([Source("x")])}
    with pytest.raises(UserError, match="would teach the draft model its own words"):
        DistillRun(**config, objective=DistillLoss(loss="ce"), rollouts=Rollouts(share=0.5))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rollouts.begin in"):
        Rollouts(begin=1.0)
    stored = StoredTarget(TARGET.model, TARGET.tokenizer, TARGET.fingerprint(), {})
    with pytest.raises(UserError, match="is cut from a whole target; give draft_model.path"):
        METHOD.make_drafter(DistillRun(**config), stored, cast(Any, None), None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not run the recurrent layers of this draft model"):
        DistillObjective(DistillLoss(recompute=True), architecture("qwen3.5"), TARGET)


def distilled(target: Target) -> Artifact:
    """The committed draft model, in float32."""
    artifact = Artifact.load(DISTILLED, target.fingerprint(), target.embedding_and_head)
    place(artifact.drafter, target.device, torch.float32)
    return artifact


def test_overlap_by_teacher_forcing_is_what_decoding_logged(quickstart: Target) -> None:
    """sum min(p, q) at the positions that decoding drafted from, 1e-4 in float32."""
    artifact = distilled(quickstart)
    sampling = Sampling(temperature=0.8, rule="rejection", seed=3)
    proposer = make_proposer(artifact, TreeSettings(length=3))
    checked = 0
    for text in generate(quickstart, proposer, [[5, 90, 40, 11], [7, 8, 9]], 60, sampling):
        ids = torch.tensor([text.prompt_ids + text.token_ids])
        p = (quickstart.head(quickstart.forward(ids).last[0]) / 0.8).softmax(-1)
        draft_model = runner_of(artifact.drafter)
        q = (draft_model.head(draft_model.forward(ids).last[0]) / 0.8).softmax(-1)
        alpha = torch.minimum(p, q).sum(-1)
        root = len(text.prompt_ids)
        for step in text.rounds:
            assert step.overlap is not None
            for node, logged in enumerate(step.overlap[: len(step.tokens)]):
                assert logged == pytest.approx(float(alpha[root + node]), abs=1e-4)
                checked += 1
            root += len(step.tokens)
    assert checked > 40
