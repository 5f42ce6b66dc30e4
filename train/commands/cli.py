"""The `draftsmith` command: one verb, one module, imported when the verb runs."""

from __future__ import annotations

import difflib
import importlib
import sys
from importlib import metadata

from ..endings import fail, follow_launcher, guarded, is_main_rank, leave, run_command

# Nothing heavy up here: torch takes seconds to import, and Ctrl-C must be answered from the first
# one on.

VERBS = {  # the module of each command, the class of its options, and what it is for
    "data plan": (
        "train.commands.plan",
        "PlanOptions",
        "what a training run will cost, before anything runs",
    ),
    "data extract": (
        "train.data.extract",
        "ExtractOptions",
        "store the target's features, so that training needs no target",
    ),
    "data regenerate": (
        "train.data.regenerate",
        "RegenerateOptions",
        "let the target write the replies of a data set",
    ),
    "export": (
        "train.commands.exporting",
        "ExportOptions",
        "a drafter as a serving engine loads it, with the command that serves it",
    ),
    "import": (
        "train.commands.importing",
        "ImportOptions",
        "a public Medusa, EAGLE, DFlash or DSpark checkpoint becomes a drafter",
    ),
    "evaluate": (
        "inference.evaluation.evaluate",
        "EvaluateOptions",
        "acceptance and speed of drafters on held-out prompts",
    ),
    "compare": (
        "inference.evaluation.compare",
        "CompareOptions",
        "tau before and after by category, from reports of one drafter's lineage",
    ),
    "report": (
        "inference.evaluation.report.report",
        "ReportOptions",
        "evaluations and training runs as one HTML page, or as Markdown tables",
    ),
    "simulate": (
        "inference.evaluation.simulate",
        "SimulateOptions",
        "what an acceptance is worth: tokens a round, best draft length",
    ),
    "tune": (
        "inference.evaluation.tuning.tune",
        "TuneOptions",
        "which tree pays on this machine: measures, searches, writes a profile",
    ),
    "generate": (
        "train.commands.generate",
        "GenerateOptions",
        "decode one prompt and show what was accepted",
    ),
    "doctor": (
        "train.commands.doctor",
        "DoctorOptions",
        "is this machine, target and data fit to run?",
    ),
}

OPTIONS = {"train": "..options", "inference": "...inference.evaluation.options"}


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    run_command(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return
    if argv[0] == "--version":
        print(f"draftsmith {metadata.version('draftsmith')}")
        return
    from ..arguments import parse

    words = 2 if argv[0] == "data" and len(argv) > 1 and not argv[1].startswith("-") else 1
    verb = " ".join(argv[:words])
    if verb == "data" and (len(argv) == 1 or argv[1] in ("-h", "--help")):
        print(_usage("data "))
        return
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        fail(
            f"unknown command {verb!r}; "
            + (f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(VERBS)}")
        )
    name, options_name, _ = VERBS[verb]
    # Options stand in a file that needs no torch: a help text or a mistyped option is answered
    # without it.
    options_module = importlib.import_module(OPTIONS[name.partition(".")[0]], __package__)
    options, _ = parse(getattr(options_module, options_name), argv[words:], f"draftsmith {verb}")
    module = importlib.import_module(f"...{name}", __package__)
    of_module = getattr(module, "if_interrupted", lambda options: "nothing was written")
    resumable = "the same command goes on where it stopped" if words == 2 else of_module(options)
    guarded(lambda: module.run(options), resumable)


def train_main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m draftsmith.train METHOD` and of `accelerate launch -m
    draftsmith.train METHOD`."""
    follow_launcher()
    run_command(_train_main, sys.argv[1:] if argv is None else argv)
    leave()


def _train_main(argv: list[str]) -> None:
    from ..arguments import parse
    from ..method import METHODS, method_module

    if argv[:2] == ["data", "extract"]:  # the one other command that many processes share
        return _main(argv)
    if not argv or argv[0] not in METHODS:
        if argv and argv[0] in ("-h", "--help"):
            print(
                "usage: accelerate launch -m draftsmith.train METHOD --config FILE\n\nmethods: "
                f"{', '.join(METHODS)}"
            )
            return
        fail(f"name a method to train: {', '.join(METHODS)} (or data extract)")
    method = method_module(argv[0])
    run, config_yaml = parse(method.Run, argv[1:], f"draftsmith.train {argv[0]}")

    def start() -> None:
        from ..loop import train

        best = train(run, method, config_yaml)
        if is_main_rank():
            print(f"best drafter: {best}")

    guarded(start, "the same command goes on from the last checkpoint")


def _usage(of: str = "") -> str:
    """What there is; `of`: only commands that begin so."""
    from ..method import METHODS

    width = max(map(len, VERBS))
    verbs = "\n".join(
        f"  {verb:<{width}}  {what}" for verb, (*_, what) in VERBS.items() if verb.startswith(of)
    )
    return (
        "usage: draftsmith COMMAND [--option VALUE ...]\n\n"
        f"commands (each has --help):\n{verbs}\n\n"
        "training is launched, not called:\n  accelerate launch -m draftsmith.train METHOD "
        f"--config FILE  ({', '.join(METHODS)})"
    )
