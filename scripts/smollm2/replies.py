"""Pack the files of target-written replies that come with the project, and unpack them.

    python scripts/smollm2/replies.py pack --out scripts/smollm2/data runs/smollm2/train ...
    python scripts/smollm2/replies.py unpack --out runs/smollm2 scripts/smollm2/data

A packed file has the rows without their texts, which follow from the token ids: training reads the
ids alone. Prompts are packed as they are.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.heads.errors import UserError
from draftsmith.heads.files import whole_file

LEFT_OUT = ("text", "messages")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=["pack", "unpack"])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("files", type=Path, nargs="+", help="files, or folders of them")
    given = parser.parse_args()
    try:
        for path in given.files:
            if given.way == "pack":
                pack(path, given.out / f"{path.name.removesuffix('.jsonl')}.jsonl.xz")
            else:
                for packed in sorted(path.glob("*.xz")):
                    unpack(packed, given.out / packed.stem)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def pack(source: Path, packed: Path) -> None:
    """Write the rows of a file, or of the files of a folder, as one compressed file."""
    lines = [json.dumps(slim(row), separators=(",", ":")) for row in rows_of(source)]
    text = "".join(f"{line}\n" for line in lines)
    data = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    write(packed, data)
    print(f"{packed}: {len(lines)} rows, {len(data) / 1e6:.2f} MB")


def unpack(packed: Path, path: Path) -> None:
    """Write the rows of a compressed file."""
    try:
        data = lzma.decompress(packed.read_bytes())
    except lzma.LZMAError:
        raise UserError(f"{packed} is damaged; check it out again (git checkout)") from None
    write(path, data)
    print(f"{path}: {len(data.splitlines())} rows")


def write(path: Path, data: bytes) -> None:
    """Write a whole file, or none."""
    with whole_file(path) as aside:
        aside.write_bytes(data)


def rows_of(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, or of the files of a folder in the order of their names."""
    files: Iterable[Path] = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def slim(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a reply without what follows from its token ids; a prompt as it is."""
    if "token_ids" not in row:
        return row
    return {key: value for key, value in row.items() if key not in LEFT_OUT}


if __name__ == "__main__":
    main()
