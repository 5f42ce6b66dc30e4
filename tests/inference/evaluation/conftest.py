"""Fixtures of this folder: a server that answers as engines do."""

from tests.helpers.engine_server import prompts, serve  # noqa: F401
