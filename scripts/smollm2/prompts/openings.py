"""Prompts that the target itself goes on writing from their first words, by category.

A chat model that is given the user's turn up to "Write a letter to" writes the rest of the request,
and after "Summarize the following article:" the article too (Magpie, arXiv 2406.08464, with the
turn begun). Split by a hash of the prompt's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chat import SEED, split_of

LONGEST = 2400
"""Characters of a prompt."""
SHORTEST = 20
OPENINGS: Mapping[str, Sequence[str]] = {
    "writing": (
        "Write a short story about", "Write an email to", "Write a poem about",
        "Draft an announcement for", "Write a product description for", "Write a short speech for",
        "Describe a place where", "Write a letter to", "Write an outline of an essay on",
        "Write a review of", "Continue this story:\n\n", "Write a news report about",
    ),
    "rewriting": (
        "Rewrite this sentence so that it is more polite:\n", "Make this text shorter:\n\n",
        "Correct the mistakes in the following paragraph:\n\n",
        "Rewrite the paragraph below for children:\n\n", "Turn this into a list:\n\n",
        "Say this in other words:\n",
    ),
    "roleplay": (
        "You are a teacher. A student asks you:", "You are a doctor who", "Play the part of a",
        "Let's play a game. You are", "Write a dialogue between a", "Answer as if you were",
        "You are the captain of", "Pretend that you live in",
    ),
    "puzzles": (
        "Which of these does not belong with the others:", "If all", "Three friends",
        "A man is standing", "Is the following argument valid?\n", "Suppose that",
        "What comes next:", "Who is older:",
    ),
    "mathematics": (
        "Solve the equation", "What is the area of", "Find all values of", "How many ways",
        "What is the probability that", "Let f(x) =", "Simplify", "Prove that",
        "A shop sells", "If a car", "Twice a number", "What is the remainder when",
    ),
    "programs": (
        "Write a Python function that", "Write a function in C++ that", "Write an SQL query that",
        "Write a JavaScript function to", "How do I read a file in", "Write a bash script that",
        "Find the mistake in this code:\n\n```python\n",
        "What does this code print?\n\n```python\n",
        "Write a HTML page with", "Implement a class for",
    ),
    "science": (
        "Explain how", "What causes", "Why do", "How does a", "What is the difference between",
        "Describe the process of", "What happens when", "What is the function of the",
        "Explain the law of", "What are the properties of",
    ),
    "humanities": (
        "Why did the", "What were the causes of", "Compare the", "What was the influence of",
        "Explain the role of", "Give an overview of the history of", "Who was",
        "What are the arguments for and against", "How has the idea of", "Describe the culture of",
    ),
    "questions": (
        "who was the first", "when did the", "where is the", "what is the name of the",
        "how many", "who wrote", "what year did", "which country", "who played",
        "when was the last time", "what is the capital of", "where does the", "who sings",
        "what does", "how long is", "who is the",
    ),
    "summaries": (
        "Summarize the following article:\n\n",
        "Summarize this news report in three sentences:\n\n",
        "Write a summary of the text below.\n\n", "What are the main points of this article?\n\n",
    ),
    "passages": (
        "Read the passage and answer the question after it.\n\nPassage: ",
        "Use the text below to answer the question.\n\nText: ",
        "Here are three passages. Answer the question with their help.\n\n[1] ",
        "Context: ", "According to the following text, ",
    ),
    "extraction": (
        "List all names of people in this text:\n\n",
        "Extract the dates from the following text:\n\n",
        "Return the following information as JSON:\n\n",
        "Sort these reviews by their sentiment:\n\n",
        "Make a table from this text:\n\n",
    ),
}  # fmt: skip


def seeds(counts: Mapping[str, int], parts: range) -> list[dict[str, Any]]:
    """Return `counts` beginnings of prompts for each category and each of `parts`, cycling through
    the category's openings."""
    return [
        {
            "id": f"{category}-{number}",
            "prompt": SEED + OPENINGS[category][number % len(OPENINGS[category])],
        }
        for category, count in counts.items()
        for number in range(parts.start * count, parts.stop * count)
    ]


def written(path: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield category and text of the prompts of a split that `draftsmith data regenerate` wrote."""
    seen: set[str] = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text = row["text"].removeprefix(SEED).strip()
        # A prompt that was cut off, or that goes on with an answer, asks nothing.
        whole = row["finish_reasons"] == ["stop"] and "<|" not in text
        fits = whole and SHORTEST <= len(text) <= LONGEST and split_of(text) == split
        if fits and text not in seen:
            seen.add(text)
            yield row["id"].rpartition("-")[0], text
