"""transformers' `generate` with the decode loop, for `custom_generate/generate.py` of an export.

The text is that of plain `generate`: token for token if it is greedy, and of the same distribution
if it samples. Arguments that cannot be honoured are refused.
"""

from __future__ import annotations

from functools import partial
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
from ..base.settings import Sampling
from ..decode import Request, decode
from ..targets.target_files import not_applied

DEFAULT_TOP_K = 50  # transformers' default for sampling
NOT_RETURNED = (
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("renormalize_logits", "use_mtp", "prompt_lookup_num_tokens"),
)
"""Settings that do not change the text, but that only plain `generate` can honour."""
TAKEN = {
    *("inputs", "input_ids", "attention_mask", "generation_config"),
    # details of how plain `generate` computes, ignored here
    *("use_model_defaults", "synced_gpus", "position_ids"),
}
"""Accepted arguments besides the settings of a generation config."""
DECODERS = "_draftsmith_decoders"
"""Attribute of a model that caches its decoders by drafter. They refer to the model and are freed
with it."""


def generate_with(
    model: PreTrainedModel,
    drafter: str,
    *,
    tokenizer: Any = None,
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    **arguments: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Return the sequences `[B, S + new]` that `model.generate` returns, padded on the right.

    `drafter` is a folder or a repository on the hub; `tokenizer` is the model's, read from where
    the model came from if not given. The other arguments are those of `generate`, which prepares
    them as for its own decoding. Sampled text takes its seed from torch's generator. Raises
    `UserError` for an argument that cannot be honoured. A reply ends where the target's positions
    end, which plain `generate` passes.
    """
    settings = vars(GenerationConfig())
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, list) and not value)
        if not empty and name not in TAKEN and name not in settings:
            raise _unsupported(f"the argument {name}")
    # Bound here, since `generate` does not pass them on to a custom function.
    decoding = partial(
        _decoded, drafter=drafter, tokenizer=tokenizer, streamer=streamer, stops=stop_strings or []
    )
    return model.generate(custom_generate=decoding, **arguments)  # type: ignore[arg-type]


def _decoded(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    drafter: str,
    tokenizer: Any,
    streamer: Any,
    stops: str | list[str],
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Return what `generate_with` returns; transformers calls it in place of its own decoding.

    `input_ids` `[B, S]` has each prompt as often as replies are asked for, one after another.
    """
    config = generation_config
    _refuse(config)
    if streamer is not None and len(input_ids) > 1:
        raise UserError("a streamer takes one reply; give one prompt, or leave it out")
    mask = prepared.get("attention_mask")
    if mask is None:  # without padding
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask has the shape {list(mask.shape)}, the prompts {list(input_ids.shape)}"
        )
    copies, requests = config.num_return_sequences or 1, []
    for number, (row, real) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        requests.append(Request(row[real].tolist(), number // copies, number % copies))
    # Before loading, which draws from torch's generator too.
    sampling = _sampling_of(config)
    ends = end_ids(config.eos_token_id)
    replies: list[list[int]] = [[] for _ in requests]
    training = model.training
    try:
        decoder = _decoder_of(model, drafter, tokenizer)
        model.eval()
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for steps in decode(
            decoder.target,
            decoder.proposer,
            requests,
            config.max_length - input_ids.shape[1],
            sampling,
            frozenset(ends),
            [stops] if isinstance(stops, str) else stops,
        ):
            for index, step, _ in steps:
                replies[index] += step.tokens
                if streamer is not None:
                    streamer.put(torch.tensor(step.tokens))
        if streamer is not None:
            streamer.end()
    finally:
        if training:
            model.train()
    pad = [*ends, 0][0] if config.pad_token_id is None else config.pad_token_id
    longest = max(map(len, replies))
    rows = [tokens + [pad] * (longest - len(tokens)) for tokens in replies]
    new = torch.tensor(rows, device=input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _decoder_of(model: PreTrainedModel, drafter: str, tokenizer: Any) -> Decoder:
    """Return the decoder of a model and a drafter, loaded once. Raises `UserError`.

    A drafter's folder that was rewritten is loaded again.
    """
    decoders = vars(model).setdefault(DECODERS, {})
    own_file = Path(drafter, OWN_FILE)
    written = own_file.stat().st_mtime_ns if own_file.is_file() else None
    key = drafter, written, None if tokenizer is None else id(tokenizer)
    if key not in decoders:  # hashes the files, or looks them up on the hub
        decoders[key] = load(model, Drafter.from_pretrained(drafter), tokenizer=tokenizer)
    return decoders[key]


def _refuse(config: GenerationConfig) -> None:
    """Raise `UserError` for a setting that only plain `generate` can honour."""
    asked = {name: value for name in NOT_RETURNED if (value := getattr(config, name, None))}
    for name, value in (asked | not_applied(config)).items():
        raise _unsupported(f"{name}={value!r}")


def _unsupported(what: str) -> UserError:
    return UserError(f"{what} is not supported by custom_generate; call generate without it")


def _sampling_of(config: GenerationConfig) -> Sampling:
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
