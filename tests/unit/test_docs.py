"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_the_page_of_keys_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_docs", REPOSITORY / "scripts" / "make_docs.py")
    make_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_docs)
    assert make_docs.PAGE.read_text() == make_docs.render(), "run `make docs`"


def test_links_between_pages_lead_somewhere():
    for page in (REPOSITORY / "docs").rglob("*.rst"):
        for target in re.findall(r":doc:`([^`]+)`", page.read_text()):
            assert (page.parent / f"{target}.rst").resolve().exists(), f"{page}: {target}"


def test_the_documented_reference_is_the_product_promise():
    promise = REPOSITORY.parent / "shared" / "reference.rst"
    if not promise.exists():
        pytest.skip("the original reference is not beside this checkout")
    assert (REPOSITORY / "docs" / "configuration" / "optimizer.rst").read_text() == promise.read_text()
