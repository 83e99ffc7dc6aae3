"""Runs cells in a Jupyter kernel of their own, as a notebook does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def run_cells(cells: list[str], folder: Path) -> list[str]:
    """What each cell printed and showed; a cell that raises fails the test."""
    pytest.importorskip("ipykernel", reason="ipykernel and nbclient run notebooks: pip install 'stormo[notebook]'")
    nbclient = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    return ["".join(map(_text, cell.outputs)) for cell in notebook.cells]


def _text(output: Any) -> str:
    return str(output["text"] if "text" in output else output["data"]["text/plain"])
