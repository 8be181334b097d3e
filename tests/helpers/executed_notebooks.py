"""Runs a notebook as Jupyter does. What the cells of all of them show is written anew by

python tests/helpers/executed_notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def executed(path: Path, folder: Path) -> Any:
    """The notebook with what its cells have shown; they run in `folder`. A cell that raises, raises."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", coalesce_streams=True, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


if __name__ == "__main__":
    import nbformat

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(Path(name), Path(folder)), name)
