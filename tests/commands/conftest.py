"""Fixtures of this folder: a hub that takes uploads."""

from tests.helpers.fake_hub import hub  # noqa: F401
