"""Help pages at the widths of usual terminals."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from draftsmith.command_line.fields import options_of_class
from draftsmith.command_line.help_text import (
    explanation_of,
    help_page,
    unbroken_pairs,
    usage_of,
    wrapped,
)
from draftsmith.commands.cli import VERBS, options_of_verb
from draftsmith.train.methods.registry import METHODS, method_named
from tests.conftest import ROOT

CLASSES: dict[str, Any] = {
    f"train {name}": lambda name=name: method_named(name).run_class for name in METHODS
}
for verb in VERBS:
    CLASSES[verb] = lambda verb=verb: options_of_verb(verb)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", CLASSES)
def test_help_page_fits_width_without_splitting_code_or_options(
    monkeypatch: pytest.MonkeyPatch, verb: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for everything in (False, True):
        page = help_page(CLASSES[verb](), f"draftsmith {verb}", everything)
        lines = page.splitlines()
        assert max(map(len, lines)) <= columns
        assert all(line.count("`") % 2 == 0 for line in lines), "a piece of code is broken"
        assert "\0" not in page and not [line for line in lines if line.startswith(" `")]
        for line in lines:
            if line.endswith(" \\"):
                last = line.removesuffix(" \\").split()[-1]
                assert not last.startswith("--") or last == "--no-baselines", line
                assert line.count("'") % 2 == 0, line


def test_an_option_stays_with_its_value() -> None:
    command = "draftsmith generate --prompt 'def add(a, b):' --compare --prompts - --seed 5"
    assert wrapped(unbroken_pairs(command), 31, "", "  ", " \\") == [
        "draftsmith generate \\",
        "  --prompt 'def add(a, b):' \\",
        "  --compare --prompts - \\",
        "  --seed 5",
    ]


def test_a_switch_that_is_on_says_what_is_lost_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = help_page(options_of_verb("evaluate"), "draftsmith evaluate", False)
    assert "--no-baselines        Do not measure the n-gram" in page
    assert "--json FILE " in page
    assert "greedy decoding. (1)" in help_page(options_of_verb("serve"), "draftsmith serve", True)
    assert "(1e9)" in help_page(options_of_verb("data plan"), "draftsmith data plan", False)


# Words for a value, each with a word that the explanation of the option must contain.
MEANINGS = {
    "FILE": "[Ff]ile|JSON|Prompts|[Pp]rofile|prompts|Conversations|Replies|[Cc]onfig",
    "FILE,FILE,...": "Sources",
    "FOLDER": "[Ff]older|[Ss]tore|Target|Drafter|Model",
    "PATH": "files.*folders",
    "NAME": "[Nn]ame|GPU|Known target|Repository|Split|Licence|implementation|Activation",
    "DRAFTER": "[Dd]rafter",
    "ENGINE": "Engine",
    "URL": "[Aa]ddress",
    "ADDRESS": "Address",
    "DEVICE": "Device",
    "TYPE": "Type of the weights",
    "KEY": "Key",
    "KEY=VALUE": "Change of a key|Value",
    "TEXT": "[Tt]ext|Prompt",
    "JSON": "Variables",
    "TIME": "moment",
    "N/N": r"such as \d+/\d+",
    "N%": r"such as \d%",
}


@pytest.mark.parametrize("verb", CLASSES)
def test_the_form_of_a_value_is_that_of_its_type(verb: str) -> None:
    """A file is not shown as a number, and the word is one of the explanation."""
    for option in options_of_class(CLASSES[verb]()):
        kinds = [option.kind]
        if get_origin(option.kind) in (Union, UnionType):
            kinds = [kind for kind in get_args(option.kind) if kind is not NoneType]
        _, _, form = usage_of(option).partition(" ")
        if not usage_of(option).startswith("-"):  # REPORT..., RUN...: without the option's name
            assert usage_of(option).endswith("...") and "JSON" in option.text, usage_of(option)
            continue
        # A switch that may have a value has the form of the value.
        kind = kinds[1] if kinds[0] is bool and len(kinds) > 1 else kinds[0]
        where = f"{verb} {usage_of(option)}: {option.text}"
        if kind is bool:
            assert not form, where
        elif kind in (int, float):
            assert form == "N", where
        elif get_origin(kind) is Literal:
            choices = [str(choice) for choice in get_args(kind)]
            listed = f"One of {', '.join(choices)}." in explanation_of(option)
            assert form.split("|") == choices or (form == "NAME" and listed), where
        elif get_origin(kind) in (list, tuple) and {*get_args(kind)} & {int, float}:
            assert form == "N,N,...", where
        elif form == "N,N,...":
            # a text of numbers: its default or its explanation shows some
            assert re.search(r"\d[\d.]*,\d", f"{option.default} {option.text}"), where
        else:
            assert re.search(MEANINGS[form.strip("[]")], option.text), where


def test_numbers_and_names_are_not_shown_as_files() -> None:
    page = help_page(CLASSES["train eagle"](), "draftsmith train eagle", True)
    assert "--evaluation.limit N " in page and "--evaluation.tree-nodes N\n" in page
    assert "--data.held-out.sources NAME" in page and "--data.sources FILE,FILE,..." in page


def test_the_documents_list_every_command() -> None:
    """Their purposes are in the generated reference."""
    listed = (ROOT / "docs" / "README.md").read_text()
    for verb in VERBS:
        assert f"`{verb}`" in listed
