"""The notebooks are as their cells have left them: whole, in order, without a fault, and without a trace of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
OF_A_MACHINE = re.compile(r"/(?:tmp|home|root|Users|work)/|site-packages")
MOVE = re.compile(r"\\u001b\[(?:\d*[A-K]|\?)")  # of a cursor, as a bar's on a terminal
LARGEST = 200_000


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["1_quick_start", "2_tune_and_doctor", "3_your_own"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_what_its_cells_gave(path):
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert len(shown) >= 5
    assert not [output for output in shown if output["output_type"] == "error"]
    assert not OF_A_MACHINE.search(json.dumps(shown))
    assert not MOVE.search(json.dumps(shown))
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    cells = json.loads(path.read_text())["cells"]
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert all((path.parent / link).exists() for link in links)
