"""The documentation site is built without a network and without a warning, and asks no other server for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FROM_OTHERS = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"'](?:https?:)?//|<link[^>]+stylesheet[^>]+href=[\"'](?:https?:)?//"
)


@pytest.mark.parity
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_others(tmp_path):
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e '.[docs]'")
    options = ["-q", "-W", "--keep-going", "-n", "-c", "docs", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    made = [*(tmp_path / "site").rglob("*.html")]
    assert len(made) > 40
    for page in made:
        assert not FROM_OTHERS.search(page.read_text()), page.name
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text()
    assert "What the model writes after each prompt" in (tmp_path / "site" / "docs" / "api" / "python.html").read_text()
