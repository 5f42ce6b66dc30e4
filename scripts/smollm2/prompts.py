"""Questions for a small chat model, as rows of messages: 208 to train on, 32 held out, made of
topics and kinds of questions.

python scripts/smollm2/prompts.py --out runs/smollm2
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TOPICS = (
    "the water cycle", "volcanoes", "the Roman Empire", "photosynthesis", "electric cars",
    "baking bread", "chess", "black holes",
    "the French Revolution", "bees", "a thunderstorm", "programming in Python", "budgeting",
    "sleep", "recycling",
    "the immune system", "gardening", "jazz", "the Great Wall of China", "penguins",
    "artificial intelligence",
    "a long train journey", "coffee", "the Olympic Games", "earthquakes", "learning a language",
    "the stock market", "dinosaurs",
    "friendship", "the moon landing",
)  # fmt: skip
QUESTIONS = (
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are common mistakes people make about {}?",
    "Write a four-line poem about {}.",
    "Summarise why {} matters, in three sentences.",
    "Give me a quiz with three questions about {}.",
    "Write an email that invites a friend to a talk on {}.",
)
HELD_OUT = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for train.prompts.jsonl and valid.prompts.jsonl",
    )
    folder = parser.parse_args().out
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    random.Random(0).shuffle(texts)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", texts[:-HELD_OUT]), ("valid", texts[-HELD_OUT:])):
        rows = [
            {"id": f"{name}-{i}", "messages": [{"role": "user", "content": text}]}
            for i, text in enumerate(part)
        ]
        (folder / f"{name}.prompts.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        print(f"{folder / name}.prompts.jsonl: {len(rows)} questions")


if __name__ == "__main__":
    main()
