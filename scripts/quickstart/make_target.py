"""Make the quickstart targets, chat-style code models small enough to commit, and a draft LM.

    python scripts/quickstart/make_target.py --out scripts/quickstart/target --tokens 16e6
    python scripts/quickstart/make_target.py --out scripts/quickstart/draft_model --tokens 16e6 \\
        --kind draft-model --tokenizer scripts/quickstart/target
    python scripts/quickstart/make_target.py --out scripts/quickstart/hybrid --tokens 16e6 \\
        --kind hybrid --tokenizer scripts/quickstart/target --teacher scripts/quickstart/target

Data: the functions (`functions.py`) of the standard library and of the packages installed next to
it. Held-out modules are left out, and so is every training function that shares a 13-gram with one
(vendored copies and backports are common). The same script runs on a CPU or a GPU; it needs torch,
transformers, tokenizers and safetensors and the project only.

Choices that differ from the textbook: Muon for the matrices inside the layers and AdamW for the
rest (fewer tokens to the same loss at this size), batches of equal-length rows instead of packing
(right padding is never attended, so no mask is built), loss on every token of the conversation (the
model also learns what prompts look like), standard-library functions seen three times as often (the
quickstart's prompts come from there).

The hybrid target has Qwen3.5's architecture, with a layer that predicts the token after the next
(multi-token prediction, arXiv 2412.19437), trained together with the model. transformers has no
class for that layer in this family and leaves its weights out; they are stored under the family's
names. With a teacher, the model starts from the teacher's weights of equal name and shape
(embedding, feed-forward parts, norms) and learns the teacher's distributions, which takes fewer
tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from functions import Function, functions_under, ngrams, stdlib_functions
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from draftsmith.heads.pretrained import save_model
from draftsmith.train.optimizer import Muon

# the first ids, in this order
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, EOS = 0, 1
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{%- else -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
STDLIB_REPEATS = 3
FOLLOWING = 0.3  # weight of the loss of tokens after the next
# tokens; longer functions are left out, not cut, so that every reply ends with its end token
CONTEXT = 1024


def collect() -> tuple[list[Function], list[Function]]:
    """Training and held-out functions: distinct, and none of the former shares a 13-gram with one
    of the latter."""
    stdlib = stdlib_functions()
    packages = list(functions_under(Path(sysconfig.get_paths()["purelib"])))
    held_out = [f for f in stdlib + packages if f.split != "train"]
    forbidden: set[int] = set()
    for f in held_out:
        forbidden |= ngrams(f.body)
    seen: set[str] = set()
    train: list[Function] = []
    for source, repeats in ((stdlib, STDLIB_REPEATS), (packages, 1)):
        for f in source:
            key = " ".join((f.prompt + f.body).split())
            if f.split == "train" and key not in seen and forbidden.isdisjoint(ngrams(f.body)):
                seen.add(key)
                train.extend([f] * repeats)
    return train, [f for f in held_out if f.split == "valid"]


def train_tokenizer(functions: list[Function], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over prompts and bodies, with the chat template that marks what the
    assistant wrote."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sample = random.Random(0).sample(functions, min(len(functions), 40_000))
    tokenizer.train_from_iterator((f.prompt + "\n" + f.body for f in sample), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, functions: list[Function]) -> list[list[int]]:
    """Token ids of each conversation, in the template's form; conversations longer than the context
    are left out."""
    texts = [f"<|user|>{f.prompt}<|end|><|assistant|>{f.body}<|end|>" for f in functions]
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": functions[0].prompt},
            {"role": "assistant", "content": functions[0].body},
        ],
        tokenize=False,
    )
    assert rendered == texts[0], "the template and its fast rendering differ"
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)[
        "input_ids"
    ]
    return [row for row in ids if len(row) <= CONTEXT]


def batches(
    rows: list[list[int]], tokens_per_batch: int, pad: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless batches `[rows, length]` of rows of similar length, in a new order each epoch."""
    rng = random.Random(seed)
    while True:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]) + rng.uniform(0, 16))
        groups: list[list[int]] = [[]]
        for i in order:
            if groups[-1] and (len(groups[-1]) + 1) * len(rows[i]) > tokens_per_batch:
                groups.append([])
            groups[-1].append(i)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(rows[i]) for i in group)
            yield torch.tensor([rows[i] + [pad] * (length - len(rows[i])) for i in group])


def token_loss(
    model: Any, predictor: Predictor | None, teacher: Any, ids: Tensor, pad: int
) -> tuple[Tensor, Tensor, int]:
    """Summed cross-entropy of every next token that is not padding, that of every token after the
    next by `predictor`, and how many next tokens there are. `teacher`: take its distributions in
    place of the tokens."""
    states = model.model(input_ids=ids[:, :-1]).last_hidden_state
    goals = ids[:, 1:]
    if teacher is not None:
        with torch.no_grad():
            goals = teacher(input_ids=ids[:, :-1]).logits.softmax(-1)
    counted = ids[:, 1:] != pad
    following = states.new_zeros(())
    if predictor is not None:
        embedded = model.get_input_embeddings()(ids[:, 1:-1])
        later = predictor(model, embedded, states[:, :-1])
        following = summed_loss(model, later, goals[:, 1:], counted[:, 1:])
    return summed_loss(model, states, goals, counted), following, int(counted.sum())


def summed_loss(model: Any, states: Tensor, goals: Tensor, counted: Tensor) -> Tensor:
    """Summed cross-entropy by the model's head over the `counted` ones of `states`; `goals` are
    token ids or distributions."""
    logits = model.lm_head(states[counted]).float()
    return nn.functional.cross_entropy(logits, goals[counted], reduction="sum")


class Predictor(nn.Module):
    """Qwen3.5's layer for the token after the next: attention over pairs of an embedded token and
    the state, after the final norm, that predicted it."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, model: Any, embedded: Tensor, states: Tensor) -> Tensor:
        """States `[B, N, H]` for the head: row t has seen the tokens up to t + 1."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(parts, -1))
        places = torch.arange(x.shape[1], device=x.device).expand(3, len(x), -1)
        turned = model.model.rotary_emb(x, places)
        return self.norm(self.layers[0](x, position_embeddings=turned))


@torch.no_grad()
def held_out_loss(
    model: torch.nn.Module,
    rows: list[list[int]],
    pad: int,
    device: str,
    bodies_only: int | None = None,
) -> float:
    """Mean loss in nats per token on `rows`; with `bodies_only`, only what follows that token id
    (the assistant mark)."""
    model.eval()
    total, count = 0.0, 0
    for ids in _evaluation_batches(rows, pad):
        ids = ids.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=torch.device(device).type == "cuda"):
            logits = model(input_ids=ids[:, :-1]).logits.float()
        labels = ids[:, 1:].clone()
        if bodies_only is not None:
            started = (ids[:, :-1] == bodies_only).cumsum(1) > 0
            labels[~started] = pad
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=pad, reduction="sum"
        ).item()
        count += int((labels != pad).sum())
    model.train()
    return total / count


def _evaluation_batches(rows: list[list[int]], pad: int) -> Iterator[torch.Tensor]:
    ordered = sorted(rows, key=len)
    for start in range(0, len(ordered), 16):
        group = ordered[start : start + 16]
        yield torch.tensor([row + [pad] * (len(group[-1]) - len(row)) for row in group])


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "target": (  # 3.6M parameters
        LlamaForCausalLM,
        LlamaConfig,
        dict(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=3,
        ),
    ),
    "draft-model": (  # 0.7M
        LlamaForCausalLM,
        LlamaConfig,
        dict(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
    # 4.3M; heads of keys and values differ in number, so that a mix-up shows. llama.cpp wants one
    # size for both, as published models have it.
    "hybrid": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        dict(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=32,
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            mtp_num_hidden_layers=1,
        ),
    ),
}


def build_model(tokenizer: PreTrainedTokenizerFast, kind: str) -> Any:
    """A model of a kind of `KINDS`, with random weights."""
    model, config, sizes = KINDS[kind]
    return model(
        config(
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **sizes,
        )
    )


@torch.no_grad()
def start_from(model: Any, teacher: Any) -> int:
    """Copy the teacher's weights of equal name and shape; return how many parameters they are."""
    theirs, copied = dict(teacher.named_parameters()), 0
    for name, parameter in model.named_parameters():
        weight = theirs.get(name)
        if weight is not None and weight.shape == parameter.shape:
            # This family's norms multiply by 1 + weight, a Llama's by the weight.
            parameter.copy_(weight - 1 if "norm" in name else weight)
            copied += weight.numel()
    return copied


def learning_rate_scale(progress: float) -> float:
    """Warm-up over 1%, constant, then linear to zero over the last 40% of the tokens."""
    return min(1.0, progress / 0.01, (1.0 - progress) / 0.4)


def train(
    model: Any,
    predictor: Predictor | None,
    teacher: Any,
    rows: list[list[int]],
    valid: list[list[int]],
    args: argparse.Namespace,
    save: Any,
) -> None:
    pad, device = PAD, args.device
    model.to(device).train()
    if teacher is not None:
        teacher.to(device).eval()
    named = list(model.named_parameters())
    if predictor is not None:
        named += predictor.to(device).train().named_parameters()
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    done, step, started, last_save = 0, 0, time.monotonic(), time.monotonic()
    for ids in batches(rows, args.batch, pad, args.seed):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate_scale(max(done, 1) / args.tokens)
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
            loss, following, count = token_loss(model, predictor, teacher, ids.to(device), pad)
        ((loss + FOLLOWING * following) / count).backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done, step = done + count, step + 1
        if step % 50 == 0:
            rate = done / (time.monotonic() - started)
            losses = " ".join(f"{x.item() / count:.3f}" for x in (loss, following))
            print(f"step {step}  tokens {done:,}  loss {losses}  {rate:,.0f} tokens/s", flush=True)
        if time.monotonic() - last_save > 600:
            held_out = held_out_loss(model, valid[:200], pad, device)
            print(f"  held-out loss {held_out:.4f}", flush=True)
            save({"tokens": done})
            last_save = time.monotonic()
        if done >= args.tokens:
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, required=True, help="training tokens")
    parser.add_argument("--kind", choices=list(KINDS), default="target")
    parser.add_argument(
        "--tokenizer", type=Path, help="take the tokenizer of this model instead of training one"
    )
    parser.add_argument(
        "--teacher", type=Path, help="with --kind hybrid: learn the distributions of this model"
    )
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=8192, help="tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", type=int, help="judge the result by so many held-out functions instead of all"
    )
    parser.add_argument(
        "--float32", dest="bf16", action="store_false", help="no autocast to bfloat16"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.kind != "target" and args.tokenizer is None:
        parser.error(f"--kind {args.kind} needs --tokenizer TARGET, so that all models share it")
    if args.teacher is not None and args.kind != "hybrid":
        parser.error("--teacher is for --kind hybrid alone")

    torch.manual_seed(args.seed)
    train_functions, valid_functions = collect()
    if args.tokenizer is None:
        tokenizer = train_tokenizer(train_functions, args.vocab_size)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    rows, valid = encode(tokenizer, train_functions), encode(tokenizer, valid_functions)
    model = build_model(tokenizer, args.kind)
    predictor = Predictor(model.config) if args.kind == "hybrid" else None
    teacher = None
    if args.teacher is not None:
        teacher = LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.float32)
        print(f"{start_from(model, teacher):,} parameters are the teacher's", flush=True)
    size = sum(p.numel() for module in (model, predictor) if module for p in module.parameters())
    print(
        f"{len(rows):,} functions, {sum(map(len, rows)):,} tokens; {len(valid):,} held out; "
        f"{size:,} parameters"
        f" ({size * 2 / 1e6:.2f} MB in bf16)",
        flush=True,
    )

    def save(facts: dict) -> None:
        rounded: Any = copy.deepcopy(model)
        save_model(rounded.to("cpu", torch.bfloat16), args.out)
        if predictor is not None:
            weights = args.out / "model.safetensors"
            kept = load_file(weights)
            own = {
                f"mtp.{k}": v.to("cpu", torch.bfloat16) for k, v in predictor.state_dict().items()
            }
            save_file({**kept, **own}, weights, {"format": "pt"})
        tokenizer.save_pretrained(args.out)
        (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")

    if args.held_out is not None:
        valid = random.Random(0).sample(valid, args.held_out)
    started = time.monotonic()
    train(model, predictor, teacher, rows, valid, args, save)
    facts = {
        "command": " ".join(sys.argv),
        "tokens": args.tokens,
        "hours": round((time.monotonic() - started) / 3600, 2),
        "held_out_loss": round(held_out_loss(model, valid, PAD, args.device), 4),
        "held_out_loss_bodies": round(
            held_out_loss(model, valid, PAD, args.device, SPECIAL.index("<|assistant|>")), 4
        ),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    facts["held_out_perplexity_bodies"] = round(math.exp(facts["held_out_loss_bodies"]), 2)
    save(facts)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
