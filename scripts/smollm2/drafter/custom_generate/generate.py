"""Decoding with the drafter of this folder, by draftsmith.

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
