"""Notes about a source of rows, each reported once, however many of its rows it is about."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from ..console import several

log = logging.getLogger(__name__)


class Notes:
    """Keys that are not read, and remarks, each of which is reported once for a source."""

    def __init__(self) -> None:
        self._unread: dict[str, None] = {}
        self._remarks: Counter[str] = Counter()

    def not_read(self, names: Iterable[str]) -> None:
        """Note the names of keys that nothing reads."""
        self._unread.update(dict.fromkeys(sorted(names)))

    def remark(self, remark: str) -> None:
        """Note a remark about one more row."""
        self._remarks[remark] += 1

    def lines(self) -> list[str]:
        """Return the notes as sentences, with the number of rows that each remark is about."""
        lines = [f"ignored keys: {', '.join(self._unread)}"] if self._unread else []
        remarks = self._remarks.items()
        return lines + [f"{remark} ({several(count, 'row')})" for remark, count in remarks]

    def report(self, source: str) -> None:
        """Log the notes about a source."""
        for line in self.lines():
            log.warning("%s: %s", source, line)
