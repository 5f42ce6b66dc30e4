"""Table of configs/README.md: the figures of `draftsmith data plan` for every printed recipe.

The hub is not asked: targets and siblings are the files of draftsmith/commands/targets/.

    python scripts/recipes.py            # print the table
    python scripts/recipes.py --write    # put it into configs/README.md
"""

from __future__ import annotations

import argparse
import atexit
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from draftsmith.commands.plan import TARGETS, PlanOptions, count, hours, planned
from draftsmith.commands.recipe import names, recipe
from draftsmith.inference.base.console import size
from draftsmith.train.estimate import RunSizes
from draftsmith.train.methods.registry import METHODS

ROOT = Path(__file__).parents[1]
README = ROOT / "configs" / "README.md"
TABLE = re.compile(r"^\| target \| method \| drafter.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)
COLUMNS = (
    "target",
    "method",
    "drafter",
    "features",
    "regenerate",
    "extract",
    "train",
    "target's weights",
    "drafter's state",
    "pass",
)
Plans = dict[Path, tuple[Any, RunSizes, dict[str, float]]]


@cache
def recipes() -> list[Path]:
    """METHOD/TARGET.yaml in a temporary folder for each recipe that `draftsmith recipe` prints, by
    the size of the target, then by method as `METHODS` has them."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-recipes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [folder / f"{name}.yaml" for name in sorted(names(), key=order)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(recipe(path.parent.name, path.stem))
    return paths


def order(name: str) -> tuple[float, str, int]:
    """The place of a recipe, such as eagle/qwen3-32b, in the table."""
    method, target = name.split("/")
    return billions(target), target, [*map(str, METHODS)].index(method)


UNTOLD = {"deepseek-v3": 671.0, "glm-4.5-air": 106.0}
"""Billions of parameters of targets whose names do not tell them."""


def billions(name: str) -> float:
    """The size that a target's name tells."""
    if name in UNTOLD:
        return UNTOLD[name]
    number, unit = re.findall(r"-([\d.]+)([bm])", name)[0]
    return float(number) / (1000 if unit == "m" else 1)


def config_folder(name: str) -> Path:
    """The folder with the config.json of the model that the hub calls `name`."""
    return TARGETS / name.rpartition("/")[2].lower()


def plans() -> Plans:
    """The run, the shape and the plan of every recipe."""
    found: Plans = {}
    for path in recipes():
        run: dict[str, Any] = yaml.safe_load(path.read_text())
        changes = [f"target.path={config_folder(run['target']['path'])}"]
        if smaller := run.get("draft_model", {}).get("path"):
            changes.append(f"draft_model.path={config_folder(smaller)}")
        found[path] = planned(PlanOptions(config=str(path), method=path.parent.name, set=changes))  # type: ignore[arg-type]
    return found


def table(found: Plans) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for path, (_, shape, plan) in found.items():
        method = path.parent.name
        cells = [
            path.stem,
            method,
            count(shape.drafter_params).split()[0],
            size(plan["feature_bytes"]),
        ]
        cells += [
            hours(plan[f"{stage}_gpu_hours"]).split()[0]
            for stage in ("regenerate", "extract", "train")
        ]
        cells += [size(plan[f"{part}_bytes"]) for part in ("target", "drafter", "activation")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the table in configs/README.md"
    )
    write = parser.parse_args().write
    found = table(plans())
    if write:
        README.write_text(TABLE.sub(found, README.read_text()))
    else:
        print(found, end="")


if __name__ == "__main__":
    main()
