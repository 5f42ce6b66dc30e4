"""The answers of vLLM and SGLang, each as a type with the fields that are read. Other fields are
ignored."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ....heads.documents import Count, Token


class ModelEntry(Struct):
    """One of `/v1/models`."""

    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    parent: str | None = None


class ModelList(Struct):
    """`/v1/models`."""

    data: list[ModelEntry]


class Usage(Struct):
    """Tokens of a request."""

    completion_tokens: Count = 0


class VllmChoice(Struct):
    """One reply's part of a chunk."""

    text: str | None = None
    token_ids: list[Token] | None = None
    finish_reason: str | None = None


class VllmChunk(Struct):
    """An event of vLLM's `/v1/completions`."""

    choices: list[VllmChoice] | None = None
    usage: Usage | None = None


class SglangFinish(Struct):
    """Why a reply ended."""

    type: str = ""


class SglangMeta(Struct):
    """`meta_info` of an event."""

    completion_tokens: Count | None = None
    finish_reason: SglangFinish | str | None = None
    spec_verify_ct: Count | None = None
    # One meaning under the names of several versions, see counters.py.
    spec_num_correct_drafts: Count | None = None
    spec_accepted_drafts: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_proposed_drafts: Count | None = None
    spec_draft_token_num: Count | None = None
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_accept_histogram: list[Count] | None = None


class SglangChunk(Struct):
    """An event of SGLang's `/generate`."""

    output_ids: list[Token] | None = None
    meta_info: SglangMeta | None = None
