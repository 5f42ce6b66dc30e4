"""The mutations that each test tried, for the totals at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.mutations import TOTALS


@pytest.fixture(autouse=True)
def totals(record_property: Callable[[str, object], None]) -> Iterator[None]:
    before = TOTALS.copy()
    yield
    for name, number in (TOTALS - before).items():
        record_property(name, number)
