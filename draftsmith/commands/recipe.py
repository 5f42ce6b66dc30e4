"""`draftsmith recipe`: print the configuration of a method for a known target.

`recipes.yaml` has what the recipes of a method share, what those of a target share, and what each
recipe adds. The settings of a recipe win over its target's, and those over its method's.
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ..command_line.help_text import unbroken_pairs, wrapped
from ..heads.errors import UserError
from ..heads.files import whole_file
from ..inference.base.output_paths import check_output
from ..train.methods.registry import MethodName

FILE = Path(__file__).with_name("recipes.yaml")
COLUMNS = 118  # of a comment


@dataclass
class RecipeOptions:
    """Print the configuration of a method for a known target, to start from.

    Without a target all recipes are listed. These recipes are untested; each names the sources of
    its values.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith recipe",
        "draftsmith recipe --method dflash --target qwen3-32b --out dflash-qwen3-32b.yaml",
    )

    method: MethodName = "eagle"
    """Method of the drafter."""
    target: str | None = None
    """Target, by its name on the hub or a short one, such as qwen3-32b."""
    out: str | None = field(default=None, metadata={"form": "FILE"})
    """File to write; the terminal if not given."""


def run(options: RecipeOptions) -> None:
    """Print or write a recipe, or list all of them. Raises `UserError`."""
    if options.target is None:
        print("\n".join(names()))
        return
    text = recipe(options.method, options.target)
    if options.out is None:
        print(text, end="")
    else:
        check_output(options.out, "--out")
        with whole_file(options.out) as file:
            file.write_text(text)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(FILE.read_text())


def names() -> list[str]:
    """Return the names of all recipes, such as eagle/qwen3-32b."""
    return list(_tables()["recipes"])


def recipe(method: str, target: str) -> str:
    """Return a recipe as a YAML file with comments.

    `target` is a name of the table or of the hub, in any case. Raises `UserError` with the nearest
    names if that recipe is unknown.
    """
    tables = _tables()
    short = target.rpartition("/")[2].lower()
    paths = {key: one["path"].rpartition("/")[2].lower() for key, one in tables["targets"].items()}
    key = next((name for name, path in paths.items() if short in (name, path)), short)
    if f"{method}/{key}" not in tables["recipes"]:
        known = [name.partition("/")[2] for name in names() if name.startswith(f"{method}/")]
        near = difflib.get_close_matches(short, known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"there is no {method} recipe for {target}; {hint}there are: {', '.join(known)}"
        )
    parts = tables["methods"][method], tables["targets"][key], tables["recipes"][f"{method}/{key}"]
    config: dict[str, Any] = {
        "out": f"runs/{parts[0]['run']}-{key}",
        "target": {"path": parts[1]["path"]},
    }
    for part in parts:
        _merge(config, part.get("config", {}))
    text = "\n".join([*_comments(parts), yaml.safe_dump(config, sort_keys=False)])
    return text.replace("{target}", parts[1]["path"]).replace("{name}", parts[1]["name"])


def _merge(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set the values of nested tables; null removes a key, and a table that becomes empty."""
    for key, value in changes.items():
        if isinstance(value, dict):
            _merge(config.setdefault(key, {}), value)
            if not config[key]:
                del config[key]
        elif value is None:
            config.pop(key, None)
        else:
            config[key] = value


def _comments(parts: tuple[dict[str, Any], ...]) -> list[str]:
    """Return the comment lines: notes, then the commands to begin with."""
    notes = " ".join(part["notes"] for part in parts if "notes" in part)
    lines = textwrap.wrap(notes, COLUMNS, break_on_hyphens=False, break_long_words=False)
    lines += [part["first"] for part in parts if "first" in part]
    for part in reversed(parts):
        for command in part.get("commands", ()):
            lines += wrapped(unbroken_pairs(command), COLUMNS, "  ", "      ", " \\")
    return [f"# {line}" for line in lines]
