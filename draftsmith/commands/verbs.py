"""Commands of `draftsmith`: their modules and their options."""

from __future__ import annotations

import importlib
from typing import Any

VERBS = {
    "recipe": ("commands.recipe", "commands.options.RecipeOptions"),
    "data plan": ("commands.plan", "commands.plan_options.PlanOptions"),
    "data extract": ("commands.extract", "commands.options.ExtractOptions"),
    "data regenerate": ("commands.regenerate", "commands.options.RegenerateOptions"),
    "data split": ("commands.split", "commands.options.SplitOptions"),
    "export": ("commands.exporting", "commands.options.ExportOptions"),
    "import": ("commands.importing", "commands.options.ImportOptions"),
    "evaluate": ("inference.evaluation.evaluate", "inference.evaluation.options.EvaluateOptions"),
    "compare": ("inference.evaluation.compare", "inference.evaluation.options.CompareOptions"),
    "report": (
        "inference.evaluation.report.command",
        "inference.evaluation.options.ReportOptions",
    ),
    "simulate": ("inference.evaluation.simulate", "inference.evaluation.options.SimulateOptions"),
    "tune": ("inference.evaluation.tuning.tune", "inference.evaluation.options.TuneOptions"),
    "generate": ("commands.generate", "commands.options.GenerateOptions"),
    "serve": ("inference.serving.serve", "inference.serving.options.ServeOptions"),
    "mtp extract": ("commands.mtp", "commands.options.ExtractLayerOptions"),
    "mtp stitch": ("commands.mtp", "commands.options.StitchOptions"),
    "doctor": ("commands.doctor", "commands.options.DoctorOptions"),
}
"""The module of each command, and the dataclass of its options. The module has `run(options)`, and
may have `if_interrupted(options)`, which returns the line for a user who stopped it."""
# First words of the commands whose names have two.
GROUPS = {"data": "prepare data", "mtp": "layers for drafts that come with a target"}
# The usual steps from a target to a served drafter, in order.
USUAL_STEPS = {
    "data regenerate": "let the target write the replies that a drafter learns from",
    "train METHOD": "train a drafter (on several GPUs: accelerate launch -m draftsmith.train)",
    "evaluate": "measure it on held-out prompts, compared with plain decoding",
    "generate": "look at a reply and its accepted drafts",
    "export": "hand it to vLLM, SGLang, TensorRT-LLM, llama.cpp, TGI or transformers",
}


def options_of_verb(verb: str) -> Any:
    """Return the dataclass of a command's options; its module needs no torch."""
    module, _, name = VERBS[verb][1].rpartition(".")
    return getattr(importlib.import_module(f"..{module}", __package__), name)


def purpose_of(verb: str) -> str:
    """Return the first line about a command."""
    return (options_of_verb(verb).__doc__ or "").partition("\n")[0].removesuffix(".")
