"""Training of an MTP layer: the training pass is the decoding pass, no row reads what is ahead of
it, what is frozen stays, LoRA is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.mtp import MtpDrafter, shape_for
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.losses.calibration import batch_of_text
from draftsmith.train.losses.unroll import unroll
from draftsmith.train.losses.unrolled import UnrolledObjective
from draftsmith.train.methods.mtp.config import MtpLoss
from draftsmith.train.methods.mtp.method import METHOD, freeze
from tests.helpers import mtp_models
from tests.helpers.alignment import batch_of
from tests.helpers.trained import accepted_in_chains

SIZE = 96


def pair(kind: str, seed: int = 0) -> tuple[Target, MtpDrafter]:
    """A target and a random layer that drafts well enough to be accepted at times."""
    target = Target(mtp_models.make_model(kind, seed), None, kind)
    drafter = MtpDrafter(shape_for(target.config), target.embedding_and_head)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        drafter.layers[0].load_state_dict(target.model.model.layers[-1].state_dict())
    return target, drafter


def trained(drafter: MtpDrafter, target: Target, steps: int = 60, **options: Any) -> MtpDrafter:
    """The layer after a few steps on one text."""
    loss = MtpLoss(**{"steps": 3, "loss": "kl", **options}).resolved()
    freeze(drafter, loss)
    aim = UnrolledObjective(loss, drafter, target.head)
    learning = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-3)
    batch = batch_of((40, [(4, 40)]))
    features = LiveTarget(target).features(batch)
    for _ in range(steps):
        optimizer.zero_grad()
        aim.forward(drafter, features, aim.weights(batch))[0].backward()
        optimizer.step()
    return drafter


class Recorded(EagleProposer):
    """Notes the logits of the first draft of every round, and of the chain after it."""

    def __init__(self, drafter: MtpDrafter) -> None:
        super().__init__(drafter, TreeSettings(length=3, width=1))
        self.rounds: list[list[Tensor]] = []

    def propose(self, root: Tensor, draws: Any) -> Any:
        self.rounds.append([])
        return super().propose(root, draws)

    def _named(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        self.rounds[-1].append(logits.detach().reshape(-1, logits.shape[-1])[0])
        return super()._named(logits, ids)


@torch.no_grad()
@pytest.mark.parametrize("kind", mtp_models.FAMILIES)
def test_logits_of_training_are_those_of_decoding(kind: str) -> None:
    target, drafter = pair(kind)
    recorder, prompt = Recorded(drafter), [5]
    reply = generate_one(target, recorder, prompt, 16)
    generator = torch.Generator().manual_seed(1)
    for prompt in torch.randint(2, SIZE, (20, 6), generator=generator).tolist():
        recorder = Recorded(drafter)
        reply = generate_one(target, recorder, prompt, 16)
        if len(reply.rounds) > 5:
            break
    text = torch.tensor(prompt + reply.token_ids)
    features = LiveTarget(target).features(batch_of_text(text))
    compared, root = 0, len(prompt)
    for drafts, round_ in zip(recorder.rounds, reply.rounds, strict=True):
        # As training: row root - 1, with the chain's own tokens after the root.
        chain = [int(logits.argmax()) for logits in drafts]
        whole = torch.cat([text[: root + 1], torch.tensor(chain)])
        last = features.last[:, : root + 1]
        last = torch.cat([last, last.new_zeros(1, len(chain), last.shape[-1])], 1)
        outputs = unroll(drafter, batch_of_text(whole), (), last, len(drafts))
        for step, logits in enumerate(drafts):
            expected = drafter.logits(outputs[step][0, root - 1])
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
            compared += 1
        root += len(round_.tokens)
    assert compared > 10


@torch.no_grad()
def test_rows_do_not_depend_on_later_tokens() -> None:
    target, drafter = pair("qwen3.5")
    text = torch.randint(2, SIZE, (14,), generator=torch.Generator().manual_seed(2))
    changed = text.clone()
    changed[9] = (changed[9] + 1) % SIZE
    both = []
    for ids in (text, changed):
        batch = batch_of_text(ids)
        features = LiveTarget(target).features(batch)
        both.append(unroll(drafter, batch, (), features.last, 3))
    for step, (one, other) in enumerate(zip(*both, strict=True)):
        last = 9 - 2 - step  # row t of step k reads tokens up to t + 1 + k
        torch.testing.assert_close(one[:, : last + 1], other[:, : last + 1])
        assert not torch.allclose(one[:, last + 1], other[:, last + 1])


def test_estimated_tau_is_that_of_decoding() -> None:
    target, drafter = pair("qwen3.5", seed=3)
    trained(drafter, target, steps=80).eval().requires_grad_(False)
    prompt = batch_of((40, [(4, 40)])).ids[0, :6].tolist()
    reply = generate_one(
        target, EagleProposer(drafter, TreeSettings(length=3, width=1)), prompt, 40
    )
    text = torch.tensor(prompt + reply.token_ids)
    features = LiveTarget(target).features(batch_of_text(text))
    hidden = Hidden(features.last[0])
    table = METHOD.teacher_forced(drafter, hidden, text, steps=3)
    accepted = accepted_in_chains(table, 3)
    root = len(prompt)
    for round_ in reply.rounds:
        emitted = len(round_.tokens)
        if root + 3 < len(text):  # further roots lack tokens
            assert accepted[root] == round_.accepted
        root += emitted
    assert len(reply.rounds) > 3


@pytest.mark.parametrize(
    ("kind", "choice"),
    [("qwen3.5", "all"), ("qwen3.5", "norms"), ("deepseek", "norms")],
)
def test_only_the_selected_parameters_are_trained(kind: str, choice: str, tmp_path: Path) -> None:
    target, drafter = pair(kind)
    before = {name: tensor.clone() for name, tensor in drafter.serving_state().items()}
    trained(drafter, target, steps=2, trained=choice)
    after = drafter.serving_state()
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {
        "all": set(before),
        "norms": {name for name in before if "norm" in name},
    }[choice]
    assert moved == expected
    artifact = Artifact(drafter, target.fingerprint())
    artifact.save(tmp_path / "drafter")
    loaded = Artifact.load(tmp_path / "drafter", target.fingerprint(), target.embedding_and_head)
    saved = loaded.drafter.serving_state()
    assert all(torch.allclose(saved[name], after[name]) for name in after)
