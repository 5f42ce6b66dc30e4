"""SGLang, which drafts trees with EAGLE; facts of 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from shlex import quote
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ...errors import UserError
from . import limits
from .engine import (
    Count,
    EngineEmulation,
    ExportRequest,
    FileLayout,
    Files,
    NativeFiles,
    Recipe,
    Remark,
    ReplyCounts,
    ServerFacts,
    ServerProtocol,
    ServingEngine,
    Settings,
    Token,
    block,
)

# SGLang adds 1 to each tap inside `eagle_config`, which counts layers from 0. For these families it
# does so only if the first number is 1, and takes the numbers as they are otherwise.
SHIFTS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
    "kimi_k25", "mistral_large3",
)  # fmt: skip


def _serve(algorithm: str, request: ExportRequest, _: Any) -> str:
    """Return the serve command: a chain of `request.drafts` steps.

    SGLang counts the root among the draft tokens, so there is one more of these than drafts.
    """
    return (
        f"python -m sglang.launch_server --model-path {quote(request.target)} "
        f"--speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path {quote(request.out)} --speculative-num-steps "
        f"{request.drafts} \\\n"
        f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {request.drafts + 1}"
    )


def _serve_block(kind: str, request: ExportRequest, drafter: Any) -> str:
    """Return the serve command for a block drafter.

    Its draft tokens count the root, so there is one more of them than drafts. A DFlash block has as
    many slots, because its first one is the anchor's own; all slots of a DSpark block draft.
    """
    return (
        f"python -m sglang.launch_server --model-path {quote(request.target)} "
        f"--speculative-algorithm {kind.upper()} \\\n"
        f"    --speculative-draft-model-path {quote(request.out)} \\\n"
        f"    --speculative-{kind}-block-size {request.drafts + drafter.first_slot} "
        f"--speculative-num-draft-tokens {request.drafts + 1}"
    )


def _eagle1(native: NativeFiles) -> Files:
    """Return the files of EAGLE-1 for SGLang's own class.

    That class has a bias in `fc`, which would hold random numbers if the file had none.
    """
    config = {**native.config, "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    weight = native.tensors["fc.weight"]
    return config, {"fc.bias": weight.new_zeros(len(weight)), **native.tensors}


EAGLE1_LAYOUT = FileLayout("sglang-eagle1", _eagle1)
READS = (
    limits.DYNAMIC_ROPE,
    limits.yarn("attention_factor", "attn_factor"),
    limits.ZERO_SCALE,
    limits.LONGROPE,
    limits.PROPORTIONAL_FACTOR,
)
"""Limits of all drafters: what it computes of their rotary positions otherwise."""
PARTIAL = Remark(
    limits.rotates_part_of_heads,
    "`partial_rotary_factor` is read at the top of the config, from which transformers 5.23 takes "
    "it: keep the version that SGLang asks for.",
)
EAGLE = (
    limits.ACTIVATION,
    limits.ODD_WIDTH,
    limits.ATTENTION_BIAS,
    limits.SECOND_LAYER,
    *READS,
    limits.SECTIONS,
)
NOTES = (limits.READ_ONLY, *limits.EAGLE_NOTES, PARTIAL)
BLOCK_NOTES = (limits.CHAIN, limits.FEWER, limits.READ_ONLY, PARTIAL)
BLOCK = (*limits.BLOCK, limits.SCALED_BLOCK, *READS)


def _tree(steps: int, topk: int, tokens: int, _: Any, settings: Settings) -> Settings:
    """Return the shape of an EAGLE drafter or draft model, with SGLang's defaults for it.

    It is a chain where topk is 1, elsewhere a tree of `tokens` nodes, the root counted. Raises
    `UserError` for too few tokens.
    """
    levels, width = settings["steps"] or steps, settings["topk"] or topk
    if width == 1:
        return {"length": levels, "width": 1}
    most = settings["tokens"] or max(tokens, levels + 1)
    if most <= levels:
        raise UserError(
            f"sglang: tokens count the root too; {levels} steps need at least {levels + 1}, "
            f"not {most}"
        )
    # the root has topk children; on each later level topk nodes have topk children each
    candidates = width + (levels - 1) * width**2
    return {"length": levels, "width": width, "nodes": min(most - 1, candidates)}


def _whole_block(proposer: Any, settings: Settings) -> Settings:
    """Return a block drafter's settings, by default the whole block. Raises `UserError`."""
    for key in ("steps", "topk"):
        if settings[key] is not None:
            raise UserError(
                f"sglang drafts a block in one step, as a chain; leave out {key}, tokens says how "
                "many"
            )
    tokens = settings["tokens"]  # which count the root
    return block(proposer, {"drafts": proposer.longest if tokens is None else tokens - 1})


class SglangFinish(Struct):
    type: str = ""


class SglangMeta(Struct):
    """Object `meta_info` of an event, about the whole reply so far."""

    completion_tokens: Count | None = None
    finish_reason: SglangFinish | str | None = None
    spec_verify_ct: Count | None = None
    # Versions name the same counts differently; `ENGINE` says which names belong together.
    spec_num_correct_drafts: Count | None = None
    spec_accepted_drafts: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_proposed_drafts: Count | None = None
    spec_draft_token_num: Count | None = None
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_accept_histogram: list[Count] | None = None


class SglangChunk(Struct):
    """Event of `/generate`."""

    output_ids: list[Token] | None = None
    meta_info: SglangMeta | None = None


def _recognise(answers: Sequence[Any]) -> ServerFacts | None:
    # Another engine may have such a path too, so SGLang's own keys decide.
    for info in answers:
        if isinstance(info, dict) and {"internal_states", "speculative_algorithm"} & info.keys():
            named = "speculative_algorithm" in info
            speculates = bool(info["speculative_algorithm"]) if named else None
            return ServerFacts(str(info.get("version", "")), speculates)
    return None


def _request(_: str, token_ids: list[int], sampling: Any, room: int) -> tuple[str, dict[str, Any]]:
    parameters = {
        "max_new_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # SGLang's sign for no limit
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "skip_special_tokens": False,
    }
    return "/generate", {"input_ids": token_ids, "sampling_params": parameters, "stream": True}


def _read(reply: Any, chunk: SglangChunk, now: float) -> None:
    meta = chunk.meta_info or SglangMeta()
    reply.meta |= {name: value for name, value in asdict(meta).items() if value is not None}
    total = meta.completion_tokens or 0
    if total > reply.tokens:
        reply.arrivals.append(now)
        reply.tokens = total
    if (ids := chunk.output_ids) is not None:
        # By a server option, a chunk has the ids of the whole reply so far, or its own ids only.
        # The number of tokens decides which; if it fits neither, the ids are not known.
        appended = [*(reply.ids or []), *ids]
        if len(ids) == total:
            reply.ids = ids
        elif len(appended) == total:
            reply.ids = appended
        else:
            reply.ids = None
    reason = meta.finish_reason
    if isinstance(reason, SglangFinish):
        reason = reason.type
    reply.finish = reason or reply.finish


ENGINE = ServingEngine(
    name="sglang",
    title="SGLang",
    place=2,
    recipes={
        "eagle3": Recipe(
            partial(_serve, "EAGLE3"),
            NOTES,
            (
                *EAGLE,
                limits.EAGLE3_NORMS,
                # SGLang recognises a state that was fused already by its width.
                Remark(
                    lambda facts: (
                        len(facts.shape.taps) * facts.shape.target_hidden_size
                        == facts.shape.hidden_size
                    ),
                    "its taps are as wide as its own state, so they are taken for one and fc is "
                    "left out",
                ),
                limits.NORM_BEFORE_RESIDUAL,
                Remark(
                    lambda facts: facts.family in SHIFTS and facts.shape.taps[0] != 2,
                    "for {facts.family} targets it reads the taps as they are meant only where the "
                    "first one is 2",
                ),
            ),
        ),
        "eagle1": Recipe(partial(_serve, "EAGLE"), NOTES, (*EAGLE, *limits.EAGLE1), EAGLE1_LAYOUT),
        "dflash": Recipe(partial(_serve_block, "dflash"), BLOCK_NOTES, BLOCK),
        "dspark": Recipe(partial(_serve_block, "dspark"), BLOCK_NOTES, (*BLOCK, limits.TRANSITION)),
        "draft_model": Recipe(
            partial(_serve, "STANDALONE"), (limits.READ_ONLY, limits.OTHER_VOCABULARY)
        ),
    },
    like=EngineEmulation(
        # speculative-num-steps, -eagle-topk and -num-draft-tokens; None is SGLang's own default,
        # which depends on the drafter.
        {"steps": None, "topk": None, "tokens": None},
        dict.fromkeys(("eagle1", "eagle3"), partial(_tree, 5, 4, 8))
        | {"mtp": partial(_tree, 3, 1, 4)}
        | dict.fromkeys(("dflash", "dspark"), _whole_block)
        | {"draft_model": partial(_tree, 3, 1, 4)},
        least={"tokens": 2},  # the root and at least one draft
    ),
    server=ServerProtocol(
        # One path or the other, depending on the version.
        paths=("/server_info", "/get_server_info"),
        recognise=_recognise,
        request=_request,
        chunk=SglangChunk,
        read=_read,
        counts=ReplyCounts(
            rounds="spec_verify_ct",
            # newest first
            accepted=("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
            drafted=("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
            histograms=("spec_correct_drafts_histogram", "spec_accept_histogram"),
            definition="(completion_tokens - 1 for the prefill's) / spec_verify_ct of the measured "
            "replies",
        ),
        definition="1 + accepted / spec_verify_ct of the measured replies; its own "
        "spec_accept_length has the prefill's token in the numerator",
    ),
)
