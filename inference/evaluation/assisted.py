"""transformers' assisted generation with the same draft model: the baseline a drafter has to beat.

It decodes one request at a time and keeps no statistics. Its streamer is called once with the
prompt and then once a round with the tokens of that round; rounds and times are reconstructed here
from these calls.
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
from ..targets.target import Target
from .names import short_name

RECURRENT = "transformers does not assist models with recurrent layers"


class Assisted:
    """transformers' `model.generate(assistant_model=...)` as a way to decode.

    The draft length is constant and no confidence threshold ends a draft early, so that it drafts
    as many tokens a round as a chain of the same length does in draftsmith's loop.
    """

    def __init__(self, target: Target, drafter: DraftModelProposer) -> None:
        """Raises `UserError` for a target or a drafter that transformers does not take."""
        if target.mixers or drafter.model.mixers:
            raise UserError(RECURRENT)
        target_vocab, draft_vocab = (
            model.config.get_text_config().vocab_size
            for model in (target.model, drafter.model.model)
        )
        if target_vocab != draft_vocab:
            raise UserError(
                "transformers wants the vocabularies of both models equal, which are "
                f"{target_vocab} and {draft_vocab}"
            )
        given = getattr(drafter, "given", None)
        self.name = f"assisted ({drafter.name if given is None else short_name(given.spec)})"
        self._target, self._helper, self._length = target, drafter.model.model, drafter.plan.length

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """Return the reply to each request, as `decode.generate` does, one after the other.

        transformers' first round includes the prefill. Its tokens are the first of the reply and
        belong to no round here.
        """
        return [self._one(request, max_new_tokens, sampling) for request in requests]

    def _one(self, request: Request, max_new_tokens: int, sampling: Sampling) -> Generation:
        """Return the reply to one request, with the rounds that its streamer has seen."""
        target = self._target
        ids = torch.tensor([list(request.prompt_ids)], device=target.device)
        limit = min(max_new_tokens, target.max_positions - ids.shape[1])
        watch = _Watch(target.device)
        # transformers reads these three from the draft model's own generation config only
        settings = self._helper.generation_config
        settings.num_assistant_tokens = self._length
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        devices = [target.device] if target.device.type == "cuda" else []
        with _quiet(), torch.random.fork_rng(devices=devices):
            # transformers draws from the global generator, not from noise by position: a seed of
            # the request's name makes its text repeatable whatever was decoded before it
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
        # at T > 0 the text is not that of plain decoding with the same noise, so the rule has a
        # name of its own, which `measure.comparable` does not list
        reply = watch.generation(request, self._length, "greedy" if sampling.greedy else "assisted")
        if reply.token_ids[-1] in target.eos_ids:
            reply.finish_reason = "eos"
        elif len(reply.token_ids) < max_new_tokens:
            reply.finish_reason = "context"
        return reply


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warning about options that its own assisted generation passes on."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _generation_options(sampling: Sampling) -> dict[str, Any]:
    """Return `sampling` as keyword arguments of transformers' `generate`."""
    penalty = sampling.repetition_penalty or 1.0
    if sampling.greedy:
        return {"do_sample": False, "repetition_penalty": penalty}
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": penalty,
    }
    if sampling.min_p:
        options["min_p"] = sampling.min_p
    return options


class _Watch(BaseStreamer):
    """Streamer that notes the tokens of every call and the moment at which they came."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._puts: list[tuple[float, list[int]]] = []

    def put(self, value: Tensor) -> None:
        # work that is queued on the device belongs to the time of this round
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._puts.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None: ...

    def generation(self, request: Request, drafted: int, rule: str) -> Generation:
        """Return the reply that was streamed, with a record for every round after the first.

        `drafted` is the constant number of drafts a round. A round emits its accepted drafts and
        the bonus token, so it accepted one token less than came; the draft after the accepted ones
        was refused, unless all were accepted.
        """
        # the first call carries the prompt, the second the tokens of the round with the prefill
        (started, _), (first_came, first_tokens), *rounds = self._puts
        reply = Generation(
            list(request.prompt_ids),
            list(first_tokens),
            ttft_s=first_came - started,
            finish_reason="length",
        )
        previous = first_came
        for came, tokens in rounds:
            accepted, offered = len(tokens) - 1, min(len(tokens), drafted)
            seconds = came - previous
            reply.rounds.append(
                Round(
                    tokens=tokens,
                    drafted=drafted,
                    accepted=accepted,
                    offered=offered,
                    rule=rule,
                    t_round_s=seconds,
                )
            )
            reply.token_ids += tokens
            previous = came
        reply.decode_s = previous - first_came
        return reply
