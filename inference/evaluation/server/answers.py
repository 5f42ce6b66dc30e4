"""Answers of vLLM, SGLang and llama.cpp, each as a type with the fields that are read.

Other fields are ignored. An answer that does not fit its type is refused by
`heads.documents.convert`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ....heads.documents import Count, Token


class ModelEntry(Struct):
    """A model of `/v1/models`, or an adapter of one."""

    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a prompt and its reply may have together."""
    parent: str | None = None
    """The base model of an adapter."""


class ModelList(Struct):
    """Answer of `/v1/models`."""

    data: list[ModelEntry]


class Usage(Struct):
    """Numbers of tokens of a request."""

    completion_tokens: Count = 0


class VllmChoice(Struct):
    """Piece of a reply in a chunk of vLLM."""

    text: str | None = None
    token_ids: list[Token] | None = None
    finish_reason: str | None = None


class VllmChunk(Struct):
    """Event of vLLM's `/v1/completions`; the last one of a stream has `usage` and no piece."""

    choices: list[VllmChoice] | None = None
    usage: Usage | None = None


class SglangFinish(Struct):
    """Reason for which a reply ended."""

    type: str = ""


class SglangMeta(Struct):
    """Object `meta_info` of SGLang's event, about the whole reply so far."""

    completion_tokens: Count | None = None
    finish_reason: SglangFinish | str | None = None
    spec_verify_ct: Count | None = None
    # SGLang's versions name the same counts differently; counters.py knows which names belong
    # together.
    spec_num_correct_drafts: Count | None = None
    spec_accepted_drafts: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_proposed_drafts: Count | None = None
    spec_draft_token_num: Count | None = None
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_accept_histogram: list[Count] | None = None


class SglangChunk(Struct):
    """Event of SGLang's `/generate`."""

    output_ids: list[Token] | None = None
    meta_info: SglangMeta | None = None


class LlamacppDefaults(Struct, frozen=True):
    """Settings that llama.cpp's server gives to a request that names none."""

    n_ctx: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a prompt and its reply may have together."""


class LlamacppProps(Struct):
    """Answer of llama.cpp's `/props`."""

    total_slots: Count
    build_info: str = ""
    default_generation_settings: LlamacppDefaults = LlamacppDefaults()


class LlamacppChunk(Struct):
    """Event of llama.cpp's `/completion`; the last one of a stream has `stop`."""

    content: str = ""
    tokens: list[Token] | None = None
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: Count = 0
