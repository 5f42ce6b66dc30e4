"""The notebook of the documentation runs, from its first cell to its last."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "draftsmith.ipynb"


def printed(cell: Any) -> str:
    """What a cell printed, and its value."""
    parts = [output.get("text", "") for output in cell.outputs if output.get("name") == "stdout"]
    parts += [str(output.data.get("text/plain", "")) for output in cell.outputs if "data" in output]
    return "".join(parts)


def test_stored_notebook_outputs_are_complete_and_machine_independent() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(printed(cell) for cell in cells if "print(" in cell.source)
    # Progress and warnings come with paths of the machine.
    assert not any(o.get("name") == "stderr" for cell in cells for o in cell.outputs)
    assert "vllm serve ../scripts" in printed(cells[-1]) and "/tmp/tmp" not in printed(cells[-1])


@pytest.mark.full
def test_the_notebook_runs() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Raises for a cell that fails.
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": ROOT / "docs"}}).execute()
    text = "\n".join(map(printed, cells))
    assert "the same text: True" in text and "'best'" in text and "vllm serve" in text
    assert text.count("10 of 10 texts identical") == 4  # plain decoding and three drafters
    warned = [
        output
        for cell in cells
        for output in cell.outputs
        if "warning" in str(output).lower() and "TqdmWarning" not in str(output)
    ]
    assert not warned  # transformers' tqdm asks for ipywidgets, and shows its bars as text without
