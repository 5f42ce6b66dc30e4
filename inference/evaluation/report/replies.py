"""Replies of a report token by token, as HTML: how each token came, and how likely it was."""

from __future__ import annotations

import unicodedata
from html import escape

from ..results import Report, Sample
from .page import folded
from .tables import Colours, caption, firsts, number

DEEPEST = 6  # depth that has a colour of its own; deeper drafts share it

LEGEND = (
    '<ul class="legend"><li><i class="d1">1</i> <i class="d2">2</i> <i class="d3">3</i> '
    '<i class="d4">4</i> <i class="d5">5</i> '
    f'<i class="d{DEEPEST}">{DEEPEST}+</i> accepted draft of that depth</li>'
    '<li><i class="own">token</i> the target\'s own, at the end of a round</li>'
    '<li><i class="first">token</i> the prefill\'s, the first of a reply</li></ul>'
    '<p class="note">Point at a token, tap it, or go along with the arrow keys: how it came, the '
    "target's probability of it, and its three best (at temperature 1 where decoding is greedy). "
    "One such bubble is open in the first reply.</p>\n"
)


def replies(report: Report, colours: Colours) -> str:
    """Return the sampled replies of each drafter, token by token and folded.

    The first reply on the page is unfolded, to show what there is.
    """
    blocks: list[str] = []
    for setting in firsts(report):
        views = []
        for name in sorted(setting.drafting, key=lambda name: colours[name]):
            samples = [sample for sample in setting.drafters[name].samples if sample.tokens]
            opened = not blocks and not views
            inside = ""
            for sample in samples:
                inside += folded(_about(sample), reply(sample), opened and not inside)
            count = f"{len(samples)} {'reply' if len(samples) == 1 else 'replies'}"
            views += filter(None, [folded(f"{name}: {count}", inside, opened)])
        if views:
            blocks += [f"<h4>{escape(caption(setting))}</h4>", *views]
    return LEGEND + "".join(blocks) if blocks else ""


def _about(sample: Sample) -> str:
    """Return a reply's title: its id, its turn if a later one, and its numbers of tokens."""
    turn = f", turn {sample.turn + 1}" if sample.turn else ""
    accepted = sum(depth > 0 for depth in sample.came)
    return f"{sample.id}{turn} ({len(sample.tokens)} tokens, {accepted} of them accepted drafts)"


def reply(sample: Sample) -> str:
    """Return one reply as HTML, each token in an element that shows how it came.

    Every text in `sample` is escaped, and characters that cannot be seen are made visible.
    """
    spans = []
    for token, came, p, best in zip(sample.tokens, sample.came, sample.p, sample.best, strict=True):
        # `came` is the depth of an accepted draft, 0 for a bonus token, -1 for the prefill's token.
        if came > 0:
            kind, origin = f"d{min(came, DEEPEST)}", f"accepted draft, depth {came}"
        elif came < 0:
            kind, origin = "first", "from the prefill"
        else:
            kind, origin = "own", "the target's own"
        lines = [origin, f"{quoted(token)}  p = {number(p, '.3f')}"]
        for rank, (text, chance) in enumerate(best, 1):
            lines.append(f"{rank}. {quoted(text)}  {chance:.3f}")
        title = escape("\n".join(lines)).replace("\n", "&#10;")
        spans.append(f'<i class="{kind}" title="{title}">{visible(token)}</i>')
    prompt_text = visible(sample.prompt, False)
    prompt = folded("Prompt", f'<div class="prompt" dir="auto">{prompt_text}</div>')
    label = escape(f"reply to {sample.id}")
    # It can have the focus, so that the arrow keys reach its tokens.
    return (
        f'{prompt}<div class="reply" dir="auto" tabindex="0" role="group" '
        f'aria-label="{label}">{"".join(spans)}</div>'
    )


def quoted(text: str) -> str:
    """Return a token's text on one line, in quotation marks that show where it ends.

    A text that runs from right to left is isolated, so that the numbers after it stay there.
    """
    line = text.replace("\n", "↵").replace("\t", "⇥").translate(_CONTROLS)
    if any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in line):
        line = f"{_ISOLATED}{line}{_ISOLATION_ENDS}"
    return f"\u2018{line}\u2019"


def visible(text: str, marked: bool = True) -> str:
    """Return `text` as HTML for an element that keeps white space.

    If `marked`, every line break has a sign before it, and an empty text is a sign.
    """
    if not text:
        return '<span class="nl">∅</span>' if marked else ""
    safe = escape(text.replace("\r\n", "\n").translate(_CONTROLS))
    return safe.replace("\n", '<span class="nl">↵</span>\n') if marked else safe


_ISOLATED, _ISOLATION_ENDS = "\u2068", "\u2069"
# Control characters become their pictures in Unicode (U+2400 and on). Invisible format characters,
# among them those that turn the direction of a text, become U+FFFD: a reply must not reorder the
# text around it.
_FORMATS = [code for code in range(0x202A, 0x206A) if unicodedata.category(chr(code)) == "Cf"]
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(_FORMATS, 0xFFFD)
