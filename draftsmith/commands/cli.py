"""`draftsmith` command line: reads the options of the command that was named, and runs it."""

from __future__ import annotations

import difflib
import importlib
import shlex
import shutil
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_line.fields import former_names
from ..command_line.help_text import wrapped
from ..command_line.process import (
    exit_on_error,
    fail,
    follow_launcher,
    is_main_rank,
    leave,
    run_command,
)
from ..heads.errors import UserError
from .threads import choose_threads

if TYPE_CHECKING:
    from ..command_line.parse import OptionValues
    from ..train.config import RunConfig

VERBS = {
    "recipe": "commands.recipe",
    "data plan": "commands.plan",
    "data extract": "commands.extract",
    "data regenerate": "commands.regenerate",
    "data split": "commands.split",
    "export": "commands.exporting",
    "import": "commands.importing",
    "evaluate": "inference.evaluation.evaluate",
    "compare": "inference.evaluation.compare",
    "report": "inference.evaluation.report.command",
    "simulate": "inference.evaluation.simulate",
    "tune": "inference.evaluation.tune",
    "generate": "commands.generate",
    "serve": "inference.serving.serve",
    "mtp extract": "commands.mtp",
    "mtp stitch": "commands.mtp",
    "doctor": "commands.doctor",
}
"""The module of each command. It has `run(options)`, and may have `if_interrupted(options)`, which
returns the line for a user who stopped it. `options_of_verb` says where its options are."""
# First words of the commands whose names have two.
GROUPS = {"data": "prepare data", "mtp": "layers for drafts that come with a target"}
# The usual steps from a target to a served drafter, in order.
USUAL_STEPS = {
    "data regenerate": "generate the training replies with the target",
    "train METHOD": "train a drafter (on several GPUs: accelerate launch -m draftsmith.train)",
    "evaluate": "measure it on held-out prompts, compared with plain decoding",
    "generate": "inspect a reply and its accepted drafts",
    "export": "export it for vLLM, SGLang, TensorRT-LLM, llama.cpp, TGI or transformers",
}
OTHER_COMMANDS = {
    "chat": ["serve"], "bench": ["evaluate"], "benchmark": ["evaluate"],
    "version": ["--version"], "convert": ["import", "export"], "run": ["generate"],
}  # fmt: skip
"""Commands of other tools, and ours for the same."""

# Nothing that imports torch may be here or at the top of a command's module: that takes seconds, a
# help text needs none of it, and Ctrl-C must be handled from the first moment on.


def main(argv: list[str] | None = None) -> None:
    """Run the console script `draftsmith`."""
    run_command(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> None:
    """Run one command, or print a usage text; status 2 for an unknown command or option."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return
    if argv[0] == "--version":
        print(f"draftsmith {metadata.version('draftsmith')}")
        return
    if argv[0] == "train":
        _train_main(argv[1:], "draftsmith train")
        return
    from ..command_line.parse import parse

    verb_words = 2 if argv[0] in GROUPS and len(argv) > 1 and not argv[1].startswith("-") else 1
    verb = " ".join(argv[:verb_words])
    if verb in GROUPS and (len(argv) == 1 or argv[1] in ("-h", "--help")):
        print(_usage(f"{verb} "))
        return
    if verb not in VERBS:
        if (instead := former_names()["commands"].get(verb)) is not None:
            fail(f"there is no command {verb!r} any more: {instead}")
        fail(f"unknown command {verb!r}; {hint_for(verb)}")
    options = parse(options_of_verb(verb), argv[verb_words:], f"draftsmith {verb}")
    choose_threads(options)
    module = importlib.import_module(f"..{VERBS[verb]}", __package__)

    def if_interrupted() -> str:
        if verb in ("data extract", "data regenerate"):
            return "the same command continues where it stopped"
        if hasattr(module, "if_interrupted"):
            return module.if_interrupted(options)
        return "nothing was written"

    exit_on_error(lambda: module.run(options), if_interrupted)


def options_of_verb(verb: str) -> Any:
    """Return the dataclass of a command's options, such as `ExportOptions`; torch is not imported.

    A command of this package has it in its module, one of `inference/evaluation` or
    `inference/serving` in `options.py` of that folder.
    """
    module = VERBS[verb]
    if not module.startswith("commands."):
        module = f"{'.'.join(module.split('.')[:2])}.options"
    name = f"{verb.rpartition(' ')[2].title()}Options"
    return getattr(importlib.import_module(f"..{module}", __package__), name)


def hint_for(word: str) -> str:
    """Return what a user may have meant by an unknown command, or all commands.

    Candidates are commands, the last word of one, methods, and names of commands in other tools.
    """
    from ..train.methods.registry import METHODS

    known = [*VERBS, "train"]
    meant = {verb: [verb] for verb in known} | {name: [f"train {name}"] for name in METHODS}
    for verb in VERBS:
        meant.setdefault(verb.rpartition(" ")[2], []).append(verb)
    meant |= OTHER_COMMANDS
    if close := difflib.get_close_matches(word, meant, n=1):
        return f"did you mean {' or '.join(map(repr, dict.fromkeys(meant[close[0]])))}?"
    return f"there are: {', '.join(known)}"


def train_main(argv: list[str] | None = None) -> None:
    """Run `python -m draftsmith.train METHOD`, alone or under `accelerate launch`."""
    follow_launcher()
    run_command(_train_main, sys.argv[1:] if argv is None else argv)
    leave()


def _train_main(argv: list[str], prog: str = "accelerate launch -m draftsmith.train") -> None:
    """Train with the method that is named. Exits with status 2 for an unknown method or option."""
    from ..command_line.parse import parse
    from ..train.methods.registry import METHODS, run_class_named

    # The one command besides training that many processes share, so it is launched like training.
    if argv[:2] == ["data", "extract"]:
        return _main(argv)
    method, methods = argv[0] if argv else "", ", ".join(METHODS)
    if method in ("-h", "--help", "--help-all"):
        width = max(map(len, METHODS))
        lines = [f"usage: {prog} METHOD --config FILE [--option VALUE ...]", "", "methods:"]
        for name in METHODS:
            what = (run_class_named(name).__doc__ or "").splitlines()[0].removesuffix(".")
            lines.append(_folded(f"  {name:<{width}}  ", what))
        own = "module:Class is a method of your own (docs/your-own-drafter.md)."
        print("\n".join([*lines, "", f"{prog} METHOD --help-all explains every option.", own]))
        return
    if method not in METHODS and ":" not in method:
        close = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        unknown = f"unknown method {method!r}; " if method else ""
        fail(f"{unknown}name a method to train: {methods}, or module:Class of your own{hint}")

    run = parse(run_class_named(method), argv[1:], f"{prog} {method}", partial(_resolved, method))
    choose_threads(run, training=True)

    def start() -> None:
        # Imported under `exit_on_error`, so that an interrupt during the import ends in one line.
        from ..train.loop import train
        from ..train.methods.registry import method_named

        best = train(run, method_named(method))
        if is_main_rank():
            print_summary(best, run, method)

    def if_interrupted() -> str:
        if any(Path(run.out, "checkpoints").glob("step-*")):
            return "the same command continues from the last checkpoint"
        return "no checkpoint was written yet; the same command starts over"

    exit_on_error(start, if_interrupted)


def _resolved(method: str, values: OptionValues[RunConfig]) -> str:
    """Return the config file of a run with what its target determines, or else as it was given.

    A comment says why it is not resolved. What only the data determine is null.
    """
    from ..command_line.parse import as_given
    from ..train.methods.registry import method_named
    from ..train.outline import target_of_run

    try:
        values.check_complete()
        run = values.made()
        method_named(method).resolve(run, target_of_run(run))
    except UserError as error:
        return f"# Not resolved: {error}.\n{as_given(values)}"
    return run.as_yaml()


def print_summary(best: Path, run: RunConfig, method: str) -> None:
    """Print the best drafter of a run, what it gained, and the command that measures it."""
    from ..inference.base.console import OutputConsole, warn
    from ..inference.targets.target_files import names_a_folder
    from ..train.reporting import summary

    print(f"best drafter: {best}")
    step = best.resolve().parent.name.removeprefix("step-")
    try:
        OutputConsole().print(summary(best.parent, int(step)))
    except UserError as error:  # the run has ended well all the same
        warn(f"no table of the run: {error}")
    print(
        "this tau is of the held-out prompts on which the checkpoint and its calibration were "
        "chosen; quote tau from other prompts:"
    )
    # A run from a feature store does not read its target, which may be on another machine.
    target = run.target.path
    there = not names_a_folder(target) or Path(target).is_dir()
    words = ["draftsmith", "evaluate", "--target", target if there else "TARGET"]
    if run.target.adapter is not None:
        words += ["--target.adapter", run.target.adapter]
    if run.target.dtype != "auto":
        words += ["--dtype", run.target.dtype]
    words += ["--drafter", f"{method}:folder={best}" if ":" in method else str(best)]
    print(f"next: {shlex.join(words)} --prompts FILE")


def _usage(of: str = "") -> str:
    """Return the usage text, with the commands whose names begin with `of`."""
    from ..train.methods.registry import METHODS

    width = max(map(len, VERBS))
    lines = ["usage: draftsmith COMMAND [--option VALUE ...]", ""]
    if not of:
        lines.append("the usual steps, in order:")
        for number, (verb, what) in enumerate(USUAL_STEPS.items(), 1):
            lines.append(_folded(f"  {number}. {verb:<{width}}  ", what))
        lines += ["", "all other commands (each has --help):"]
    for verb in VERBS:
        if verb.startswith(of) and (of or verb not in USUAL_STEPS):
            what = (options_of_verb(verb).__doc__ or "").partition("\n")[0].removesuffix(".")
            lines.append(_folded(f"  {verb:<{width}}  ", what))
    if not of:
        methods = f"{', '.join(METHODS)}; configs/README.md helps to choose"
        lines += ["", _folded("methods: ", methods)]
    return "\n".join(lines)


def _folded(head: str, text: str) -> str:
    """Return `head` and `text`, whose further lines are under its first one."""
    columns = max(shutil.get_terminal_size().columns, 60)
    return "\n".join(wrapped(text, columns, head, " " * len(head)))
