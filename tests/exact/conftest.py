"""Fixtures of this folder: the tapes of recorded rounds."""

from tests.helpers.tape import tapes  # noqa: F401
