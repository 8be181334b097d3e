"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from agent_tunix.config.load import config_folder, keys, validate
from agent_tunix.config.schema import Config
from agent_tunix.config.tuning import LrFindConfig, TuneConfig
from agent_tunix.workflows import memory
from agent_tunix.workflows.dry_run import shapes

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.rst")), *sorted(DOCS.rglob("*.md"))]
# A single plain value; one that is followed by a colon is quoted in a message.
OVERRIDE = re.compile(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)+)=([\w./-]+)(?![\w:<(\[])")
MEMORY = re.compile(r"([\d.]+) GB of device memory by `agent-tunix plan`")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_override_in_a_page_is_a_key_with_a_value_that_it_takes(page):
    known = keys(TuneConfig) | keys(LrFindConfig)
    for key, value in OVERRIDE.findall(page.read_text()):
        if key.partition(".")[0] in Config.model_fields and not key.startswith("reward."):
            assert key in known, f"{page}: {key}"
            taken = TypeAdapter(Annotated[known[key].annotation, known[key]])
            taken.validate_python(OmegaConf.select(OmegaConf.from_dotlist([f"{key}={value}"]), key))


def test_experiments_name_the_memory_that_the_plan_counts():
    heads = {path.stem: MEMORY.search(path.read_text()) for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml")}
    said = {name: match[1] for name, match in heads.items() if match}
    assert {"full_training", "small_gpu"} <= said.keys()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        configs = {name: validate(compose("config", [f"+experiment={name}"]), Config) for name in said}
    shown = {name: memory.estimate(shapes(cfg, cfg.generation.max_prompt_length))["peak"] for name, cfg in configs.items()}
    assert said == {name: f"{peak:.1f}" for name, peak in shown.items()}


def test_the_documented_reference_is_the_product_promise():
    promise = REPOSITORY.parent / "shared" / "reference.rst"
    if not promise.exists():
        pytest.skip("the original reference is not beside this checkout")
    assert (REPOSITORY / "docs" / "configuration" / "optimizer.rst").read_text() == promise.read_text()
