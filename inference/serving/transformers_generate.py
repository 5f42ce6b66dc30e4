"""transformers' `generate` by the decode loop, for `custom_generate/generate.py` of an export.

The text is that of plain `generate`: token for token where it is greedy, and with the same
distribution where it samples. Arguments that would change the text otherwise are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ...heads.artifact import OWN_FILE
from ...heads.errors import UserError
from ...heads.exchange.hub import Drafter
from ...heads.pretrained import end_ids
from ..api import Decoder, load
from ..decode import Request, Step, decode
from ..settings import Sampling
from ..targets.target_files import not_applied

DEFAULT_TOP_K = 50  # of transformers where it samples and nothing else is said
DEFAULT_NEW_TOKENS = 20  # of transformers where no length is given

NOT_RETURNED = (
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("renormalize_logits", "use_mtp", "prompt_lookup_num_tokens"),
)
"""Settings that do not change the text, and that plain `generate` would be needed for."""
IGNORED = {"use_model_defaults", "synced_gpus", "cache_implementation", "use_cache", "position_ids"}
"""Arguments about how plain `generate` computes, which this one does not need."""

DECODERS = "_draftsmith_decoders"
"""Attribute of a model with its decoders by drafter, so that a second call loads nothing. They hold
the model themselves, and go with it."""


def generate_with(
    model: PreTrainedModel,
    drafter: str,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **options: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Return the sequences `[B, S + new]` that `model.generate` returns, padded on the right.

    `drafter` is a folder or a repository on the hub; `tokenizer` is the model's, read from where
    the model came from if not given. The other arguments are those of `generate`. Sampled text
    takes its seed from torch's generator. Raises `UserError` for an argument that cannot be
    honoured. A reply ends where the target's positions end, which plain `generate` passes.
    """
    ids = input_ids if input_ids is not None else inputs
    if ids is None or ids.ndim != 2:
        raise UserError("give the prompts as input_ids [B, S]")
    config = merged(generation_config, model.generation_config)
    rest = config.update(**options)
    refuse(config, {name: value for name, value in rest.items() if name not in IGNORED})
    mask = mask_of(ids, config) if attention_mask is None else attention_mask
    if mask.shape != ids.shape:
        raise UserError(
            f"attention_mask has the shape {list(mask.shape)}, the prompts {list(ids.shape)}"
        )
    copies = config.num_return_sequences or 1
    limit = new_tokens(config, ids.shape[1])
    requests = []
    for number, (row, real) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        prompt = [token for token, there in zip(row, real, strict=True) if there]
        requests += [Request(prompt, number, sample) for sample in range(copies)]
    if streamer is not None and len(requests) > 1:
        raise UserError("a streamer takes one reply; give one prompt, or leave it out")
    # Before anything is loaded, which draws from torch's generator too.
    sampling = sampling_of(config)
    stops = config.stop_strings or []
    replies: list[list[int]] = [[] for _ in requests]
    training = model.training
    try:
        decoder = decoder_of(model, drafter, tokenizer)
        model.eval()
        steps: Iterable[list[Step]] = decode(
            decoder.target,
            decoder.proposer,
            requests,
            limit,
            sampling,
            frozenset(ends_of(config)),
            [stops] if isinstance(stops, str) else stops,
        )
        if streamer is not None:
            streamer.put(ids.cpu())
            steps = streamed(steps, streamer)
        for round_steps in steps:
            for index, step, _ in round_steps:
                replies[index] += step.tokens
    finally:
        if training:
            model.train()
    sequences = padded(ids.repeat_interleave(copies, 0), replies, config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def merged(given: GenerationConfig | None, default: GenerationConfig | None) -> GenerationConfig:
    """Return a generation config in which the model's own one fills what is not given."""
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    for name, value in (default.to_dict() if default is not None else {}).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config


def mask_of(ids: Tensor, config: GenerationConfig) -> Tensor:
    """Return the attention mask of prompts without one, as `generate` infers it.

    Padding is what has the pad token, unless that is an end token too.
    """
    pad: Any = config.pad_token_id
    if pad is None or int(pad) in ends_of(config):
        return torch.ones_like(ids)
    return (ids != int(pad)).long()


def streamed(steps: Iterable[list[Step]], streamer: Any) -> Iterator[list[Step]]:
    """Yield the steps of one reply, whose tokens a streamer of transformers gets as they come."""
    for round_steps in steps:
        for _, step, _ in round_steps:
            streamer.put(torch.tensor(step.tokens))
        yield round_steps
    streamer.end()


def decoder_of(model: PreTrainedModel, drafter: str, tokenizer: Any) -> Decoder:
    """Return the decoder of a model and a drafter, loaded once. Raises `UserError`.

    A folder that was rewritten is loaded again.
    """
    decoders = vars(model).setdefault(DECODERS, {})
    own_file = Path(drafter, OWN_FILE)
    written = own_file.stat().st_mtime_ns if own_file.is_file() else None
    key = drafter, written, None if tokenizer is None else id(tokenizer)
    if key not in decoders:  # only then are the files hashed, or looked for on the hub
        decoders[key] = load(model, Drafter.from_pretrained(drafter), tokenizer=tokenizer)
    return decoders[key]


def refuse(config: GenerationConfig, rest: dict[str, Any]) -> None:
    """Raise `UserError` for an argument that only plain `generate` can honour."""
    asked = {name: value for name in NOT_RETURNED if (value := getattr(config, name, None))}
    for name, value in (asked | not_applied(config)).items():
        if name != "stop_strings":  # which the loop takes
            raise UserError(
                f"{name}={value!r} is not supported by custom_generate; call generate without it"
            )
    for name, value in rest.items():
        if value is not None and not (isinstance(value, list) and not value):
            raise UserError(
                f"the argument {name} is not supported by custom_generate; call generate without it"
            )


def new_tokens(config: GenerationConfig, prompt: int) -> int:
    """Return the number of tokens to write after prompts of `prompt` padded tokens.

    Raises `UserError` where the prompt is as long as `max_length` already.
    """
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        return DEFAULT_NEW_TOKENS
    if config.max_length <= prompt:
        raise UserError(
            f"max_length={config.max_length} leaves no room after {prompt} tokens; give "
            "max_new_tokens"
        )
    return config.max_length - prompt


def sampling_of(config: GenerationConfig) -> Sampling:
    """Return the sampling parameters of a generation config. Raises `UserError`."""
    penalty = config.repetition_penalty or 1.0
    if not config.do_sample or config.temperature == 0:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=DEFAULT_TOP_K if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
        seed=int(torch.randint(1 << 31, ())),
    )


def ends_of(config: GenerationConfig) -> list[int]:
    """Return the end tokens of a generation config; there may be none."""
    eos: Any = config.eos_token_id
    return end_ids(eos.tolist() if isinstance(eos, Tensor) else eos)


def padded(prompts: Tensor, replies: list[list[int]], config: GenerationConfig) -> Tensor:
    """Return prompts `[B, S]` with their replies after them, those padded to one length."""
    ends = ends_of(config)
    pad: Any = config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    longest = max(map(len, replies))
    rows = [tokens + [int(pad)] * (longest - len(tokens)) for tokens in replies]
    return torch.cat([prompts, torch.tensor(rows, device=prompts.device)], dim=1)
