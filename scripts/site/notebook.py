"""Write a notebook's cells as Markdown.   python scripts/site/notebook.py NOTEBOOK OUT"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat


def main() -> None:
    """Convert the notebook that the command line names."""
    notebook, out = map(Path, sys.argv[1:])
    cells = nbformat.read(notebook, as_version=4).cells
    blocks = [
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in cells
    ]
    out.write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
