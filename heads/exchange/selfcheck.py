"""Self-check of an export: it is read back from its files alone and compared with the drafter.

Engines load a wrong export without a message. Where `fc.weight` or a norm is missing, two of them
raise nothing, and the drafter loses most of its acceptance; the text stays correct, so nobody
notices. An export is therefore checked before it is renamed to the place where a user finds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..artifact import Artifact
from ..draft_model import DraftModel
from ..embedding_and_head import EmbeddingAndHead
from ..errors import UserError
from ..files import JsonObject, read_json
from ..fingerprint import Fingerprint
from ..layout import place, stored_as
from .exports import Recipe, kind_of, vllm_guess
from .foreign import Answers, TargetSide
from .layouts import BLOCKS, ExportRequest, sglang_taps
from .public import read_public

BORROWED = (
    "embedding_and_head",
    "target_head",
)  # attributes in which drafters keep functions of their target
LENGTH = 12  # positions of the forward pass that is compared


def check_name(out: str, artifact: Artifact) -> None:
    """Raise `UserError` if vLLM would guess another method than the drafter's from the name."""
    kind = kind_of(artifact.drafter)
    if (guess := vllm_guess(out, kind)) is not None:
        raise UserError(
            f"a folder called {Path(out).name} would be taken for method {guess!r} by vLLM where "
            f"none is given; call it {kind.replace('_', '-')}-something"
        )


def check_export(
    folder: Path,
    artifact: Artifact,
    order: ExportRequest,
    recipe: Recipe,
    head: Tensor | None = None,
) -> None:
    """Read `folder` back and raise `UserError` unless it holds the drafter of `artifact`.

    `head` `[V, H]` is the target's output matrix, which one layout stores.
    """
    config = read_json(folder / "config.json")
    # transformers writes the config of a draft model, with nulls that its readers understand.
    if artifact.method != "draft_model":
        null = next(nulls(config), None)
        if null is not None:
            _fail(f"config.json has no value for {null}")
    _check_taps(config, artifact, order)
    loaded = load_back(folder, artifact, order, recipe, head)
    _check_equal(loaded, artifact.drafter, order.dtype)


def nulls(config: object, path: str = "") -> Iterator[str]:
    """Yield the names of keys without a value, at any depth, with `path` before them.

    Some engines fail on `target_hidden_size: null`.
    """
    for key, value in config.items() if isinstance(config, dict) else ():
        if value is None:
            yield f"{path}{key}"
        yield from nulls(value, f"{path}{key}.")


def load_back(
    folder: Path, artifact: Artifact, order: ExportRequest, recipe: Recipe, head: Tensor | None
) -> Any:
    """Return the drafter that is built from the files in `folder` alone.

    Raises `UserError` if they are recognised as another layout, leave anything open, or give other
    sizes or flags than the drafter of `artifact` has.
    """
    trained_for = artifact.fingerprint
    if artifact.method == "draft_model":
        embedding_and_head = EmbeddingAndHead(
            embed, lambda last: last, trained_for.vocab_size, artifact.drafter.tokenizer
        )
        return DraftModel.load(folder, order.dtype, embedding_and_head)
    loaded = read_public(folder, replace(side_of(trained_for), head=head), Answers(ours=True))
    kind = kind_of(artifact.drafter)
    # The reader's name of the layout begins with this; native layouts are called after the kind.
    family = {"speculators": "speculators", "sglang-eagle1": "eagle1"}.get(recipe.layout, kind)
    if not loaded.layout.startswith(family) or kind_of(loaded.drafter) != kind:
        _fail(f"it is taken for {loaded.layout}, not for {family}")
    if loaded.notes:
        _fail(loaded.notes[0])
    loaded_facts, facts = loaded.drafter.facts(), artifact.drafter.facts()
    if loaded_facts != facts:
        # There is one: both have the same keys, being of one class.
        name = next(name for name in facts if loaded_facts[name] != facts[name])
        _fail(f"{name} is {facts[name]} in the drafter and reads as {loaded_facts[name]}")
    return loaded.drafter


def side_of(target: Fingerprint) -> TargetSide:
    """Return a target's sizes with a stand-in for its embedding and its head.

    They replace a target that is not loaded: any functions show if two drafters compute the same.
    The embedding gives each id another row, and the head is the identity, so that every element of
    a drafter's state is compared.
    """
    hidden_size = target.hidden_size

    def stand_in(ids: Tensor) -> Tensor:
        # A sine of token times number: bounded, different for each pair, and made without a table.
        return torch.sin(ids[..., None] * torch.arange(1, hidden_size + 1) * 0.37)

    return TargetSide(
        target.num_layers,
        hidden_size,
        target.vocab_size,
        EmbeddingAndHead(
            stand_in,
            lambda last: last,
            target.vocab_size,
            part=lambda ids: lambda last: last,
        ),
    )


def embed(ids: Tensor) -> Tensor:
    """Raise `AssertionError`: the stand-in for an embedding that a draft model must not use."""
    raise AssertionError("a draft model has its own embedding")


@torch.no_grad()
def _check_equal(loaded: Any, live: Any, dtype: torch.dtype) -> None:
    """Raise `UserError` unless both have equal tensors, bit for bit, and compute equal logits.

    `loaded` was read back; `live` is the drafter before it was cast to `dtype`. The logits are
    those of one forward pass in float32.
    """
    # The memo of `deepcopy` makes it keep the target's parts as they are: they may be large, and
    # are replaced below.
    borrowed = [vars(live).get(name) for name in BORROWED]
    as_stored = copy.deepcopy(live, {id(value): value for value in borrowed})
    place(as_stored, torch.device("cpu"), dtype)
    live_state, loaded_state = dict(as_stored.state_dict()), dict(loaded.state_dict())
    if live_state.keys() != loaded_state.keys():
        _fail(f"{sorted(live_state.keys() ^ loaded_state.keys())[0]} is missing or surplus")
    for name, tensor in live_state.items():
        if tensor.to(stored_as(tensor, dtype)).ne(loaded_state[name]).any():
            _fail(f"{name} reads back as other numbers")
    # Both get the same stand-ins for the target's parts, so any difference is the drafter's own.
    for name in BORROWED:
        if name in vars(loaded):
            vars(as_stored)[name] = vars(loaded)[name]
    for module in (as_stored, loaded):
        place(module, torch.device("cpu"), torch.float32)
    if not torch.equal(outputs(as_stored), outputs(loaded)):
        _fail("the drafter and what reads back compute different logits")


def outputs(drafter: Any) -> Tensor:
    """Return the drafter's logits of `LENGTH` positions with random inputs, the same in every call.

    Those of EAGLE are computed after a second step on its own states, so that the recycled state is
    compared too. For a block drafter see `block_outputs`.
    """
    # A generator of its own, so that the caller's random state is not changed.
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if drafter.method == "medusa":
        return drafter(normal(1, LENGTH, drafter.hidden_size))
    vocab = drafter.vocab_size if drafter.method == "draft_model" else drafter.shape.vocab_size
    ids = torch.randint(0, vocab, (1, LENGTH), generator=generator)
    if drafter.method == "draft_model":
        return drafter.model(ids).logits
    if drafter.method in BLOCKS:
        return block_outputs(drafter, normal, ids)
    feature_size, positions = drafter.shape.target_hidden_size, torch.arange(LENGTH)[None]
    taps = tuple(normal(1, LENGTH, feature_size) for _ in drafter.taps)
    state = drafter.fuse(taps, normal(1, LENGTH, feature_size))

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(2)

    # The first step reads fused features, the second the drafter's own state one position on.
    for step in range(2):
        output = drafter.advance(
            drafter.token_part(ids), state, drafter.rotary(positions + step), attend
        )
        state = drafter.recycled(output)
    return drafter.logits(output)


def block_outputs(drafter: Any, normal: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """Return what a block drafter computes for the block at the last of `ids` `[1, S]`.

    The logits of the slots; for DSpark they are joined, on the last axis, with what the transition
    adds for arbitrary tokens and with the logit of the confidence. `normal` makes random features
    of a given shape.
    """
    shape, anchor, context_size = drafter.shape, ids[:, -1:], ids.shape[1] - 1
    # The context ends before the anchor, on which the target was not run yet.
    taps = tuple(normal(1, context_size, shape.hidden_size) for _ in drafter.taps)
    context = drafter.context(drafter.fuse(taps), drafter.rotary(torch.arange(context_size)[None]))
    positions = torch.arange(context_size, context_size + shape.block_size)[None]
    rotary = drafter.rotary(positions)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context_keys, context_values = context[layer]
        keys = torch.cat([context_keys, keys], dim=1)
        values = torch.cat([context_values, values], dim=1)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        # No mask: a slot sees all of the context and all slots of its block.
        attended = functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)

    state = drafter.embed(anchor)
    for layer in range(shape.num_layers):
        state = drafter.layer(layer, state, rotary, attend)
    if drafter.method == "dflash":
        return drafter.base_logits(state)
    # The token before each draft: any will do.
    tokens = torch.arange(shape.block_size)[None] % shape.vocab_size
    confidence = drafter.confidence(drafter.state(state, tokens))[..., None]
    return torch.cat([drafter.base_logits(state), drafter.transition(tokens), confidence], dim=-1)


def _check_taps(config: JsonObject, artifact: Artifact, order: ExportRequest) -> None:
    """Raise `UserError` unless each key that names taps has them in its readers' unit."""
    kind = kind_of(artifact.drafter)
    if kind in BLOCKS:
        return _check_block_taps(config, list(artifact.drafter.taps), kind)
    if kind != "eagle3":
        return
    taps, key = list(artifact.drafter.taps), "eagle_aux_hidden_state_layer_ids"
    if config.get(key) != taps:
        _fail(f"config.json has taps {config.get(key)}, the drafter {taps}")
    # SGLang reads the nested taps of some families in another unit.
    family = artifact.fingerprint.model_type if order.engine == "sglang" else ""
    if "eagle_config" in config and config["eagle_config"].get(key) != sglang_taps(taps, family):
        _fail(f"eagle_config has taps {config['eagle_config'].get(key)}, the drafter {taps}")


def _check_block_taps(config: JsonObject, taps: list[int], kind: str) -> None:
    """Raise `UserError` unless the config of a block drafter names these taps.

    The speculators layout holds indices of hidden states. The native one holds layers from 0: where
    DFlash's readers look, and for DSpark also at the top, where its readers look.
    """
    layers = [tap - 1 for tap in taps]
    spellings = [("aux_hidden_state_layer_ids", config, taps)]
    if "transformer_layer_config" not in config:
        spellings = [("target_layer_ids", config.get("dflash_config", {}), layers)]
        if kind == "dspark":
            spellings.append(("target_layer_ids", config, layers))
    for key, table, expected in spellings:
        if table.get(key) != expected:
            _fail(f"config.json has {key} {table.get(key)} for the drafter's taps {taps}")


def _fail(reason: str) -> None:
    raise UserError(
        f"the export does not read back as the drafter, so nothing was written: {reason}; please "
        "report this"
    )
