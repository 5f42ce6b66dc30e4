"""Requests and streams of vLLM, SGLang and llama.cpp: what is asked of each, and how it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ....heads.documents import convert
from ....heads.files import JsonObject
from ...conversations.prompts import Prompt
from ...settings import Sampling
from .answers import LlamacppChunk, SglangChunk, SglangFinish, SglangMeta, VllmChunk


@dataclass
class EngineServer:
    """Address and properties of a server, known before it is measured."""

    url: str
    engine: str
    """vllm, sglang or llamacpp."""
    version: str
    """Empty where the server does not give it."""
    model: str
    """Name that requests give for the model."""
    context: int | None
    """Tokens that a prompt and its reply may have together; `None` where it is not known."""
    speculates: bool | None
    """SGLang's and llama.cpp's own answer; `None` where they give none, and for vLLM, whose
    counters show it."""


@dataclass
class ServerReply:
    """The server's reply to one prompt, and its times: `time.perf_counter` in seconds."""

    prompt: Prompt
    turn: int
    """Number of the turn in its conversation, from 0."""
    sent: float
    """The time at which the request was sent."""
    ids: list[int] | None = None
    """Token ids, the end token included; `None` where the server does not give them."""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """The time at which each chunk with tokens arrived."""
    finish: str = ""
    """The engine's reason for the end of the reply; empty until it has ended."""
    meta: JsonObject = field(default_factory=dict)
    """SGLang's `meta_info`; of several chunks the last value of each key."""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first chunk, the server's queue included."""
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; `None` for a reply of one token."""
        if self.tokens <= 1:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)


@dataclass(frozen=True)
class Protocol:
    """Form of an engine's requests, and of its streams."""

    request: Callable[[EngineServer, Prompt, Sampling, int], tuple[str, JsonObject]]
    """Function of server, prompt, sampling and the largest number of tokens: path and body."""
    read: Callable[[ServerReply, JsonObject, float], None]
    """Adds what an event brought at a time to a reply. Raises `DocumentError`."""


def _vllm(
    server: EngineServer, prompt: Prompt, sampling: Sampling, room: int
) -> tuple[str, JsonObject]:
    """Return path and body of a request to vLLM for at most `room` tokens."""
    # vLLM takes what a request leaves out from the model's generation_config.json, so every
    # sampling parameter is given.
    return "/v1/completions", {
        "model": server.model,
        "prompt": prompt.token_ids,
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


def _read_vllm(reply: ServerReply, event: JsonObject, now: float) -> None:
    """Add to `reply` what an event of vLLM brought at the time `now`. Raises `DocumentError`."""
    chunk = convert(event, VllmChunk)
    # A vLLM that sends no ids counts its tokens in the event behind the last chunk.
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


def _sglang(
    server: EngineServer, prompt: Prompt, sampling: Sampling, room: int
) -> tuple[str, JsonObject]:
    """Return path and body of a request to SGLang for at most `room` tokens."""
    parameters = {
        "max_new_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # SGLang's sign for no limit
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "skip_special_tokens": False,
    }
    return "/generate", {
        "input_ids": prompt.token_ids,
        "sampling_params": parameters,
        "stream": True,
    }


def _read_sglang(reply: ServerReply, event: JsonObject, now: float) -> None:
    """Add to `reply` what an event of SGLang brought at the time `now`. Raises `DocumentError`."""
    chunk = convert(event, SglangChunk)
    meta = chunk.meta_info or SglangMeta()
    reply.meta |= event.get("meta_info") or {}
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


def _llamacpp(
    server: EngineServer, prompt: Prompt, sampling: Sampling, room: int
) -> tuple[str, JsonObject]:
    """Return path and body of a request to llama.cpp for at most `room` tokens."""
    # Every setting that changes probabilities is given: what is left out is the server's.
    return "/completion", {
        "prompt": prompt.token_ids,
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


def _read_llamacpp(reply: ServerReply, event: JsonObject, now: float) -> None:
    """Add to `reply` what an event of llama.cpp brought at the time `now`.

    Raises `DocumentError`.
    """
    chunk = convert(event, LlamacppChunk)
    if chunk.tokens and not chunk.stop:
        reply.ids = [*(reply.ids or []), *chunk.tokens]
    if chunk.stop:
        reply.tokens = chunk.tokens_predicted
        reply.finish = chunk.stop_type
    # The last event brings no token but an end token, which counts if it is the only one.
    if chunk.tokens or chunk.content or (chunk.stop and not reply.arrivals):
        reply.arrivals.append(now)


PROTOCOLS = {
    "vllm": Protocol(_vllm, _read_vllm),
    "sglang": Protocol(_sglang, _read_sglang),
    "llamacpp": Protocol(_llamacpp, _read_llamacpp),
}
