"""Prompts of four domains for a small chat model, split by their sources.

    python scripts/smollm2/prompts/make.py seeds --count 4000 --out seeds.jsonl
    draftsmith data regenerate --target models/smollm2-135m-instruct --data seeds.jsonl \\
        --out questions.jsonl --sampling.temperature 0.9 --sampling.max-new-tokens 64
    python scripts/smollm2/prompts/make.py prompts --questions questions.jsonl --out FOLDER

The folder gets train, valid and test.prompts.jsonl; train-greedy.prompts.jsonl, every fourth prompt
of train, to be answered greedily too; and long.prompts.jsonl, test prompts of about 1,000 and 4,000
tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import chat
import library
from word_problems import word_problems

COUNTS = {
    "train": {"chat": 2400, "reasoning": 1200, "code": 1200, "documents": 900},
    "valid": {"chat": 30, "reasoning": 30, "code": 30, "documents": 30},
    "test": {"chat": 40, "reasoning": 40, "code": 40, "documents": 40},
}
GREEDY_EVERY = 4
LONG = {"1,000 tokens": 3600, "4,000 tokens": 15500}
"""Characters of the code in a long prompt, by the length of its prompt."""
LONG_COUNT = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    seeds = kinds.add_parser("seeds")
    seeds.add_argument("--count", type=int, required=True)
    seeds.add_argument("--out", type=Path, required=True)
    prompts = kinds.add_parser("prompts")
    prompts.add_argument("--questions", type=Path, required=True)
    prompts.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.kind == "seeds":
        write(given.out, chat.seeds(given.count))
        return
    for split, counts in COUNTS.items():
        rows = prompts_of(split, counts, given.questions)
        write(given.out / f"{split}.prompts.jsonl", rows)
        if split == "train":
            write(given.out / "train-greedy.prompts.jsonl", rows[::GREEDY_EVERY])
    write(given.out / "long.prompts.jsonl", long_prompts())


def prompts_of(split: str, counts: Mapping[str, int], questions: Path) -> list[dict[str, Any]]:
    """Return the prompts of a split, in random order; test prompts take turns by domain.

    So the first few test prompts are of every domain.
    """
    draw = random.Random(split)
    written = chat.questions(questions, split)
    if len(written) < counts["chat"]:
        raise SystemExit(
            f"error: {questions} has {len(written)} questions for {split}, "
            f"{counts['chat']} are needed; let the target write more"
        )
    rows = [
        {
            "id": f"chat-{split}-{number}",
            "category": "chat",
            "messages": chat.conversation(text, draw),
        }
        for number, text in enumerate(written[: counts["chat"]])
    ]
    for domain, asked in (
        ("reasoning", word_problems(split, counts["reasoning"], 0)),
        ("code", library.code_questions(split, counts["code"], 0)),
        ("documents", library.document_questions(split, counts["documents"], 0)),
    ):
        rows += [
            {
                "id": f"{domain}-{split}-{number}",
                "category": domain,
                "source": source,
                "messages": [{"role": "user", "content": text}],
            }
            for number, (source, text) in enumerate(asked)
        ]
    draw.shuffle(rows)
    return alternately(rows) if split == "test" else rows


def alternately(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first row of every category, then the second ones, and so on."""
    turns: Counter[str] = Counter()
    places: list[tuple[int, str, dict[str, Any]]] = []
    for row in rows:
        places.append((turns[row["category"]], row["category"], row))
        turns[row["category"]] += 1
    return [row for _, _, row in sorted(places, key=lambda place: place[:2])]


def long_prompts() -> list[dict[str, Any]]:
    """Return test prompts that quote the beginnings of modules."""
    return [
        {
            "id": f"{name} {number}",
            "category": name,
            "source": source,
            "messages": [{"role": "user", "content": text}],
        }
        for name, characters in LONG.items()
        for number, (source, text) in enumerate(
            library.module_questions("test", LONG_COUNT, 0, characters)
        )
    ]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of rows, and say what it holds."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = Counter(row.get("category", "seed") for row in rows)
    print(f"{path}: {', '.join(f'{count} {name}' for name, count in sorted(domains.items()))}")


if __name__ == "__main__":
    main()
