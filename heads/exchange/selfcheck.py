"""What has to hold of an export before it stands where a person finds it: engines load a wrong one
without a word.

Dropping `fc.weight`, or one norm, costs a head most of its acceptance and raises nothing in two
engines; the text stays right, so nobody notices. Hence everything is read back from the files alone
and held against the drafter.
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
from ..files import read_json
from ..fingerprint import Fingerprint
from ..layout import place, stored_as
from .exports import BLOCKS, ExportRequest, Recipe, kind_of, sglang_taps, vllm_guess
from .foreign import Answers, TargetSide
from .public import read_public

BORROWED = ("embedding_and_head", "target_head")  # attributes of drafters
LENGTH = 12  # positions of the forward that is compared


def check_name(out: str, artifact: Artifact) -> None:
    """Demand a folder's name from which vLLM does not take another method. Raises `UserError`."""
    kind = kind_of(artifact.drafter)
    if (guess := vllm_guess(out, kind)) is not None:
        raise UserError(
            f"a folder called {Path(out).name} would be taken for method {guess!r} by vLLM where "
            "none is given; call it "
            f"{kind.replace('_', '-')}-something"
        )


def check_export(
    folder: Path,
    artifact: Artifact,
    order: ExportRequest,
    recipe: Recipe,
    head: Tensor | None = None,
) -> None:
    """Read `folder` back and demand that it is `artifact`'s drafter. Raises `UserError`."""
    config = read_json(folder / "config.json")
    if artifact.method != "draft_model" and (null := next(nulls(config), None)) is not None:
        _fail(f"config.json has no value for {null}")
    _check_taps(config, artifact, order)
    loaded = load_back(folder, artifact, order, recipe, head)
    _check_equal(loaded, artifact.drafter, order.dtype)


def nulls(config: Any, path: str = "") -> Iterator[str]:
    """Names of keys without a value, at any depth: some engines fail on `target_hidden_size:
    null`."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if value is None:
            yield f"{path}{key}"
        yield from nulls(value, f"{path}{key}.")


def load_back(
    folder: Path, artifact: Artifact, order: ExportRequest, recipe: Recipe, head: Tensor | None
) -> Any:
    """The drafter that stands in `folder`, built from what stands there alone."""
    trained_for = artifact.fingerprint
    if artifact.method == "draft_model":
        embedding_and_head = EmbeddingAndHead(
            embed, lambda last: last, trained_for.vocab_size, artifact.drafter.tokenizer
        )
        return DraftModel.load(folder, order.dtype, embedding_and_head)
    found = read_public(folder, replace(side_of(trained_for), head=head), Answers(ours=True))
    family = {"speculators": "speculators", "sglang-eagle1": "eagle1"}.get(
        recipe.layout, kind_of(artifact.drafter)
    )
    if not found.layout.startswith(family) or kind_of(found.drafter) != kind_of(artifact.drafter):
        _fail(f"it is taken for {found.layout}, not for {family}")
    if found.notes:
        _fail(found.notes[0])
    if found.drafter.facts() != artifact.drafter.facts():
        theirs, ours = found.drafter.facts(), artifact.drafter.facts()
        name = next(name for name in ours if theirs[name] != ours[name])
        _fail(f"{name} is {ours[name]} in the drafter and reads as {theirs[name]}")
    return found.drafter


def side_of(target: Fingerprint) -> TargetSide:
    """A target's sizes with ends that are made up: any will do to see whether two drafters do the
    same."""
    wide = target.hidden_size

    def made_up(ids: Tensor) -> Tensor:
        return torch.sin(ids[..., None] * torch.arange(1, wide + 1) * 0.37)

    return TargetSide(
        target.num_layers,
        wide,
        target.vocab_size,
        EmbeddingAndHead(made_up, lambda last: last, target.vocab_size),
    )


def embed(ids: Tensor) -> Tensor:
    raise AssertionError("a draft model has its own embedding")


@torch.no_grad()
def _check_equal(loaded: Any, live: Any, dtype: torch.dtype) -> None:
    """Demand the same tensors, bit for bit, and the same forward in fp32."""
    borrowed = [vars(live).get(name) for name in BORROWED]  # of a target, which is not to be copied
    as_stored = copy.deepcopy(live, {id(part): part for part in borrowed})
    place(as_stored, torch.device("cpu"), dtype)
    ours, theirs = dict(as_stored.state_dict()), dict(loaded.state_dict())
    if ours.keys() != theirs.keys():
        _fail(f"{sorted(ours.keys() ^ theirs.keys())[0]} is missing or surplus")
    for name, tensor in ours.items():
        if tensor.to(stored_as(tensor, dtype)).ne(theirs[name]).any():
            _fail(f"{name} reads back as other numbers")
    vars(as_stored).update({name: part for name, part in vars(loaded).items() if name in BORROWED})
    for module in (as_stored, loaded):
        place(module, torch.device("cpu"), torch.float32)
    if not torch.equal(outputs(as_stored), outputs(loaded)):
        _fail("the drafter and what reads back compute different logits")


def outputs(drafter: Any) -> Tensor:
    """Logits of a few positions that are made up, the same every time; of EAGLE after a second step
    on its own states."""
    chance = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=chance)

    if drafter.method == "medusa":
        return drafter(normal(1, LENGTH, drafter.hidden_size))
    vocab = drafter.vocab_size if drafter.method == "draft_model" else drafter.shape.vocab_size
    ids = torch.randint(0, vocab, (1, LENGTH), generator=chance)
    if drafter.method == "draft_model":
        return drafter.model(ids).logits
    if drafter.method in BLOCKS:
        return block_outputs(drafter, normal, ids)
    wide, places = drafter.shape.target_hidden_size, torch.arange(LENGTH)[None]
    state = drafter.fuse(
        tuple(normal(1, LENGTH, wide) for _ in drafter.taps), normal(1, LENGTH, wide)
    )

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        found = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(2)

    for step in range(2):
        output = drafter.advance(
            drafter.token_part(ids), state, drafter.rotary(places + step), attend
        )
        state = drafter.recycled(output)
    return drafter.logits(output)


def block_outputs(drafter: Any, normal: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """The same of the block at the last of `ids` `[1, S]`: logits, and the confidence head's input
    for each draft's chances."""
    shape, anchor, before = drafter.shape, ids[:, -1:], ids.shape[1] - 1
    taps = tuple(normal(1, before, shape.hidden_size) for _ in drafter.taps)
    context = drafter.context(drafter.fuse(taps), drafter.rotary(torch.arange(before)[None]))
    rotary = drafter.rotary(torch.arange(before, before + shape.block_size)[None])

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        old = context[layer]
        keys, values = torch.cat([old[0], keys], dim=1), torch.cat([old[1], values], dim=1)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        return (
            functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    state = drafter.embed(anchor)
    for layer in range(shape.num_layers):
        state = drafter.layer(layer, state, rotary, attend)
    if drafter.method == "dflash":
        return drafter.base_logits(state)
    # before each draft; any will do
    tokens = torch.arange(shape.block_size)[None] % shape.vocab_size
    sure = drafter.confidence(drafter.state(state, tokens))[..., None]
    return torch.cat([drafter.base_logits(state), drafter.transition(tokens), sure], dim=-1)


def _check_taps(config: dict[str, Any], artifact: Artifact, order: ExportRequest) -> None:
    """Demand both spellings of the taps, in the units that are read."""
    kind = kind_of(artifact.drafter)
    if kind in BLOCKS:
        return _check_block_taps(config, list(artifact.drafter.taps), kind)
    if kind != "eagle3":
        return
    taps, key = list(artifact.drafter.taps), "eagle_aux_hidden_state_layer_ids"
    if config.get(key) != taps:
        _fail(f"config.json has taps {config.get(key)}, the drafter {taps}")
    family = artifact.fingerprint.model_type if order.engine == "sglang" else ""
    if "eagle_config" in config and config["eagle_config"].get(key) != sglang_taps(taps, family):
        _fail(f"eagle_config has taps {config['eagle_config'].get(key)}, the drafter {taps}")


def _check_block_taps(config: dict[str, Any], taps: list[int], kind: str) -> None:
    """The layout of speculators counts states; the plain one layers from 0, where DSpark's readers
    look and where DFlash's do."""
    layers = [tap - 1 for tap in taps]
    spellings = [("aux_hidden_state_layer_ids", config, taps)]
    if "transformer_layer_config" not in config:
        spellings = [("target_layer_ids", config.get("dflash_config", {}), layers)]
        spellings += [("target_layer_ids", config, layers)] if kind == "dspark" else []
    for key, where, expected in spellings:
        if where.get(key) != expected:
            _fail(f"config.json has {key} {where.get(key)} for the drafter's taps {taps}")


def _fail(reason: str) -> None:
    raise UserError(
        f"the export does not read back as the drafter, so nothing was written: {reason}; please "
        "report this"
    )
