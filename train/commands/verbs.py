"""Commands of `draftsmith`: their modules, their options, and what they are for."""

from __future__ import annotations

import importlib
from typing import Any

# A command's module has `run(options)`, and may have `if_interrupted(options)`, which returns the
# line for a user who stopped it.
VERBS = {  # the module of each command, the class of its options, and what it is for
    "data plan": (
        "train.commands.plan",
        "train.planning.options.PlanOptions",
        "what a training run will cost, before anything runs",
    ),
    "data extract": (
        "train.commands.extract",
        "train.commands.options.ExtractOptions",
        "store the target's features, so that training needs no target",
    ),
    "data regenerate": (
        "train.commands.regenerate",
        "train.commands.options.RegenerateOptions",
        "let the target write the replies of a data set",
    ),
    "data split": (
        "train.commands.split",
        "train.commands.options.SplitOptions",
        "set whole conversations aside for evaluation, by a share",
    ),
    "export": (
        "train.commands.exporting",
        "train.commands.options.ExportOptions",
        "a drafter as a serving engine loads it, with the command that serves it",
    ),
    "import": (
        "train.commands.importing",
        "train.commands.options.ImportOptions",
        "a public Medusa, EAGLE, DFlash or DSpark checkpoint becomes a drafter",
    ),
    "evaluate": (
        "inference.evaluation.evaluate",
        "inference.evaluation.options.EvaluateOptions",
        "acceptance and speed of drafters on held-out prompts",
    ),
    "compare": (
        "inference.evaluation.compare",
        "inference.evaluation.options.CompareOptions",
        "tau before and after by category, from reports of one drafter's lineage",
    ),
    "report": (
        "inference.evaluation.report.report",
        "inference.evaluation.options.ReportOptions",
        "evaluations and training runs as one HTML page, or as Markdown tables",
    ),
    "simulate": (
        "inference.evaluation.simulate",
        "inference.evaluation.options.SimulateOptions",
        "what an acceptance is worth: tokens a round, best draft length",
    ),
    "tune": (
        "inference.evaluation.tuning.tune",
        "inference.evaluation.tuning.options.TuneOptions",
        "which tree pays on this machine: measures, searches, writes a profile",
    ),
    "generate": (
        "train.commands.generate",
        "train.commands.options.GenerateOptions",
        "decode prompts, or chat, and show what was accepted",
    ),
    "serve": (
        "inference.serving.serve",
        "inference.serving.options.ServeOptions",
        "a local server with OpenAI's API and a page to chat on",
    ),
    "mtp doctor": (
        "train.commands.mtp.doctor",
        "train.commands.mtp.options.ExamineOptions",
        "is a target's own layer for drafts there, alive, and tuned with it?",
    ),
    "mtp extract": (
        "train.commands.mtp.extract",
        "train.commands.mtp.options.ExtractLayerOptions",
        "the layer for drafts of a target, or of its base model, becomes a drafter",
    ),
    "mtp stitch": (
        "train.commands.mtp.stitch",
        "train.commands.mtp.options.StitchOptions",
        "write a trained layer into a copy of its target's checkpoint",
    ),
    "doctor": (
        "train.commands.doctor",
        "train.commands.options.DoctorOptions",
        "is this machine, target and data fit to run?",
    ),
}

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
    return getattr(importlib.import_module(f"...{module}", __package__), name)
