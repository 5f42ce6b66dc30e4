"""Write the reference of commands, configuration keys and reports from the types that define them.

python scripts/reference.py        # docs/reference/commands.md, configuration.md and report.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
from msgspec import Struct

from draftsmith.command_line.fields import (
    SHORT_GROUPS,
    Option,
    fields_of,
    item_of,
    joined,
    options_of_class,
    takes,
)
from draftsmith.command_line.help_text import unbroken_pairs, usage_of, wrapped
from draftsmith.commands.cli import VERBS, options_of_verb
from draftsmith.inference.evaluation.results import Report
from draftsmith.train.methods.registry import METHODS, run_class_named

REPORT = """# Keys of a report

<!-- Made by `python scripts/reference.py` from the types in inference/evaluation. -->

`draftsmith evaluate --json FILE` writes one object. Ratios of nothing are `NaN`, what does not
apply is `null`. Every figure can be counted again from `rounds` of each request.
[Metrics](../metrics.md) defines the figures in full.
"""
OTHERS = """
## Other JSON files

**A row of a profile of `draftsmith tune`** has the chosen tree (`kind`, `label`, `setting`,
`measured`), `plain`, `default` and the `finalists` in the same form, and:

- `finalists[].gain`, `gain_interval`: tokens per second over the default's on the prompts that
  trees are chosen on; the intervals of all finalists together err in 5% (`best.level` each).
- `best`: the finalist of the highest `gain`: `label`, `gain`, `gain_interval`, `level`, and, if the
  interval excludes no gain, its gain on the other prompts: `gain_again`, `gain_again_ci95`,
  `prompts_again`.
- `taken`, `reason`: whether the best one replaces the default, and why, in words.
- `gain_over_default`, `gain_ci95`: what the chosen tree gains over the default: `gain_again` and
  its interval if the best was taken, else 1 and null.
- `tried`: for each measurement before the last one its `prompts`, and the `gains` of all candidates
  over the default by their labels.
- `effort`: `prompts` that trees are chosen on, `prompts_again` of the gain, and `max_new_tokens`
  that fitted into the budget.
"""
DEFINITIONS = {
    "tau_incl_bonus": "tokens emitted per round, the target's own included, the prefill's "
    "excluded, pooled over requests",
    "tau_ci95": "95% interval over prompts (the turns of one go together), by the jackknife of "
    "log(tau) with Student's t; not given for fewer than five prompts",
    "tau_by_position": "tau of the rounds whose root is below that position",
    "samples": "the first replies, token by token; came: depth of an accepted draft, 0 the "
    "target's own, -1 the prefill's",
    "rounds": "of each request: [nodes drafted, drafts accepted, tokens emitted] of every round",
    "verify_cost": "a verification over a plain verification; round_cost: a whole round over a "
    "plain round",
    "ttft_s": "time to the first token; tpot: time per later token, of each request; quantiles "
    "over requests, nearest rank",
    "survival": "share of rounds that accepted at least d drafts",
    "cond_accept": "survival at d over survival at d - 1; cond_offered: among the rounds that had "
    "a draft at d",
    "chunk_gap": "seconds between the pieces that a reader of the stream sees: one a round",
    "tokens_s": "tokens of all rounds / their wall time, prefill excluded",
    "speedup_ci95": "over prompts; over batches where several prompts ran together; not given for "
    "fewer than five of them",
    "speedup": "tokens a second over plain decoding's, the same prompts, prefill excluded; where "
    "both wrote the same text, the ratio of the times",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, "
    "traversal, or rrs",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare "
    "distributions only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null "
    "for rules that keep the distribution only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low "
    "precision, others must not",
}
"""Short definitions of the keys of a report whose fields have no docstring."""
JSON = {str: "text", bool: "boolean", int: "integer", float: "number", Mapping: "table"}
JSON |= {dict: "table", type(None): "null"}
NULL = re.compile(r"\bNone\b")
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
COLUMNS = 100
CODE_COLUMNS = 80
MADE = "<!-- Made by `python scripts/reference.py` from the options; change their docstrings. -->"
EXAMPLES = "not run: examples of the help text, with names to fill in"
COMMANDS = f"""# Commands

{MADE}

Every command of `draftsmith`, with all of its options. `draftsmith COMMAND --help` explains the
command's own options, `--help-all` all of them. `draftsmith --version` prints the version.

An option is written `--name VALUE` or `--name=VALUE`. A switch takes no value; `--no-NAME` turns
off one that is on. Numbers may end in K, M, B or T, such as `300M`.

`--config FILE` reads options from a YAML file with the same names; options given after it override
the file. `--print-config` prints all values as such a file, and does nothing else.

A command ends with status 0 if all went well and 2 for a mistake that its one line of error
explains. [Configuration](configuration.md) has the keys of a training run.
"""
CONFIGURATION = f"""# Configuration

{MADE}

Every key of the configuration of a training run. In a YAML file `optim.lr` is the key `lr` of the
table `optim`; on the command line it is `--optim.lr 3e-4`, in Python
`draftsmith.train("eagle", optim={{"lr": 3e-4}})`. Options replace the values of `--config FILE`.
`--print-config` prints the configuration of a run. [Training](../training.md) explains the keys in
their context, [recipes](../../configs/README.md) are files to start from.
"""


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the pages by their names in docs/reference."""
    return {
        "commands.md": commands_page(),
        "configuration.md": configuration_page(),
        "report.md": report_page(),
    }


def commands_page() -> str:
    """Return the page of all commands."""
    lines = [COMMANDS, *training_command()]
    for verb in VERBS:
        lines += ["", f"## {verb}", *command(verb)]
    return "\n".join(lines) + "\n"


def training_command() -> list[str]:
    """Return the lines of `draftsmith train`, whose options are the keys of the other page."""
    lines = ["## train", "", "*Train a drafter*", ""]
    lines += fenced("text", [
        "draftsmith train METHOD --config FILE [--option VALUE ...]",
        "accelerate launch -m draftsmith.train METHOD --config FILE [--option VALUE ...]",
    ])  # fmt: skip
    lines += ["", *folded(
        "The second form trains on several GPUs. The options are the keys of the "
        "[configuration](configuration.md). The methods:"
    ), ""]  # fmt: skip
    for method in METHODS:
        lines += folded(f"- `{method}`: {paragraphs_of(run_class_named(method))[0]}", "  ")
    return lines


def command(verb: str) -> Iterator[str]:
    """Yield the lines of a command below its heading: explanation, examples, options."""
    config_class = options_of_verb(verb)
    for paragraph in paragraphs_of(config_class):
        yield from ["", *folded(paragraph)]
    examples: list[str] = []
    for example in config_class.examples:
        examples += wrapped(unbroken_pairs(example), CODE_COLUMNS, "", "    ", " \\")
    yield from ["", *fenced(f"bash {EXAMPLES}", examples)]
    options = options_of_class(config_class)
    groups = {part.name: part for part in fields_of(config_class) if is_dataclass(part.kind)}
    for name in ("", *groups):
        own = [option for option in options if option.group == name]
        if own and name:
            may = f" `--{name}.X` may be written `--X`." * (name in SHORT_GROUPS)
            yield from ["", *folded(f"`{name}`: {title_of(groups[name])}{may}")]
        yield ""
        for option in own:
            yield from entry(usage_of(option), option, {default_of(option): []})


def configuration_page() -> str:
    """Return the page of all keys: those that all methods share, and those of each one."""
    options: dict[str, dict[str, Option]] = {}
    for method in METHODS:
        for option in options_of_class(run_class_named(method)):
            options.setdefault(option.name, {})[method] = option
    shared = [
        name
        for name, by_method in options.items()
        if len({(str(option.kind), option.text) for option in by_method.values()}) == 1
        and len(by_method) == len(METHODS)
    ]
    lines = [CONFIGURATION, "## All methods"]
    lines += keys_of("medusa", shared, options)
    for method in METHODS:
        own = [name for name in options if method in options[name] and name not in shared]
        lines += ["", f"## {method}", "", *folded(paragraphs_of(run_class_named(method))[0])]
        lines += keys_of(method, own, {name: {method: options[name][method]} for name in own})
    return "\n".join(lines) + "\n"


def keys_of(method: str, names: list[str], options: dict[str, dict[str, Option]]) -> Iterator[str]:
    """Yield the lines of the keys with these names, by their tables."""
    parts = {p.name: p for p in fields_of(run_class_named(method)) if is_dataclass(p.kind)}
    for table in ("", *parts):
        own = [name for name in names if name.rpartition(".")[0] == table]
        if own and table:
            of = f" ({method})" if len(options[own[0]]) == 1 else ""
            yield from ["", f"### {table}{of}"]
            yield from ["", *folded(title_of(parts[table]))]
        if own:
            yield ""
        for name in own:
            yield from key(name, options[name])


def key(name: str, by_method: dict[str, Option]) -> Iterator[str]:
    """Yield the lines of a key, and of the keys of each table in its list."""
    defaults: dict[str, list[str]] = {}
    for method, option in by_method.items():
        defaults.setdefault(default_of(option), []).append(method)
    option = next(iter(by_method.values()))
    yield from entry(name.removesuffix("_"), option, defaults, kind_of(option))
    item = item_of(option.kind)
    for one in options_of_class(item) if item is not None else ():
        yield from entry(f"{name}[].{one.name}", one, {default_of(one): []}, kind_of(one))


def report_page() -> str:
    """Return the page of the keys of a report, by its tables."""
    lines = [REPORT, "## The report", "", *keys_of_table(Report)]
    for path, kind in tables_in(Report):
        lines += ["", f"## `{path}`", "", *folded(NULL.sub("null", paragraphs_of(kind)[0])), ""]
        lines += keys_of_table(kind)
    return "\n".join(lines) + "\n" + OTHERS


def tables_in(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tables that a table of the report holds, with their paths in the JSON."""
    for name, field in get_type_hints(kind).items():
        for table in filter(is_table, parts_of(field)):
            many = {list: "[]", dict: ".NAME"}
            end = next((many[part] for part in parts_of(field) if part in many), "")
            here = f"{path}.{name}{end}".removeprefix(".")
            yield here, table
            yield from tables_in(table, here)


def keys_of_table(kind: Any) -> Iterator[str]:
    """Yield the lines of the keys of a table; those without a text are defined in the metrics."""
    tables = [base for base in reversed(kind.__mro__) if is_table(base)]
    found = [one for table in tables for one in docstring_parser.parse_from_object(table).params]
    texts = {one.arg_name: " ".join((one.description or "").split()) for one in found}
    hints = get_type_hints(kind)
    elsewhere = []
    for name in kind.__struct_fields__:
        inner = [paragraphs_of(part)[0] for part in parts_of(hints[name]) if is_table(part)]
        text = next(filter(None, (texts.get(name), DEFINITIONS.get(name), *inner)), "")
        if text:
            text = NULL.sub("null", capital(text).removesuffix("."))
            yield from folded(f"- `{name}` ({json_of(hints[name])}): {text}.", "  ")
        else:
            elsewhere.append(f"`{name}`")
    if elsewhere:
        yield from folded(f"- {joined(elsewhere)}: as in [metrics](../metrics.md).", "  ")


def parts_of(kind: Any) -> list[Any]:
    """Return a type and the types in it: `list`, `int` of `list[int]`."""
    origin, inner = get_origin(kind), get_args(kind)
    return [origin or kind, *(part for one in inner for part in parts_of(one))]


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def json_of(kind: Any) -> str:
    """Return the JSON types of a key in words."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    return joined(dict.fromkeys(word_of(get_origin(one) or one) for one in kinds), "or")


def word_of(kind: Any) -> str:
    """Return the JSON type of a class in a word; the other ones are sequences."""
    return "table" if is_table(kind) else JSON.get(kind, "list")


def entry(name: str, option: Option, defaults: dict[str, list[str]], kind: str = "") -> list[str]:
    """Return the lines of an option: `name` (its type, its default): its explanation."""
    facts = [kind] if kind else []
    usual = max(defaults, key=lambda one: len(defaults[one]))
    others = [one for one in defaults if one != usual]
    facts.append(usual)
    facts += [f"{one.removeprefix('default ')} for {joined(defaults[one])}" for one in others]
    text = option.text
    if not kind and option.kind is bool:  # a switch; one that is on is listed as --no-...
        facts = []
        text = f"Do not {text[:1].lower()}{text[1:]}" if option.default else text
    told = f" ({', '.join(facts)})" if facts else ""
    return folded(f"- `{name}`{told}: {text}", "  ")


def default_of(option: Option) -> str:
    """Return the default of an option as a reader types it."""
    value = option.default
    if value is MISSING:
        return "required"
    if value is None or value in ("", [], {}, ()):
        return "none by default"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if isinstance(value, float):
        value = f"{value:g}".replace("e+0", "e").replace("e-0", "e-")
    return f"default {value}"


def kind_of(option: Option) -> str:
    """Return the type of a key in words."""
    return takes(option.kind, option.name)


def title_of(part: Option) -> str:
    """Return what a table of options is about."""
    return part.text or paragraphs_of(part.kind)[0]


def paragraphs_of(config_class: Any) -> list[str]:
    """Return the paragraphs of a docstring, each in one line."""
    return [" ".join(text.split()) for text in (config_class.__doc__ or "").split("\n\n")]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def folded(text: str, later: str = "") -> list[str]:
    """Return the lines of a text; a piece of code between backticks is not broken."""
    return wrapped(text, COLUMNS, "", later)


def fenced(info: str, lines: Iterable[str]) -> list[str]:
    return [f"```{info}", *lines, "```"]


if __name__ == "__main__":
    main()
