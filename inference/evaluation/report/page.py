"""Frame of a report's page: one HTML file that holds its style and script and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..results import Report, SettingFigures
from .axes import FULL, HALF
from .script import SCRIPT
from .style import STYLE
from .tables import firsts


def page(title: str, body: str) -> bytes:
    """Return a whole page in UTF-8; `title` is escaped, `body` is HTML already.

    Its content security policy forbids loading anything and running any script but `SCRIPT`,
    whatever texts a report contains.
    """

    # The policy allows style and script by the hash of their exact text between the tags.
    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; style-src 'sha256-{digest(STYLE)}'; "
        f"script-src 'sha256-{digest(SCRIPT)}'; base-uri 'none'; form-action 'none'"
    )
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n<script>{SCRIPT}</script></body></html>\n"
    )
    # A broken tokenizer may have written lone surrogates, which UTF-8 cannot encode.
    return text.encode("utf-8", "replace")


@dataclass(frozen=True)
class Figure:
    """A chart with its title and an optional note."""

    title: str
    draw: Callable[..., str]
    """Returns the chart for a keyword argument `width`; "" if there is nothing to draw."""
    note: str = ""

    def html(self, alone: bool = False) -> str:
        """Return the chart under its title; "" if it is empty.

        A chart that is `alone` in its row is there twice: in half of the page's width, for
        phones and print, and in all of it. The style shows one of them.
        """
        chart = self.draw(width=HALF)
        if not chart:
            return ""
        if alone:
            whole = self.draw(width=FULL).replace("<svg ", '<svg class="full" ', 1)
            chart = chart.replace("<svg ", '<svg class="half" ', 1) + whole
        small = f"<small>{escape(self.note)}</small>" if self.note else ""
        kind = ' class="alone"' if alone else ""
        return f"<figure{kind}><figcaption>{escape(self.title)}{small}</figcaption>{chart}</figure>"


def side_by_side(figures: Sequence[Figure]) -> str:
    """Return figures in rows of two where the page is wide enough; "" if all of them are empty.

    The last of an odd number of figures takes a whole row.
    """
    drawn = [figure for figure in figures if figure.html()]
    if not drawn:
        return ""
    last = len(drawn) - 1
    blocks = [f.html(alone=i == last and i % 2 == 0) for i, f in enumerate(drawn)]
    return f'<div class="figures">{"".join(blocks)}</div>\n'


def folded(summary: str, inside: str, opened: bool = False) -> str:
    """Return HTML that a click on `summary` unfolds, or folds if `opened`; "" if it is empty."""
    if not inside:
        return ""
    tag = "<details open>" if opened else "<details>"
    return f"{tag}<summary>{escape(summary)}</summary>{inside}</details>\n"


def others_folded(report: Report, draw: Callable[[SettingFigures], list[Figure]]) -> str:
    """Return figures of the smallest batches in sight, and those of all others folded.

    `draw` returns the figures of one setting.
    """
    smallest = firsts(report)
    # By identity, since two settings may be equal in all their numbers.
    others = [s for s in report.settings if not any(s is first for first in smallest)]

    def drawn(settings):
        return side_by_side([figure for setting in settings for figure in draw(setting)])

    return drawn(smallest) + folded("Other batch sizes", drawn(others))
