"""vLLM, whose drafts are chains; facts of 0.32 and 0.33."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from shlex import quote
from typing import Any, Literal

from msgspec import Struct

from . import limits
from .engine import (
    Count,
    CounterNames,
    EngineEmulation,
    ExportRequest,
    Recipe,
    Remark,
    ServerFacts,
    ServerProtocol,
    ServingEngine,
    Settings,
    Token,
    block,
    chain,
    lookup,
)

NOTES = (limits.CHAIN, *limits.EAGLE_NOTES)
V2_RUNNER = "Needs vLLM's V2 runner, so a GPU."
NO_MEDUSA = "Medusa needs vLLM 0.32 or older and its V1 runner; 0.33 does not list it any more."
READS = (limits.PROPORTIONAL_FACTOR,)
"""Limits of all drafters: what it computes of their rotary positions otherwise."""
BLOCK = (
    *limits.BLOCK,
    *READS,
    limits.of_type("longrope", "of which the engine keeps no table for block drafters"),
)
OWN_HEADS = Remark(
    lambda facts: facts.drafter.config.shared_head,
    "its heads share the target's output matrix, and the engine wants one in the file; train "
    "without heads.shared_head",
)


def _serve(method: str, request: ExportRequest, _: Any) -> str:
    # The method is named, since vLLM would otherwise guess it from the path (`guess`).
    config: dict[str, Any] = {
        "method": method,
        "model": request.out,
        "num_speculative_tokens": request.drafts,
    }
    speculation = quote(json.dumps(config))
    return f"vllm serve {quote(request.target)} --speculative-config {speculation}"


def _heads(proposer: Any, settings: Settings) -> Settings:
    return {"length": min(settings["drafts"], proposer.longest), "width": 1}


def _rule(kind: str, settings: Settings) -> Literal["match", "rejection", "recursive"]:
    """Return the acceptance rule.

    Drawn drafts are judged by block verification or by standard rejection, which for a chain is
    recursive rejection with one child a node (docs/verification.md#rejection-rules).
    """
    if settings["draws"] == "greedy" or kind in ("medusa", "ngram"):
        return "match"
    return "rejection" if settings["verify"] == "block" else "recursive"


class VllmUsage(Struct):
    completion_tokens: Count = 0


class VllmChoice(Struct):
    text: str | None = None
    token_ids: list[Token] | None = None
    finish_reason: str | None = None


class VllmChunk(Struct):
    """Event of `/v1/completions`; the last one of a stream has `usage` and no piece."""

    choices: list[VllmChoice] | None = None
    usage: VllmUsage | None = None


def _recognise(answers: Sequence[Any]) -> ServerFacts:
    """Return facts of any server: vLLM is recognised by its counters alone, so it is asked last."""
    (version,) = answers
    return ServerFacts(str(version.get("version", "")) if isinstance(version, dict) else "")


def _request(
    model: str, token_ids: list[int], sampling: Any, room: int
) -> tuple[str, dict[str, Any]]:
    # vLLM takes what a request leaves out from the model's generation_config.json.
    return "/v1/completions", {
        "model": model,
        "prompt": token_ids,
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _read(reply: Any, chunk: VllmChunk, now: float) -> None:
    # A vLLM that sends no ids counts its tokens in the event after the last chunk.
    if chunk.usage is not None and reply.ids is None:
        reply.tokens = chunk.usage.completion_tokens
    for choice in chunk.choices or []:
        if choice.token_ids:
            reply.ids = [*(reply.ids or []), *choice.token_ids]
            reply.tokens = len(reply.ids)
        reply.finish = choice.finish_reason or reply.finish
        # The last chunk may be empty: an end token has no text. It counts if it is the only one.
        if choice.token_ids or choice.text or (reply.finish and not reply.arrivals):
            reply.arrivals.append(now)


COUNTERS = CounterNames(
    prefix="vllm:",
    generated="generation_tokens",
    running=("num_requests_running", "num_requests_waiting"),
    chunk_of_step=True,
)

ENGINE = ServingEngine(
    name="vllm",
    title="vLLM",
    place=0,
    recipes={
        "eagle3": Recipe(
            partial(_serve, "eagle3"), NOTES, (*limits.EAGLE3, *READS, limits.LONGROPE)
        ),
        "eagle1": Recipe(
            partial(_serve, "eagle"),
            NOTES,
            (*limits.EAGLE3, *limits.EAGLE1, *READS, limits.LONGROPE),
        ),
        "dflash": Recipe(partial(_serve, "dflash"), (limits.CHAIN, limits.FEWER), BLOCK),
        "dspark": Recipe(
            partial(_serve, "dspark"),
            (limits.CHAIN, limits.FEWER, V2_RUNNER, limits.READ_ONLY),
            (*BLOCK, limits.TRANSITION),
        ),
        "draft_model": Recipe(partial(_serve, "draft_model"), (limits.OTHER_VOCABULARY,)),
        "medusa": Recipe(
            partial(_serve, "medusa"),
            (limits.CHAIN, NO_MEDUSA),
            (limits.MEDUSA_VOCABULARY, OWN_HEADS),
        ),
    },
    like=EngineEmulation(
        # num_speculative_tokens (for which vLLM itself has no default), draft_sample_method and
        # rejection_sample_method.
        {"drafts": 3, "draws": "greedy", "verify": "standard"},
        dict.fromkeys(("eagle1", "eagle3", "mtp", "draft_model"), chain)
        | dict.fromkeys(("dflash", "dspark"), block)
        | {"medusa": _heads, "ngram": lookup},
        {"draws": ("greedy", "probabilistic"), "verify": ("standard", "block")},
        rule=_rule,
    ),
    server=ServerProtocol(
        paths=("/version",),
        recognise=_recognise,
        request=_request,
        chunk=VllmChunk,
        read=_read,
        counts=COUNTERS,
        definition="1 + accepted / drafts of its counters: without steps that had no draft, with "
        "drafts accepted after a reply's end",
        no_tokens="counts no tokens in /metrics as a vLLM does; start the vLLM without "
        "--disable-log-stats, and name the engine itself, not a gateway before it",
    ),
)
