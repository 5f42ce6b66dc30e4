"""transformers: `generate` with a drafter, by draftsmith itself.

This file is not called after the package, which it would hide from a script in this folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from . import limits
from .engine import ExportRequest, FileLayout, Recipe, ServingEngine

FOLDER = "custom_generate"
CODE = '''"""Decoding with the drafter of this folder, by draftsmith.

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)

transformers runs this file, and no other code of the folder, because trust_remote_code allows it:
read it first. Everything else is done by the package draftsmith, which has to be installed. The
text is that of plain generate; in lower precision than float32 near-ties may be decided otherwise.
"""

import sys


def generate(model, *, drafter=None, **arguments):
    """Return what model.generate(**arguments) returns, in fewer passes of the model.

    drafter is the drafter's folder or hub repository, if custom_generate does not name it.
    """
    try:
        from draftsmith.inference.serving.transformers_generate import generate_with
    except ImportError as error:
        raise ImportError(
            "this drafter decodes with draftsmith, which is not installed: pip install draftsmith"
        ) from error
    if drafter is None:
        # transformers runs a copy of this file elsewhere and does not hand the folder's name on,
        # but the function that calls this one holds it.
        drafter = sys._getframe(1).f_locals.get("custom_generate")
    if drafter is None:
        raise ValueError("give the drafter's folder too: drafter=FOLDER")
    return generate_with(model, str(drafter), **arguments)
'''


def _add_code(folder: Path) -> None:
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "generate.py").write_text(CODE)


def _serve(request: ExportRequest, _: Any) -> str:
    return (
        "python - <<'END'\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({request.target!r})\n"
        f"target = AutoModelForCausalLM.from_pretrained({request.target!r})\n"
        'prompt = tokenizer("The capital of France is", return_tensors="pt")\n'
        # A model's own generation_config may sample, and ends after 20 tokens.
        f"how = dict(custom_generate={request.out!r}, trust_remote_code=True, do_sample=False, "
        "max_new_tokens=64)\n"
        "print(tokenizer.decode(target.generate(**prompt, **how)[0]))\n"
        "END"
    )


TRUST = (
    "`trust_remote_code=True` lets transformers run `custom_generate/generate.py` of this folder, "
    "which calls draftsmith and nothing else; draftsmith has to be installed."
)
ASSISTED = "transformers' own generation takes it as `assistant_model` too, one prompt at a time."
OWN = FileLayout("native", lambda native: (native.config, native.tensors), has_target_head=True)
"""The files as draftsmith reads them, without what only engines of others need."""


EAGLE = Recipe(_serve, (TRUST, limits.DRAFTED_SHARE), layout=OWN)
BLOCK = Recipe(_serve, (TRUST,), layout=OWN)

ENGINE = ServingEngine(
    name="hf",
    title="transformers",
    place=6,
    in_process=True,
    card_tags=("custom_generate",),
    add_files=_add_code,
    recipes={
        "eagle3": EAGLE,
        "eagle1": replace(EAGLE, limits=(limits.ADDED_TOKENS,)),
        "dflash": BLOCK,
        "dspark": BLOCK,
        "medusa": Recipe(_serve, (TRUST, limits.DRAFTED_SHARE), layout=OWN),
        "draft_model": Recipe(_serve, (ASSISTED, TRUST, limits.OTHER_VOCABULARY)),
    },
)
