"""Held-out tau during training: estimated by replay, and measured by decoding with the artifact.

The texts are the target's own replies to held-out prompts, greedy ones by default, written by the
loop that also measures. Two taus have to agree (`warn_of_difference`): `tau_estimated`, from drafts
along the text as in decoding, and `tau_measured`, from decoding with the saved artifact
(docs/metrics.md#training-metrics).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..heads.layout import dtype_name
from ..inference.base.console import ProgressReporter
from ..inference.conversations.selection import balanced_order, describe_groups
from ..inference.decode import Request, generate_one
from ..inference.evaluation.intervals import tau_interval
from ..inference.metrics import (
    emitted_per_round,
    repeats_itself,
    survival,
    tau,
    tau_by_position,
)
from ..inference.proposers.kind import Settings
from ..inference.proposers.ngram import PlainDecoding
from ..inference.proposers.registry import load_proposer, proposer_of
from ..inference.replay import rounds_on_text
from ..inference.rounds.outcome import Hidden
from ..inference.targets.masks import with_replies
from ..inference.targets.stored import HeldOutPrompt, HeldOutText
from ..inference.targets.target import Target, TargetSource
from .data.config import Evaluation
from .data.tables import Tables
from .method import AnyMethod

log = logging.getLogger(__name__)

DEFAULT_NODES = 16  # nodes of the calibration's tree if the evaluation decodes with a chain
PLAIN_PROMPT = 16  # tokens of a held-out plain text that are its prompt


class EvaluationAborted(Exception):
    """Exception of a measurement that was aborted because the run was asked to stop."""


@torch.no_grad()
def write_text(
    target: Target, prompt: HeldOutPrompt, taps: tuple[int, ...], config: Evaluation
) -> HeldOutText:
    """Return a prompt with the target's reply and the features of both, on the CPU."""
    start, longest = prompt.token_ids, config.max_new_tokens
    # Noise is keyed by the request: prompts of different units have different noise.
    request = Request(start, prompt.unit)
    plain = generate_one(target, PlainDecoding(), request, longest, sampling=config.sampling)
    ids = start + plain.token_ids
    layout = with_replies([len(start)], len(ids))
    states = target.forward(torch.tensor([ids], device=target.device), layout, taps=taps)
    return HeldOutText(ids, len(start), states.map(lambda x: x[0].cpu()), prompt.unit)


class HeldOutEvaluation:
    """Evaluation of a drafter on held-out texts, which the ranks share."""

    def __init__(
        self,
        target: TargetSource,
        tables: Tables,
        config: Evaluation,
        accelerator: Accelerator,
        method: AnyMethod,
        taps: tuple[int, ...],
        texts: list[HeldOutText] | None = None,
    ) -> None:
        """Let the target write its replies to prompts of `tables`, unless `texts` are given.

        `texts` are those of all ranks, from a feature store or a server.
        """
        self._target, self._config = target, config
        self._chain = config.tree_nodes == 0
        self._accelerator, self._method = accelerator, method
        # With a target that all ranks run together, every rank has all texts, for the same forward
        # passes, and all results. Otherwise the ranks share the texts.
        share = slice(accelerator.process_index, None, accelerator.num_processes)
        self._gather = gather_object
        if target.together:
            share, self._gather = slice(None), lambda results: results
        if texts is not None:
            self.texts = texts[share]
        else:
            # Leave two positions for a reply: a first root, and a token to draft.
            prompts = held_out_prompts(tables, config.limit, target.max_positions - 2)[share]
            progress = ProgressReporter(prompts, desc="target writes held-out replies")
            assert isinstance(target, Target), "a stored target comes with its texts"
            self.texts = [write_text(target, prompt, taps, config) for prompt in progress]
        loops = self._gather([repeats_itself(text.ids[text.start :]) for text in self.texts])
        self.loop_share = sum(loops) / len(loops)

    def _read_by(self, drafter: nn.Module) -> Iterator[tuple[int, Tensor, Hidden]]:
        """Yield start of the reply, ids and features of each text, in the drafter's dtype."""
        weight = next(drafter.parameters())
        for text in self.texts:
            hidden = text.hidden.map(lambda states: states.to(weight))
            yield text.start, torch.tensor(text.ids, device=weight.device), hidden

    @torch.no_grad()
    def calibrate(self, drafter: nn.Module) -> JsonObject:
        """Return the drafter's calibration on the texts of all ranks."""
        outcomes = []
        for start, ids, hidden in self._read_by(drafter):
            # On the CPU: the other ranks, which receive it, do not have this rank's device.
            outcomes.append((self._method.teacher_forced(drafter, hidden, ids).cpu(), start))
        nodes = self._config.tree_nodes or DEFAULT_NODES
        return self._method.calibrate(self._gather(outcomes), nodes)

    def estimate(self, artifact: Artifact) -> dict[str, float]:
        """Return metrics of the drafter in memory, without running the target.

        They are `tau_estimated`, which equals the measured tau in fp32 unless features in training
        and decoding differ, and `surv@d`, the share of its rounds that accepted at least d drafts.
        """
        proposer = proposer_of(artifact, **({"width": 1} if self._chain else {}))
        emitted = []
        for start, ids, hidden in self._read_by(artifact.drafter):
            emitted.append(rounds_on_text(proposer, ids, start, hidden))
        emitted = self._gather(emitted)
        # A round emits its accepted drafts and the bonus token.
        accepted = [tokens - 1 for rounds in emitted for tokens in rounds]
        survived = survival(accepted, max(accepted, default=0))
        metrics = {"tau_estimated": tau(emitted), "loop_share": self.loop_share}
        return metrics | {f"surv@{d}": share for d, share in enumerate(survived, 1)}

    def measure(
        self, drafter_folder: Path, asked: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Decode the prompts with the drafter in `drafter_folder`, loaded as a user would load it.

        Returns metrics: `tau_measured` with the ends of its 95% interval, and `tau@` by position of
        the round's root; an empty table if only the target's embedding and head are here. Warns of
        replies that differ from the target's own. Raises `EvaluationAborted` on every rank once
        `asked`, which is called before each prompt, has returned true on any of them.
        """
        if not isinstance(self._target, Target):
            return {}
        chain: Settings | None = {"width": 1} if self._chain else None
        proposer = load_proposer(drafter_folder, self._target, log.warning, chain)
        results = []
        aborted = False
        for text in ProgressReporter(self.texts, desc="decoding held-out prompts"):
            aborted = asked()
            if self._target.together:
                # The ranks make each pass together, so all of them have to stop after the same one.
                aborted = any(gather_object([aborted]))
            if aborted:
                break
            generation = generate_one(
                self._target,
                proposer,
                Request(text.ids[: text.start], text.unit),
                self._config.max_new_tokens,
                sampling=self._config.sampling,
            )
            equal = generation.token_ids == text.ids[text.start :]
            results.append((text.unit, text.start, emitted_per_round(generation), equal))
        if any(self._gather([aborted])):
            raise EvaluationAborted
        results = self._gather(results)
        emitted = [rounds for _, _, rounds, _ in results]
        # A path through the tree has one draft of each level.
        plan = getattr(proposer, "plan", None)
        levels = proposer.max_drafted if plan is None else plan.length
        if different := sum(not equal for *_, equal in results):
            warn_of_other_replies(different, len(results), self._target.dtype)
        low, high = tau_interval(emitted, [unit for unit, *_ in results], levels)
        by_position = tau_by_position([(start, rounds) for _, start, rounds, _ in results])
        return {
            "tau_measured": tau(emitted), "tau_measured_low": low, "tau_measured_high": high,
            **{f"tau@{bucket}": value for bucket, value in by_position.items()},
        }  # fmt: skip


def held_out_prompts(tables: Tables, count: int, longest: int) -> list[HeldOutPrompt]:
    """Return `count` held-out prompts of at most `longest` tokens, or all that there are.

    They are drawn evenly over the sources and their categories (`balanced_order`), and logged.
    A prompt is everything before the first reply token, or the beginning of a plain text. Raises
    `UserError` if all rows are too short or too long.
    """
    table = tables.held_out
    prompts, groups = [], []
    for i in range(len(table)):
        ids, mask = table.document(i)
        # The mask of a plain text begins with true, so `argmax` is 0.
        start = int(mask.argmax()) or min(PLAIN_PROMPT, len(ids) // 2)
        if 0 < start <= longest:
            prompts.append(HeldOutPrompt(ids[:start].tolist(), int(table.units[i])))
            groups.append(tables.groups[table.groups[i]])
    if not prompts:
        raise UserError("no held-out row is long enough to decode from; hold out longer rows")
    drawn = balanced_order(groups, [prompt.unit for prompt in prompts])[:count]
    log.info("held-out prompts: %s", describe_groups([groups[i] for i in drawn]))
    return [prompts[i] for i in drawn]


def warn_of_difference(metrics: Mapping[str, float]) -> None:
    """Warn where the estimated and the measured tau of an evaluation differ by more than chance."""
    estimated, measured = metrics["tau_estimated"], metrics["tau_measured"]
    low, high = metrics["tau_measured_low"], metrics["tau_measured_high"]
    # Half the width of the measured interval, and at least 5%, since the interval of equal replies
    # has no width. Few prompts have no interval, and their taus are not compared.
    allowed = max(0.05 * measured, (high - low) / 2)
    if not math.isnan(low) and abs(estimated - measured) > allowed:
        log.warning(
            "estimated tau %.3f and measured tau %.3f differ by more than chance: features in "
            "training and decoding differ",
            estimated, measured,
        )  # fmt: skip


def warn_of_other_replies(different: int, replies: int, dtype: torch.dtype) -> None:
    """Warn of replies that are not the target's own text; `dtype` is the target's."""
    if dtype.itemsize >= torch.float32.itemsize:
        why = "in float32 that is a bug; please report it"
    else:
        why = f"in {dtype_name(dtype)} near-ties may be decided otherwise; to exclude a bug, "
        why += "use float32"
    log.warning(
        "%d of %d held-out replies differ from the target's own text: %s", different, replies, why
    )
