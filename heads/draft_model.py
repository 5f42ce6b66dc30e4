"""A small causal language model as drafter: an ordinary Hugging Face model directory, which any
engine takes as a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .embedding_and_head import EmbeddingAndHead
from .errors import UserError
from .pretrained import clear_errors, make_causal_lm, read_causal_lm, read_tokenizer

PROBES = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times.",
    "def f(x):\n    return {'a': [x ** 2, -1.5e-3]}  # \t tabs",
    " leading and trailing spaces  \n\n",
    "Zürich, Ελλάδα, 東京, עברית, 🙂👍🏽",
)


class DraftModel(nn.Module):
    """The model with the target's tokenizer. Trained and used without dropout."""

    method = "draft_model"
    taps: tuple[int, ...] = ()
    bound_to: tuple[str, ...] = ()  # any target with this tokenizer

    def __init__(self, model: nn.Module, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size`: the target's."""
        super().__init__()
        self.model: Any = model.eval()
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def save(self, directory: Path, target_name: str, dtype: torch.dtype) -> None:
        weights = {
            name: weight.detach().to("cpu", dtype)
            for name, weight in self.model.state_dict().items()
        }
        with torch.device("meta"):  # a second model of no size, so that the device holds one only
            copy: Any = make_causal_lm(self.model.config, dtype=dtype)
        copy.load_state_dict(weights, assign=True)
        copy.tie_weights()
        copy.generation_config = self.model.generation_config
        copy.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def facts(self) -> dict[str, Any]:
        return {}  # its own config.json is all, and has no second reader here

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype | str, embedding_and_head: EmbeddingAndHead | None
    ) -> DraftModel:
        """The model in `directory`. Raises `UserError` if it is incomplete, or has another
        tokenizer than the target."""
        if embedding_and_head is None:
            raise UserError(
                "a draft model needs the target's tokenizer to be checked against; load it "
                "together with its target"
            )
        with clear_errors(directory, "draft model"):
            model, found = read_causal_lm(directory, dtype=dtype, output_loading_info=True)
            tokenizer = read_tokenizer(directory)
        if wrong := [
            name
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            for name in found[kind]
        ]:
            raise UserError(
                f"draft model {directory} does not fit its config: {sorted(map(str, wrong))[0]} "
                "is missing or surplus"
            )
        if difference := tokenizer_difference(embedding_and_head.tokenizer, tokenizer):
            raise UserError(
                f"draft model {directory} has another tokenizer than the target: {difference}; "
                "its token ids mean other text, "
                "use a model of the same family"
            )
        return cls(model, tokenizer, embedding_and_head.vocab_size)


def tokenizer_difference(target: Any, draft: Any) -> str | None:
    """What tells two tokenizers apart, or None: ids of all tokens first, then what they make of
    texts that are hard to cut."""
    if target is None or draft is None:
        return "one of them has none"
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = f"{theirs[token]}" if token in theirs else "missing"
            return f"token {token!r} is {number} in the target and {other} in the draft model"
    if surplus := theirs.keys() - ours.keys():
        return f"the draft model has {len(surplus)} tokens more, such as {min(surplus)!r}"
    for text in PROBES:
        if target.encode(text) != draft.encode(text):
            return f"the same tokens, but {text[:24]!r} is cut in another way"
    return None


Drafter = DraftModel
