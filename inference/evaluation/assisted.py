"""transformers' assisted generation with the same draft model: what a drafter has to beat. Batch 1,
as it is there.

It keeps no statistics; its streamer is called once with the prompt and then once a round, with the
tokens of that round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from ...heads.errors import UserError
from ..decode import Generation, Request, Round
from ..proposers.draft_model import DraftModelProposer
from ..settings import Sampling
from ..target import Target


class Assisted:
    """`model.generate(assistant_model=...)`, with a constant draft length and no confidence
    threshold: equal terms."""

    def __init__(self, target: Target, drafter: DraftModelProposer) -> None:
        """Raises `UserError` for a drafter that transformers does not take."""
        own, theirs = (
            model.config.get_text_config().vocab_size
            for model in (target.model, drafter.model.model)
        )
        if own != theirs:
            raise UserError(
                f"transformers wants the vocabularies of both models equal, which are {own} and "
                f"{theirs}"
            )
        self.name = f"assisted ({drafter.name})"
        self._target, self._helper, self._length = target, drafter.model.model, drafter.plan.length

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """As `decode.generate`. The first round has the prefill in it: its tokens come first and
        belong to no round."""
        return [self._one(request, max_new_tokens, sampling) for request in requests]

    def _one(self, request: Request, max_new_tokens: int, sampling: Sampling) -> Generation:
        target = self._target
        ids = torch.tensor([list(request.prompt_ids)], device=target.device)
        limit = min(max_new_tokens, target.max_positions - ids.shape[1])
        watch = _Watch(target.device)
        settings = self._helper.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = (
            self._length,
            "constant",
        )
        settings.assistant_confidence_threshold = 0.0
        with (
            _quiet(),
            torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []),
        ):
            torch.manual_seed(hash((sampling.seed, request.id, request.sample)) % 2**63)
            target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self._helper,
                max_new_tokens=limit,
                pad_token_id=0,
                eos_token_id=sorted(target.eos_ids) or None,
                streamer=watch,
                **_generation_options(sampling),
            )
        found = watch.generation(request, self._length, "greedy" if sampling.greedy else "assisted")
        if found.token_ids[-1] in target.eos_ids:
            found.finish_reason = "eos"
        elif len(found.token_ids) < max_new_tokens:
            found.finish_reason = "context"
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warning about options that its own assisted generation passes on."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _generation_options(sampling: Sampling) -> dict[str, Any]:
    penalty = {"repetition_penalty": sampling.repetition_penalty or 1.0}
    if sampling.greedy:
        return {"do_sample": False, **penalty}
    warping = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    return {
        "do_sample": True,
        **warping,
        **({"min_p": sampling.min_p} if sampling.min_p else {}),
        **penalty,
    }


class _Watch(BaseStreamer):
    """When which tokens came."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._puts: list[tuple[float, list[int]]] = []

    def put(self, value: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._puts.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None: ...

    def generation(self, request: Request, drafted: int, rule: str) -> Generation:
        (began, _), (first, tokens), *later = self._puts
        found = Generation(
            list(request.prompt_ids), list(tokens), ttft_s=first - began, finish_reason="length"
        )
        before = first
        for moment, new in later:
            found.rounds.append(
                Round(
                    new,
                    drafted,
                    len(new) - 1,
                    min(len(new), drafted),
                    rule,
                    t_round_s=moment - before,
                )
            )
            found.token_ids += new
            before = moment
        found.decode_s = before - first
        return found
