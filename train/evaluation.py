"""Held-out tau during training: estimated by replay on teacher-forced text, measured by decoding
with the saved drafter.

The texts are the target's own greedy replies to held-out prompts, written by the same loop that
measures. Four numbers, which are two pairs that must agree: what the training pass says of every
row (tau_training), replayed, against what drafting does on the same features (tau_drafted); and
drafting along the known text (tau_estimated) against decoding with the saved drafter
(tau_measured).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..inference.console import Progress
from ..inference.decode import generate_one
from ..inference.metrics import (
    bootstrap,
    emitted_per_round,
    repeats_itself,
    survival,
    tau,
    tau_by_position,
)
from ..inference.proposer import PlainDecoding, load_proposer, method_module
from ..inference.replay import replay, rounds_on_text
from ..inference.settings import Sampling
from ..inference.stored import HeldOutText
from ..inference.target import Hidden, Target
from .config import Evaluation
from .data.tables import TokenTable

log = logging.getLogger(__name__)

# A penalty of the target's own would weigh on drafts and target alike in decoding; replay knows
# nothing of it.
SAMPLING = Sampling(repetition_penalty=1.0)
PLAIN_PROMPT = 16  # tokens of a held-out plain text that the target is given


@dataclass
class Estimate:
    """What is known of a drafter without decoding."""

    tau: float
    """Its drafting along the texts, as `rounds_on_text` replays them."""
    tau_training: float
    """The same for what the training pass itself says of every row: for Medusa the tree, for the
    others a chain."""
    tau_drafted: float
    """What drafting gives for exactly that: equal in fp32, or training and drafting disagree."""
    tau_rows: float
    """The average over all rows: biased upwards, logged so that nobody has to wonder, never
    compared."""
    survival: list[float]


@dataclass
class Measurement:
    """What decoding says of a drafter."""

    kept: list[list[int]]
    tau: float
    interval: tuple[float, float]
    different: int
    """Replies that are not the target's own: must be 0 in fp32."""
    by_position: dict[str, float]


@torch.no_grad()
def write_text(
    target: Target, prompt: list[int], taps: tuple[int, ...], max_new_tokens: int
) -> HeldOutText:
    """The target's greedy reply to a prompt, with the features of both."""
    plain = generate_one(target, PlainDecoding(), prompt, max_new_tokens, sampling=SAMPLING)
    ids = prompt + plain.token_ids
    hidden = target.forward(torch.tensor([ids], device=target.device), taps=taps)
    return HeldOutText(
        ids, len(prompt), Hidden(hidden.last[0].cpu(), tuple(tap[0].cpu() for tap in hidden.taps))
    )


class HeldOutEvaluation:
    """The held-out texts, each rank holding its share."""

    def __init__(
        self,
        target: Target,
        table: TokenTable,
        config: Evaluation,
        accelerator: Accelerator,
        method: ModuleType,
        taps: tuple[int, ...],
        texts: list[HeldOutText] | None = None,
    ) -> None:
        """`texts`: all of them, where they have been written before (a feature store)."""
        self._target, self._config, self._accelerator, self._method = (
            target,
            config,
            accelerator,
            method,
        )
        # Ranks that make every forward together all hold all texts; others share them.
        mine = (
            slice(None)
            if target.together
            else slice(accelerator.process_index, None, accelerator.num_processes)
        )
        self._gather = (lambda found: found) if target.together else gather_object
        if texts is not None:
            self.texts = texts[mine]
        else:
            prompts = held_out_prompts(table, config.prompts, target.max_positions - 2)[mine]
            progress = Progress(prompts, desc="target writes held-out replies")
            self.texts = [
                write_text(target, prompt, taps, config.max_new_tokens) for prompt in progress
            ]
        loops = self._gather([repeats_itself(text.ids[text.start :]) for text in self.texts])
        self.loop_share = sum(loops) / len(loops)

    def _there(self, text: HeldOutText, weight: Tensor) -> tuple[Tensor, Hidden]:
        """Ids and features beside the drafter, in its dtype."""
        taps = tuple(tap.to(weight) for tap in text.hidden.taps)
        return torch.tensor(text.ids, device=weight.device), Hidden(
            text.hidden.last.to(weight), taps
        )

    def calibrate(self, drafter: Any) -> tuple[dict[str, Any], list[tuple[Tensor, int]]]:
        """The drafter's calibration on these texts, and what it was made of."""
        weight = next(drafter.parameters())
        outcomes = []
        for text in self.texts:
            ids, hidden = self._there(text, weight)
            outcomes.append((self._method.teacher_forced(drafter, hidden, ids).cpu(), text.start))
        outcomes = self._gather(outcomes)
        return self._method.calibrate(outcomes, self._config.tree_nodes), outcomes

    def estimate(self, artifact: Artifact, outcomes: list[tuple[Tensor, int]]) -> Estimate:
        """Tau of the drafter in memory, without the target."""
        trained, rows = [], []
        for outcome, start in outcomes:
            accepted = self._method.accepted_by_root(outcome, artifact.calibration)
            trained.append(replay(accepted, start, len(accepted)))
            rows += accepted[start:-1]
        kept = self._replay(artifact, {})
        drafted = self._replay(artifact, self._method.REPLAYED) if self._method.REPLAYED else kept
        accepted = [k - 1 for request in kept for k in request]
        return Estimate(
            tau(kept), tau(trained), tau(drafted), 1 + sum(rows) / max(len(rows), 1),
            survival(accepted, max(accepted, default=0)),
        )  # fmt: skip

    def _replay(self, artifact: Artifact, settings: dict[str, int]) -> list[list[int]]:
        proposer = method_module(artifact.method).make_proposer(artifact, **settings)
        weight = next(artifact.drafter.parameters())
        kept = []
        for text in self.texts:
            ids, hidden = self._there(text, weight)
            kept.append(rounds_on_text(proposer, ids, text.start, hidden))
        return self._gather(kept)

    def measure(self, drafter_folder: Path) -> Measurement | None:
        """Decode the prompts with the drafter just saved, loaded back as a user would; None without
        a target to decode with."""
        if not self._target.whole:
            return None
        proposer = load_proposer(drafter_folder, self._target, log.warning)
        results: list[tuple[int, list[int], bool]] = []
        for text in Progress(self.texts, desc="decoding held-out prompts"):
            generation = generate_one(
                self._target,
                proposer,
                text.ids[: text.start],
                self._config.max_new_tokens,
                sampling=SAMPLING,
            )
            results.append(
                (
                    text.start,
                    emitted_per_round(generation),
                    generation.token_ids == text.ids[text.start :],
                )
            )
        results = self._gather(results)
        kept = [rounds for _, rounds, _ in results]
        by_position = tau_by_position([(start, rounds) for start, rounds, _ in results])
        return Measurement(
            kept,
            tau(kept),
            bootstrap(kept, tau),
            sum(not equal for *_, equal in results),
            by_position,
        )


def held_out_prompts(table: TokenTable, count: int, longest: int) -> list[list[int]]:
    """The first `count` held-out prompts: everything before the first reply token, or the beginning
    of a plain text."""
    prompts = []
    for i in range(len(table)):
        ids, mask = table.document(i)
        start = int(mask.argmax()) or min(PLAIN_PROMPT, len(ids) // 2)
        if 0 < start <= longest:
            prompts.append(ids[:start].tolist())
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError("no held-out row is long enough to decode from; hold out longer rows")
    return prompts


def evaluate(
    held_out: HeldOutEvaluation,
    drafter: Any,
    make_artifact: Callable[[dict[str, Any]], Artifact],
    save: Callable[[Artifact], Path],
) -> tuple[Estimate, Measurement | None, dict[str, Any]]:
    """Calibrate, estimate, save, measure what was saved; warn when training, drafting and decoding
    part."""
    calibration, outcomes = held_out.calibrate(drafter)
    artifact = make_artifact(calibration)
    estimate = held_out.estimate(artifact, outcomes)
    measured = held_out.measure(save(artifact))
    if measured is None:
        return estimate, None, calibration
    low, high = measured.interval
    for what, one, other in (
        ("estimated tau %.3f and measured tau %.3f", estimate.tau, measured.tau),
        (
            "tau %.3f by the training pass and %.3f by drafting",
            estimate.tau_training,
            estimate.tau_drafted,
        ),
    ):
        if abs(one - other) > max(0.05 * other, (high - low) / 2):
            log.warning(
                what + " part by more than chance: features in training and decoding differ",
                one,
                other,
            )
    if measured.different:
        log.warning(
            "%d of %d held-out replies differ from the target's own greedy text: near-ties in low "
            "precision, a bug in float32",
            measured.different,
            len(measured.kept),
        )
    return estimate, measured, calibration
