"""Sizes that a checkpoint's config and names ask for: what no tensor confirms is refused in one
line, quickly, and before memory of that size is taken."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads.errors import UserError
from tests.helpers import public_blocks as blocks
from tests.helpers.mutations import outcome
from tests.helpers.public_checkpoints import (
    LLAMA,
    Tensors,
    eagle1,
    eagle3,
    read,
    specforge,
    speculators_config,
    store,
)

HUGE = (2**40, 10**9, 2**19)
WRONG = (*HUGE, 0, -1, 10**30, 1.5, float("inf"), "x", True, [2**40], {"x": 2**40})
SECONDS, GROWTH = 5.0, 400 << 20


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def formats() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Config and tensors of every format that is read."""
    drafter, tensors = eagle3()
    found = {
        "eagle1": (LLAMA, eagle1(fc_bias=True)[1]),
        "eagle3": (specforge(), tensors),
        "eagle3 draft vocabulary": (
            specforge(draft_vocab_size=60),
            eagle3("eagle3 draft vocabulary")[1],
        ),
        "speculators eagle3": (speculators_config(drafter), renamed(tensors)),
    }
    for name in ("z-lab", "deepspec", "specforge", "speculators dflash", "speculators dspark"):
        kind, config, more, _ = blocks.READ[name]
        found[f"block {name}"] = (config, blocks.stored(kind)[1] | more)
    return found


FORMATS = formats()


def numbers(table: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every number of a config, in tables and lists too."""
    if isinstance(table, dict | list):
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            yield from numbers(value, (*place, key))
    elif isinstance(table, int | float) and not isinstance(table, bool):
        yield place


def changed(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder: Any = config
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return config


def refusal(folder: Path) -> str | None:
    """The line with which `folder` is refused, None if it is read; neither takes long or much."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = None
    try:
        read(folder)
    except UserError as error:
        line = str(error)
        assert "\n" not in line
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert time.monotonic() - began < SECONDS and grown < GROWTH, (line, grown)
    return line


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")


@pytest.mark.parametrize("count", [30, pytest.param(10**6, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FORMATS)
def test_config_sizes_without_matching_tensors_are_refused(
    name: str, count: int, tmp_path: Path
) -> None:
    """One line, or another reading of what is no size, such as the base of rotary positions."""
    config, tensors = FORMATS[name]
    folder = store(tmp_path / "d", config, tensors, "model.safetensors")
    assert refusal(folder) is None
    places = list(numbers(config))
    others = [(place, value) for place in places for value in WRONG]
    chosen = random.Random(name).sample(others, min(count, len(others)))
    for place, value in [*((place, 2**40) for place in places), *chosen]:
        (folder / "config.json").write_text(json.dumps(changed(config, place, value)))
        line = refusal(folder)
        if place[-1] in SIZES and value in HUGE:
            assert line is not None, (place, value)


NAMES: dict[str, tuple[str, Tensors]] = {
    "rows without columns": ("eagle1", {"fc.weight": torch.ones(2**40, 0)}),
    "a layer of eagle1": ("eagle1", {"layers.99999999.mlp.up_proj.weight": torch.ones(64, 32)}),
    "a layer of eagle3": ("eagle3", {"layers.99999999.mlp.up_proj.weight": torch.ones(64, 32)}),
    "a layer of speculators": (
        "speculators eagle3",
        {"layers.99999999.mlp.up_proj.weight": torch.ones(64, 32)},
    ),
    "a layer of a block": ("block z-lab", {"layers.99999999.x": torch.ones(1)}),
    "a number of many digits": ("eagle3", {f"layers.{'9' * 5000}.x": torch.ones(1)}),
}


@pytest.mark.parametrize("case", NAMES)
def test_tensor_names_implying_missing_layers_are_refused(case: str, tmp_path: Path) -> None:
    name, more = NAMES[case]
    config, tensors = FORMATS[name]
    folder = store(tmp_path / "d", config, tensors | more, "model.safetensors")
    assert refusal(folder) is not None


def test_import_of_inflated_sizes_exits_2_and_writes_nothing(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config, tensors = FORMATS["eagle1"]
    more = {"layers.99999999.mlp.up_proj.weight": torch.ones(64, 32)}
    folder = store(tmp_path / "d", config, tensors | more, "model.safetensors")
    found = outcome(
        ["import", "--from", str(folder), "--target", str(saved_tiny), "--out", str(tmp_path / "i")]
    )
    assert found.wrong() is None and found.code == 2 and found.growth < GROWTH, found
    assert "asks for 100,000,000 layers and holds" in found.errors
    assert not (tmp_path / "i").exists()
