"""Targets of a known model's sizes with random weights: real shapes without a download.

Weights are drawn by the model's own initialisation, in bfloat16, and stored in shards with an
index, as published models are. The tokenizer is the quickstart target's, so the embedding has far
more rows than the tokenizer has tokens.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from arguments import CONFIGS, known_shapes
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.heads.errors import UserError
from draftsmith.heads.files import whole_directory

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "scripts" / "quickstart" / "target"
SHARD_BYTES = 300_000_000
UNWANTED = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")


def make_shape(name: str, folder: Path, layers: int | None = None, seed: int = 0) -> Path:
    """Write a target of the sizes of `name` to `folder`, with fewer `layers` if given; a folder
    that is there is kept.

    Raises `UserError` for an unknown name.
    """
    if (folder / "config.json").is_file():
        return folder
    path = CONFIGS / name / "config.json"
    if not path.is_file():
        raise UserError(f"no shape {name!r}; there are: {', '.join(known_shapes())}")
    values = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in UNWANTED
    }
    config = text_config(AutoConfig.for_model(values.pop("model_type"), **values))
    if layers is not None:
        config = with_layers(config, layers)
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    config.bos_token_id, config.pad_token_id = None, None
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Two end tokens and no token for padding, as many published models have.
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, config.vocab_size - 1]
    )
    with whole_directory(folder) as aside:
        model.save_pretrained(aside, max_shard_size=SHARD_BYTES)
        tokenizer.save_pretrained(aside)
    return folder


def text_config(config: Any) -> Any:
    """The language model's part of a multimodal model's config."""
    return config.get_text_config()


def with_layers(config: Any, layers: int) -> Any:
    """`config` with its first `layers` decoder layers. Raises `UserError` for more than it has."""
    total = config.num_hidden_layers
    if not 1 <= layers <= total:
        raise UserError(f"--layers must be between 1 and {total}, not {layers}")
    small = copy.deepcopy(config)
    small.num_hidden_layers = layers
    for name, value in small.to_dict().items():  # such as layer_types, which name each layer
        if isinstance(value, list) and len(value) == total:
            setattr(small, name, value[:layers])
    return small
