"""Chromium, for tests of pages."""

from __future__ import annotations

import os
import shutil

import pytest


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    if os.environ.get("CI"):
        pytest.fail("no chromium: CI must show the page in a browser, and .ci/run installs one")
    pytest.skip("no chromium")
