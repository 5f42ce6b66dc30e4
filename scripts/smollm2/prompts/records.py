"""Questions about tables and JSON of made-up records.

The source of a question is the kind of records and the template; the last templates are held out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence

from word_problems import ITEMS, NAMES

Record = dict[str, str | int | float]
CITIES = ("Lyon", "Osaka", "Quito", "Leeds", "Perth", "Tampa", "Turin", "Nairobi", "Bergen", "Cork")
JOBS = ("engineer", "nurse", "teacher", "cook", "lawyer", "designer", "driver", "chemist")
GENRES = ("novel", "history", "poetry", "travel", "science", "crime")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")


def person(draw: random.Random) -> Record:
    return {
        "name": draw.choice(NAMES), "age": draw.randint(18, 79), "city": draw.choice(CITIES),
        "job": draw.choice(JOBS),
    }  # fmt: skip


def order(draw: random.Random) -> Record:
    return {
        "order": draw.randint(1000, 9999), "customer": draw.choice(NAMES),
        "item": f"{draw.choice(COLOURS)} {draw.choice(ITEMS)}", "quantity": draw.randint(1, 40),
        "price": draw.randint(100, 9999) / 100,
    }  # fmt: skip


def book(draw: random.Random) -> Record:
    return {
        "title": f"The {draw.choice(COLOURS).title()} {draw.choice(ITEMS).title()}",
        "author": draw.choice(NAMES), "year": draw.randint(1890, 2025),
        "genre": draw.choice(GENRES), "pages": draw.randint(80, 900),
    }  # fmt: skip


def flight(draw: random.Random) -> Record:
    start, end = draw.sample(CITIES, 2)
    return {
        "flight": f"{draw.choice('ABKLQ')}{draw.randint(100, 999)}", "from": start, "to": end,
        "departure": f"{draw.randint(0, 23):02}:{draw.choice((0, 15, 30, 45)):02}",
        "minutes": draw.randint(50, 900),
    }  # fmt: skip


KINDS: Mapping[str, Callable[[random.Random], Record]] = {
    "people": person, "orders": order, "books": book, "flights": flight,
}  # fmt: skip
TEMPLATES = {
    "train": (
        "Which of these {kind} has the largest {number}? Explain how you found it.\n\n{data}",
        "Turn the following {kind} into a list of sentences.\n\n{data}",
        "Convert this to CSV:\n\n{data}",
        "Return the {text} of every entry as a JSON list.\n\n{data}",
        "Sort these {kind} by {number}, the smallest first.\n\n{data}",
        "Summarize these {kind} in one paragraph.\n\n{data}",
        "What is the average {number} of these {kind}? Show your work.\n\n{data}",
        "Here are some {kind}:\n\n{data}\n\nGroup them by {text}.",
        "Write this as a Markdown table:\n\n{data}",
        "Check these {kind} for mistakes, and say what looks wrong.\n\n{data}",
    ),
    "valid": ("For each of these {kind}, write one line with {text} and {number}.\n\n{data}",),
    "test": ("How many of these {kind} have a {number} above {limit}?\n\n{data}",),
}


def record_questions(split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return source and text of `count` questions."""
    draw = random.Random(f"records {split} {seed}")
    return [question(split, draw) for _ in range(count)]


def question(split: str, draw: random.Random) -> tuple[str, str]:
    """Return source and text of a question about three to nine records."""
    kind = draw.choice(sorted(KINDS))
    template = draw.choice(TEMPLATES[split])
    rows = [KINDS[kind](draw) for _ in range(draw.randint(3, 9))]
    numbers = [key for key, value in rows[0].items() if not isinstance(value, str)]
    texts = [key for key, value in rows[0].items() if isinstance(value, str)]
    number = draw.choice(numbers)
    text = template.format(
        kind=kind, number=number, text=draw.choice(texts), limit=rows[0][number],
        data=draw.choice((as_table, as_json, as_lines))(rows),
    )  # fmt: skip
    return f"{kind}: {template}", text


def as_table(rows: Sequence[Record]) -> str:
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def as_json(rows: Sequence[Record]) -> str:
    return json.dumps(rows, indent=1)


def as_lines(rows: Sequence[Record]) -> str:
    return "\n".join(", ".join(f"{key}: {value}" for key, value in row.items()) for row in rows)
