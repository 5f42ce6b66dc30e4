"""Arithmetic word problems with random names and numbers.

Every problem is made from one of the templates below, in which `{a:2,9}` is a whole number from 2
to 9. The template is the source of a problem: those of the last groups are held out.
"""

from __future__ import annotations

import itertools
import random
import re

NAMES = (
    "Maria", "Tom", "Aisha", "Ben", "Chloe", "Diego", "Elena", "Farid", "Grace", "Hugo", "Ines",
    "Jack", "Kim", "Leo", "Mei", "Noah", "Olga", "Priya", "Quinn", "Rosa", "Sam", "Tara",
    "Umar", "Vera", "Will", "Yuki", "Zoe",
)  # fmt: skip
ITEMS = (
    "apples", "pencils", "stickers", "marbles", "books", "cookies", "postcards", "seashells",
    "balloons", "coins", "beads", "tickets", "oranges", "buttons", "stamps", "cards",
)  # fmt: skip
TEMPLATES = {
    "train": (
        "{N} has {a:3,40} {I} and buys {b:2,30} more. How many {I} does {N} have now?",
        "{N} had {a:30,90} {I} and gave {b:2,25} of them to {M}. How many {I} are left?",
        "A box holds {a:4,24} {I}. How many {I} are in {b:3,15} boxes?",
        "{N} earns {a:8,30} dollars an hour and works {b:4,9} hours a day for {c:2,6} days. "
        "How much does {N} earn in total?",
        "{N} reads {a:10,40} pages every day. How many days does a book of {b:100,400} pages take?",
        "A train travels at {a:40,120} miles per hour for {b:2,8} hours. How far does it go?",
        "{N} buys {a:2,9} {I} for {b:2,12} dollars each and pays with {c:100,150} dollars. "
        "How much change does {N} get?",
        "There are {a:4,12}0 students in a school, and {b:2,30} of them are absent. How many "
        "students are present?",
        "A rectangle is {a:3,25} cm long and {b:2,20} cm wide. What is its area?",
        "A rectangle is {a:3,25} m long and {b:2,20} m wide. What is its perimeter?",
        "{N} saves {a:5,50} dollars every week. How much has {N} saved after {b:4,52} weeks?",
        "{N} and {M} have {a:20,80} {I} together. {N} has {b:2,18} more than {M}. How many {I} "
        "does {M} have?",
        "A shirt costs {a:20,90} dollars and is sold with a discount of {b:1,5}0 percent. What is "
        "its new price?",
        "{N} runs {a:2,10} km on Monday, twice as far on Tuesday, and {b:1,6} km on Wednesday. "
        "How many km does {N} run in total?",
        "{N} bakes {a:24,96} cookies and puts {b:4,8} into each bag. How many full bags are there?",
        "A tank holds {a:100,500} litres. It loses {b:2,9} litres an hour. How much is left after "
        "{c:3,20} hours?",
        "{N} is {a:20,45} years old. {M} is {b:3,15} years younger. How old will {M} be in "
        "{c:2,10} years?",
        "A farmer has {a:10,40} cows and {b:10,60} chickens. How many legs do they have in total?",
        "What is {a:11,99} plus {b:11,99}? Explain every step.",
        "Compute {a:3,12} * {b:11,30} - {c:2,40}. Think step by step.",
        "Solve for x: {a:2,9}x + {b:1,30} = {c:31,90}.",
        "If {a:2,6} {I} cost {b:6,24} dollars, how much do {c:7,20} {I} cost?",
        "What is the average of {a:1,50}, {b:1,50} and {c:1,50}?",
        "A recipe for {a:2,4} people needs {b:100,400} grams of flour. How much flour is needed "
        "for {c:5,12} people?",
        "{N} types {a:30,90} words per minute. How many words does {N} type in {b:5,45} minutes?",
        "How many minutes are there in {a:2,12} hours and {b:5,55} minutes?",
        "{N} has {a:2,9} five-dollar notes and {b:2,9} ten-dollar notes. How much money is that?",
    ),
    "valid": (
        "A bus has {a:30,60} seats. At the first stop {b:10,25} people get on, at the second stop "
        "{c:2,9} get off. How many seats are free?",
        "{N} plants {a:3,12} rows of {b:5,15} tulips. {c:4,14} of them do not grow. How many "
        "tulips grow?",
        "A phone plan costs {a:10,40} dollars a month plus {b:2,9} cents per message. What does "
        "a month with {c:50,200} messages cost?",
    ),
    "test": (
        "{N} cuts a rope of {a:60,200} cm into pieces of {b:4,12} cm. How many pieces are there, "
        "and how much rope is left?",
        "A shop sells {a:20,60} {I} on Monday, {b:5,15} fewer on Tuesday and twice as many as on "
        "Tuesday on Wednesday. How many {I} does it sell in the three days?",
        "{N} and {M} share a bill of {a:30,120} dollars and add a tip of {b:10,20} percent. How "
        "much does each of them pay?",
        "A car uses {a:5,9} litres of fuel for 100 km. Fuel costs {b:1,3} dollars per litre. What "
        "does a trip of {c:2,9}00 km cost?",
        "{N} has {a:3,9} jars with {b:10,40} {I} in each. After a third of all {I} is given away, "
        "how many are left?",
        "A garden is a square with a side of {a:4,20} m. A fence costs {b:3,15} dollars per metre. "
        "What does a fence around the garden cost?",
    ),
}  # fmt: skip


def word_problems(split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return the source and the text of `count` different problems of a split."""
    chosen: dict[str, str] = {}
    draw = random.Random(f"{split} {seed}")
    # Some templates have few different problems: the next one takes their turn.
    for number, template in itertools.cycle(enumerate(TEMPLATES[split])):
        if len(chosen) == count:
            break
        chosen.setdefault(fill(template, draw), f"word-problem-{split}-{number}")
    return [(source, text) for text, source in chosen.items()]


def fill(template: str, draw: random.Random) -> str:
    """Return `template` with names, things and numbers in place of its fields."""
    name, other = draw.sample(NAMES, 2)
    text = template.replace("{N}", name).replace("{M}", other)
    text = text.replace("{I}", draw.choice(ITEMS))
    return re.sub(
        r"\{\w:(\d+),(\d+)\}",
        lambda found: str(draw.randint(int(found[1]), int(found[2]))),
        text,
    )
