"""Questions about the descriptions of installed packages, as their authors wrote them.

The source of a question is the package. Only packages under licences that permit any use are taken;
every prompt names its licence.
"""

from __future__ import annotations

import importlib.metadata
import random
import re
from collections.abc import Iterator, Mapping

import library

KINDS = (
    "Summarize the following text in two sentences.\n\n{}",
    "Summarize this:\n\n{}",
    "What does this software do, and who needs it?\n\n{}",
    "Extract all names of products, people and organizations from this text, as JSON.\n\n{}",
    "List the steps that this text asks the reader to take.\n\n{}",
    "Translate the first paragraph into French.\n\n{}",
    "Rewrite this text for somebody who has never written a program.\n\n{}",
    "Write a short announcement of this release.\n\n{}",
    "What are the requirements and limits that this text names?\n\n{}",
    "Write a headline for this text, and explain your choice.\n\n{}",
)
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software)", re.IGNORECASE)
RESTRICTED = re.compile(r"GPL|MPL|Mozilla|proprietary", re.IGNORECASE)


RETRIEVAL = (
    "Answer the question with the help of these passages.\n\n{passages}\n\nQuestion: {question}",
    "{passages}\n\nBased on the passages above, {question}",
    "Context:\n{passages}\n\nQuestion: {question}\nAnswer:",
)
QUESTIONS = (
    "what is {} for?", "how is {} installed?", "who would use {}, and why?",
    "what can {} do that others cannot?", "what does {} need in order to run?",
)  # fmt: skip
RETRIEVED = 700
"""Characters of a passage among others, at most."""


def package_questions(split: str, count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield licence, source and text of at most `count` questions.

    With the next seed each passage has the next kind of question.
    """
    quoted = passages_of(split, random.Random(f"packages {split} 0"))
    for number, (licence, name, text) in enumerate(quoted[:count]):
        yield licence, name, KINDS[(number + seed) % len(KINDS)].format(text)


def retrieval_questions(split: str, count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield licences, sources and text of `count` questions about one of three passages."""
    draw = random.Random(f"retrieval {split} {seed}")
    quoted = passages_of(split, draw)
    for _ in range(count):
        chosen = draw.sample(quoted, 3)
        passages = "\n\n".join(
            f"[{number}] {name}: {shortened(text)}"
            for number, (_, name, text) in enumerate(chosen, 1)
        )
        question = draw.choice(QUESTIONS).format(draw.choice(chosen)[1])
        text = draw.choice(RETRIEVAL).format(passages=passages, question=question)
        licences, sources = (sorted({row[i] for row in chosen}) for i in (0, 1))
        yield ", ".join(licences), ", ".join(sources), text


def shortened(text: str) -> str:
    """Return a text, or its first words with at most `RETRIEVED` characters."""
    return text if len(text) <= RETRIEVED else text[: RETRIEVED + 1].rpartition(" ")[0]


def passages_of(split: str, draw: random.Random) -> list[tuple[str, str, str]]:
    """Return licence, name and text of the passages of a split, in random order."""
    quoted = [row for row in described() if library.functions.split_of(row[1]) == split]
    draw.shuffle(quoted)
    return quoted


def described() -> Iterator[tuple[str, str, str]]:
    """Yield licence, name and the passages of the description of installed packages."""
    seen: set[str] = set()
    for package in sorted(importlib.metadata.distributions(), key=lambda d: d.name.lower()):
        facts = package.metadata.json
        licence = licence_of(facts)
        if not PERMISSIVE.search(licence) or RESTRICTED.search(licence):
            continue
        for passage in library.cut(prose(str(facts.get("description", "")))):
            if passage not in seen:
                seen.add(passage)
                yield licence, package.name, passage


def licence_of(facts: Mapping[str, str | list[str]]) -> str:
    """Return the licence that a package names, on one line."""
    named = str(facts.get("license_expression") or facts.get("license") or "").strip()
    first = named.splitlines()[0] if named else ""
    if 0 < len(first) <= 60:  # some packages have the whole text of their licence here
        return first
    classified = [c for c in facts.get("classifier", []) if c.startswith("License ::")]
    return "; ".join(c.split(" :: ")[-1] for c in classified)


def prose(description: str) -> str:
    """Return a description without badges, pictures, HTML and bare links."""
    text = re.sub(
        r"\[?!\[[^\]]*\]\([^)]*\)(\]\([^)]*\))?|<[^>]+>|^\.\. .*$", "", description, flags=re.M
    )
    kept = [
        line
        for line in text.splitlines()
        if not re.match(r"\s*(:\w+:|\[[^\]]+\]:|https?://)", line)
    ]
    return "\n".join(kept).strip()
