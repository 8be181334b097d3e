"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", REPOSITORY / "scripts" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_keys_is_up_to_date(make_docs):
    assert make_docs.PAGE.read_text() == make_docs.render(), "run `make docs`"


def test_the_curves_of_the_schedules_are_up_to_date_and_shown(make_docs):
    page = (REPOSITORY / "docs" / "configuration" / "schedules.rst").read_text()
    pictures = make_docs.curves()
    assert set(make_docs.CURVES.iterdir()) == set(pictures)
    for path, picture in pictures.items():
        assert path.read_text() == picture, "run `make docs`"
        assert f".. image:: schedules/{path.name}" in page


def test_every_file_of_a_group_is_named_in_the_overview():
    page = (REPOSITORY / "docs" / "configuration" / "overview.rst").read_text()
    for group in ("optimizer", "scheduler", "model", "experiment"):
        for path in (REPOSITORY / "conf" / group).glob("*.yaml"):
            assert f"``{path.stem}``" in page, f"{group}={path.stem}"


def test_links_between_pages_lead_somewhere():
    for page in (REPOSITORY / "docs").rglob("*.rst"):
        for target in re.findall(r":doc:`([^`]+)`", page.read_text()):
            assert (page.parent / f"{target}.rst").resolve().exists(), f"{page}: {target}"


def test_the_documented_reference_is_the_product_promise():
    promise = REPOSITORY.parent / "shared" / "reference.rst"
    if not promise.exists():
        pytest.skip("the original reference is not beside this checkout")
    assert (REPOSITORY / "docs" / "configuration" / "optimizer.rst").read_text() == promise.read_text()
