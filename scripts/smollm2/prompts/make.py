"""Prompts of four domains for a small chat model, split by their sources.

    python scripts/smollm2/prompts/make.py seeds --count 4000 --out seeds.jsonl
    draftsmith data regenerate --target models/smollm2-135m-instruct --data seeds.jsonl \\
        --out questions.jsonl --sampling.temperature 0.9 --max-new-tokens 64
    python scripts/smollm2/prompts/make.py prompts --questions questions.jsonl --out FOLDER

The folder gets train, valid and test.prompts.jsonl; train-greedy.prompts.jsonl, every fourth prompt
of train, to be answered greedily too; and long.prompts.jsonl, test prompts of about 1,000 and 4,000
tokens.

Prompts of further kinds, which the target goes on writing from their first words, with questions
about descriptions of packages and about made-up records; without what shares 13 words with a prompt
of the files that are left out (Spec-Bench's, which are for tests alone):

    python scripts/smollm2/prompts/make.py broad-seeds --out broad-seeds.jsonl
    draftsmith data regenerate ... --data broad-seeds.jsonl --out broad-questions.jsonl \\
        --sampling.temperature 0.8 --max-new-tokens 320
    python scripts/smollm2/prompts/make.py broad --questions broad-questions.jsonl --out FOLDER \\
        --leave-out ../shared/data/spec_bench_question.jsonl

With `--parts 1 4` both commands make parts 1 to 3: three times as many further prompts, for
training alone (train-wide).
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
import openings
from functions import NGRAM, WORD
from packages import package_questions, retrieval_questions
from records import record_questions
from translations import translation_questions
from word_problems import word_problems

COUNTS = {
    "train": {"chat": 2400, "reasoning": 1200, "code": 1200, "documents": 900},
    "valid": {"chat": 30, "reasoning": 30, "code": 30, "documents": 30},
    "test": {"chat": 40, "reasoning": 40, "code": 40, "documents": 40},
}
GREEDY_EVERY = 4
SEEDS = {
    "writing": 480, "rewriting": 300, "roleplay": 360, "puzzles": 300, "mathematics": 480,
    "programs": 420, "science": 360, "humanities": 360, "questions": 640, "summaries": 560,
    "passages": 480, "extraction": 240,
}  # fmt: skip
"""Beginnings of prompts, by category: some of them do not become a prompt."""
QUOTED = {
    "train": {"packages": 700, "records": 400, "translation": 500},
    "valid": {"packages": 20, "records": 20, "translation": 20},
}
"""Prompts of a part of `packages.py`, `records.py` and `translations.py` at most."""
RETRIEVED = 400
"""Prompts of a later part with three passages and a question."""
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
    broad_seeds = kinds.add_parser("broad-seeds")
    broad_seeds.add_argument("--out", type=Path, required=True)
    for kind in ("prompts", "broad"):
        prompts = kinds.add_parser(kind)
        prompts.add_argument("--questions", type=Path, required=True)
        prompts.add_argument("--out", type=Path, required=True)
    prompts.add_argument("--leave-out", type=Path, nargs="*", default=[])
    for kind in (broad_seeds, prompts):
        kind.add_argument("--parts", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "END"))
    given = parser.parse_args()
    if given.kind == "seeds":
        write(given.out, chat.seeds(given.count))
        return
    if given.kind == "broad-seeds":
        write(given.out, openings.seeds(SEEDS, range(*given.parts)))
        return
    if given.kind == "broad":
        left_out = runs_of_words(path.read_text() for path in given.leave_out)
        parts = range(*given.parts)
        for split in QUOTED if 0 in parts else ("train",):
            name = f"{split}-{'broad' if 0 in parts else 'wide'}"
            rows = broad_prompts(split, name, given.questions, parts, left_out)
            write(given.out / f"{name}.prompts.jsonl", rows)
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


def broad_prompts(
    split: str, name: str, questions: Path, parts: range, left_out: set[tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return the prompts of a split, in random order, without those that hold what is left out.

    Their ids hold `name`.
    """
    found = [(category, {}, text) for category, text in openings.written(questions, split)]
    for part in parts:
        found += quoted_prompts(split, part)
    texts: dict[str, None] = {}
    rows = []
    for number, (category, facts, text) in enumerate(found):
        if text not in texts and left_out.isdisjoint(runs_of_words([text])):
            row = {"id": f"{category}-{name}-{number}", "category": category, **facts}
            rows.append(row | {"messages": [{"role": "user", "content": text}]})
        texts[text] = None
    print(f"{len(texts) - len(rows)} prompts of {split} hold {NGRAM} words of a file left out")
    random.Random(f"broad {split}").shuffle(rows)
    return rows


def quoted_prompts(split: str, part: int) -> list[tuple[str, dict[str, str], str]]:
    """Return category, facts and text of the prompts of a part that quote something."""
    counts = QUOTED[split]
    licensed = {"packages": package_questions(split, counts["packages"], part)}
    if part > 0:
        licensed["retrieval"] = retrieval_questions(split, RETRIEVED, part)
    drawn = {
        "records": record_questions(split, counts["records"], part),
        "translation": translation_questions(split, counts["translation"], part),
    }
    found: list[tuple[str, dict[str, str], str]] = []
    for category, asked in licensed.items():
        for licence, source, text in asked:
            found.append((category, {"source": source, "licence": licence}, text))
    for category, asked in drawn.items():
        found += [(category, {"source": source}, text) for source, text in asked]
    return found


def runs_of_words(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """Return all runs of `NGRAM` words or signs of texts."""
    runs: set[tuple[str, ...]] = set()
    for text in texts:
        words = WORD.findall(text.lower())
        runs.update(tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    return runs


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
