"""Changing what stands in a drafter's folder, for tests of what is noticed."""

from pathlib import Path

from draftsmith.heads.artifact import OWN_FILE
from draftsmith.heads.files import facts_of, read_json, write_json


def seal(folder: Path) -> None:
    """Note the checksums of the files as they are now, so that what is wrong in them has to be
    found in another way."""
    own = read_json(folder / OWN_FILE)
    facts = {name: f for name, f in facts_of(folder).items() if name != OWN_FILE}
    # The card of an export is not among its files.
    own["files"] = {
        name: f for name, f in facts.items() if name in own["files"] or "export" not in own
    }
    write_json(folder / OWN_FILE, own)
