"""The notebooks run from their first cell to their last, as Jupyter runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from executed_notebooks import executed

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parity
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path):
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    notebook = executed(path, tmp_path)
    assert [*tmp_path.rglob("config.yaml")]
    assert all(cell["execution_count"] for cell in notebook.cells if cell["cell_type"] == "code")
    if path.stem == "1_quick_start":
        assert any("40-18=22" in str(cell["outputs"]) for cell in notebook.cells if cell["cell_type"] == "code")
