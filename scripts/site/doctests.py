"""Extension of griffe: examples in docstrings (`>>>`) become blocks of code on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From the first prompt to the next empty line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of a docstring; Markdown would take them for quotations."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
