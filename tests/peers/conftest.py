"""Fixtures of this folder: prompts for llama.cpp."""

from tests.helpers.llamacpp import prompts, prompts_file  # noqa: F401
