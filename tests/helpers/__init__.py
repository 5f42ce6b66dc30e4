"""What several test files share. Failed assertions in it are explained as those of tests are."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{file.stem}" for file in Path(__file__).parent.glob("[a-z]*.py"))
)
