"""Draw one decoded reply as an SVG: which tokens were drafted and accepted, round by round.

    python scripts/picture.py --out docs/reply.svg

The picture in the README is made with these defaults: the quickstart target, its committed EAGLE-3
drafter, greedy decoding.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from draftsmith.inference import load
from draftsmith.inference.api import Reply
from draftsmith.inference.detokenize import StreamedText

QUICKSTART = Path("scripts/quickstart")
PROMPT = "def __eq__(self, other):"
CHARACTER, LINE, LEFT, TOP = 8.43, 22, 24, 96  # pixels; a monospaced font of 14 px
DRAFTED, OWN, TEXT, SOFT = "#bfe3c4", "#ffd9a8", "#1c2024", "#5c656f"


def pieces_of(reply: Reply, tokenizer: object) -> list[tuple[str, str]]:
    """Return the reply as (text, colour) for each token: accepted drafts in one colour, tokens
    that the target chose itself in the other."""
    first_round_at = len(reply.token_ids) - sum(len(r.tokens) for r in reply.rounds)
    colours = [OWN] * first_round_at  # the prefill's token is the target's own
    for round_ in reply.rounds:
        accepted = min(round_.accepted, len(round_.tokens))
        colours += [DRAFTED] * accepted + [OWN] * (len(round_.tokens) - accepted)
    text = StreamedText(tokenizer, ())
    pieces = []
    for token, colour in zip(reply.token_ids, colours, strict=True):
        pieces.append((text.add([token]), colour))
    return pieces


def svg(pieces: list[tuple[str, str]], caption: str) -> str:
    """Return the picture; every token is a coloured box around its text."""
    boxes, words = [], []
    column = row = widest = 0
    for piece, colour in pieces:
        for number, line in enumerate(piece.split("\n")):
            if number:
                row, column = row + 1, 0
            if line:
                x, y = LEFT + column * CHARACTER, TOP + row * LINE
                width = len(line) * CHARACTER - 1
                boxes.append(
                    f'<rect x="{x:.1f}" y="{y - 16}" width="{width:.1f}" height="20" rx="3" '
                    f'fill="{colour}"/>'
                )
                words.append(
                    f'<text x="{x:.1f}" y="{y}" xml:space="preserve" textLength="{width:.1f}" '
                    f'lengthAdjust="spacingAndGlyphs">{escape(line)}</text>'
                )
                column += len(line)
                widest = max(widest, column)
    width = max(LEFT * 2 + widest * CHARACTER, 760)
    height = TOP + row * LINE + 28
    legend = (
        f'<rect x="{LEFT}" y="50" width="14" height="14" rx="3" fill="{DRAFTED}"/>'
        f'<text x="{LEFT + 20}" y="62" class="soft">drafted, and accepted by the target</text>'
        f'<rect x="{LEFT + 330}" y="50" width="14" height="14" rx="3" fill="{OWN}"/>'
        f'<text x="{LEFT + 350}" y="62" class="soft">chosen by the target itself</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" aria-label="{escape(caption)}">\n'
        f"<style>text {{ font: 14px ui-monospace, Menlo, Consolas, monospace; fill: {TEXT} }} "
        f".soft {{ font: 14px system-ui, sans-serif; fill: {SOFT} }} "
        f".head {{ font: 600 15px system-ui, sans-serif }}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#fff"/>\n'
        f'<text x="{LEFT}" y="32" class="head">{escape(caption)}</text>\n{legend}\n'
        + "\n".join(boxes + words)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default=str(QUICKSTART / "target"))
    parser.add_argument("--drafter", default=str(QUICKSTART / "drafters" / "eagle3"))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    decoder = load(arguments.target, arguments.drafter, device="cpu")
    reply = decoder.generate(arguments.prompt, max_new_tokens=arguments.max_new_tokens)
    count, rounds = len(reply.token_ids), len(reply.rounds)
    caption = f"{count} tokens in {rounds} passes of the target; the text is the target's own"
    pieces = pieces_of(reply, decoder.target.tokenizer)
    Path(arguments.out).write_text(svg(pieces, caption), encoding="utf-8")
    print(f"{arguments.out}: {caption}; tau {reply.tau:.2f}")


if __name__ == "__main__":
    main()
