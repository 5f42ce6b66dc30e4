"""llama.cpp, whose drafts are chains; facts of b10434."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from shlex import quote
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

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
    Token,
    block,
    chain,
    lookup,
)

TYPES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}
CONVERTER = (
    "`convert_hf_to_gguf.py` is in llama.cpp's sources and reads folders: fetch a target of the "
    "hub with `hf download`."
)
TARGET_TYPE = (
    "The first command converts the target in its own type. `--outtype f32` there lets you compare "
    "texts exactly; to serve, quantise it (`llama-quantize target.gguf target-q8.gguf Q8_0`)."
)
CUT = "`--spec-draft-p-min` ends a block at the first draft of less confidence than that."


def _serve(kind: str, request: ExportRequest, _: Any) -> str:
    needs_target = ""
    if kind != "draft-simple":
        needs_target = f" --target-model-dir {quote(request.target)}"
    # The type is named, because the converter by itself makes float16 of float32.
    outtype = TYPES.get(str(request.dtype), "auto")
    return (
        f"python convert_hf_to_gguf.py {quote(request.target)} --outfile target.gguf\n"
        f"python convert_hf_to_gguf.py {quote(request.out)}{needs_target} --outtype {outtype} "
        "--outfile draft.gguf\n"
        f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} --spec-draft-n-max "
        f"{request.drafts}"
    )


BLOCK_NOTES = (limits.CHAIN, limits.FEWER, CONVERTER, TARGET_TYPE)
READS = (
    limits.PARTIAL_ROTARY,
    limits.yarn("attention_factor", "mscale_all_dim", "truncate", "beta_fast", "beta_slow"),
    limits.of_type("longrope", "which the engine takes for default ones"),
    limits.of_type("proportional", "which the engine takes for default ones"),
)
"""Limits of all drafters: what it computes of their rotary positions otherwise."""
BLOCK = (
    *limits.BLOCK,
    limits.ATTENTION_BIAS,
    *READS,
    limits.of_type("llama3", "which the engine drops for block drafters"),
)


class LlamacppDefaults(Struct, frozen=True):
    """Settings that the server gives to a request that names none."""

    n_ctx: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a prompt and its reply may have together."""


class LlamacppProps(Struct):
    """Answer of `/props`."""

    total_slots: Count
    build_info: str = ""
    default_generation_settings: LlamacppDefaults = LlamacppDefaults()


class LlamacppChunk(Struct):
    """Event of `/completion`; the last one of a stream has `stop`."""

    content: str = ""
    tokens: list[Token] | None = None
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: Count = 0


def _recognise(answers: Sequence[Any]) -> ServerFacts | None:
    props, slots = answers
    try:
        found = convert(props, LlamacppProps)
    except ValidationError:
        return None
    # A server may be started without /slots.
    speculates = None
    if isinstance(slots, list):
        speculates = any(isinstance(slot, dict) and slot.get("speculative") for slot in slots)
    return ServerFacts(found.build_info, speculates, found.default_generation_settings.n_ctx)


def _request(_: str, token_ids: list[int], sampling: Any, room: int) -> tuple[str, dict[str, Any]]:
    return "/completion", {
        "prompt": token_ids,
        "n_predict": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "typical_p": 1.0,
        "repeat_penalty": sampling.repetition_penalty or 1.0,
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def _read(reply: Any, chunk: LlamacppChunk, now: float) -> None:
    if chunk.tokens and not chunk.stop:
        reply.ids = [*(reply.ids or []), *chunk.tokens]
    if chunk.stop:
        reply.tokens = chunk.tokens_predicted
        reply.finish = chunk.stop_type
    # The last event brings no token but an end token, which counts if it is the only one.
    if chunk.tokens or chunk.content or (chunk.stop and not reply.arrivals):
        reply.arrivals.append(now)


ENGINE = ServingEngine(
    name="llamacpp",
    title="llama.cpp",
    place=4,
    recipes={
        "eagle3": Recipe(
            partial(_serve, "draft-eagle3"),
            (limits.CHAIN, CONVERTER, TARGET_TYPE, *limits.EAGLE_NOTES),
            (
                limits.ACTIVATION,
                limits.FC_BIAS,
                limits.SECOND_LAYER,
                *READS,
                limits.EAGLE3_NORMS,
                limits.ATTENTION_BIAS,
                Remark(
                    lambda facts: facts.shape.norm_taps or facts.shape.norm_output,
                    "norms of each tap or of the recycled state (EAGLE-3.1) are not known there; "
                    "train without them: --heads.norm-taps false --heads.norm-output false",
                ),
                Remark(
                    lambda facts: len(facts.shape.taps) != 3 and len(facts.shape.taps),
                    "it fuses {found} taps, and the engine reads exactly three",
                ),
            ),
        ),
        "dflash": Recipe(partial(_serve, "draft-dflash"), BLOCK_NOTES, BLOCK),
        "dspark": Recipe(
            partial(_serve, "draft-dspark"),
            (limits.CHAIN, limits.FEWER, CUT, CONVERTER, TARGET_TYPE),
            (*BLOCK, limits.TRANSITION),
        ),
        "draft_model": Recipe(
            partial(_serve, "draft-simple"), (CONVERTER, TARGET_TYPE, limits.OTHER_VOCABULARY)
        ),
    },
    like=EngineEmulation(
        {"drafts": 3},  # draft n-max
        dict.fromkeys(("eagle3", "mtp", "draft_model"), chain)
        | dict.fromkeys(("dflash", "dspark"), block)
        | {"ngram": lookup},
    ),
    server=ServerProtocol(
        paths=("/props", "/slots"),
        recognise=_recognise,
        request=_request,
        chunk=LlamacppChunk,
        read=_read,
        counts=CounterNames(
            prefix="llamacpp:",
            generated="tokens_predicted",
            running=("requests_processing", "requests_deferred"),
        ),
        definition="1 + accepted / drafts of its counters: without steps that had no draft",
        # It closes a connection after a stream without saying so; the next request would fail.
        headers={"Connection": "close"},
        no_metrics="start llama-server with --metrics",
    ),
)
