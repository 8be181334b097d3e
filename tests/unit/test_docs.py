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

from agent_tunix.config import guidance
from agent_tunix.config.load import config_folder, keys, validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.doctor import remedies
from agent_tunix.lab.plan import memory
from agent_tunix.lab.plan.plan import shapes
from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig
from agent_tunix.models.checkpoints.loading import parameters
from agent_tunix.models.published import of_repository

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.rst")), *sorted(DOCS.rglob("*.md"))]
# A single plain value; one that is followed by a colon is quoted in a message.
OVERRIDE = re.compile(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)+)=([\w./-]+)(?![\w:<(\[])")
OPTIMIZER_PAGE = DOCS / "configuration" / "optimizer.rst"
VALUE = re.compile(r"^ {4,}([a-z_]+: [\w\[].*?|lr\(t\) = .*?|[a-z_.]+=\S+)(?: *\\)?(?: +#.*)?$", re.MULTILINE)  # or formula
CODE = re.compile(r"^.*(?:=|run_training|^ *[a-z_]+: \S).*$", re.MULTILINE)
FEW_WORDS = 5  # a run of so many is a sentence taken over
MEMORY = re.compile(r"([\d.]+) GB of device memory by `agent-tunix plan`")


def test_models_that_nothing_was_measured_on_have_the_rates_of_the_rule():
    for path in (REPOSITORY / "conf" / "model").glob("*.yaml"):
        model = OmegaConf.load(path)
        if model.guidance is not None and not model.guidance.measured and not path.stem.startswith("gemma3_"):
            by_size = guidance.guidance_by_size(parameters(of_repository(model.weights)))
            assert OmegaConf.to_container(model.guidance) == by_size.model_dump(), path.name


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_override_in_a_page_is_a_key_with_a_value_that_it_takes(page):
    known = keys(TuneConfig) | keys(LrFindConfig)
    for key, value in OVERRIDE.findall(page.read_text()):
        of_users_own = key.startswith(("reward.", "evaluation.sets.", "environment.settings."))
        if key.partition(".")[0] in Config.model_fields and not of_users_own:
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


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the page's list-tables, as plain text; no cell has more than one line."""
    rows = re.findall(r"^   \* - (.*)\n((?:     -.*\n)*)", page, re.MULTILINE)
    cells = [[first, *re.findall(r"     -(?: (.*))?", others)] for first, others in rows]
    return [[re.sub(r"[`*]", "", cell) for cell in row] for row in cells]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]


def test_the_table_of_optimizer_keys_has_the_defaults_and_limits_of_the_code(make_docs):
    rows = {cells[0]: cells[1:] for cells in rows_of(OPTIMIZER_PAGE.read_text()) if len(cells) == 6}
    shipped = OmegaConf.load(REPOSITORY / "conf" / "optimizer" / "adamw.yaml")
    assert rows.keys() - {"Key"} == shipped.keys()
    for key, value in shipped.items():
        _, default, usual, possible, _ = rows[key]
        assert OmegaConf.from_dotlist([f"{key}={default}"])[key] == value, key
        if key in guidance.TYPICAL:
            assert numbers(usual) == [*guidance.TYPICAL[key][:2]], key
        if key != "optimizer_name":
            assert numbers(possible) == numbers(make_docs.bounds(keys(Config)[f"optimizer.{key}"])), key
    assert numbers(rows["learning_rate"][2]) == [remedies.LEAST_RATE, remedies.GREATEST_RATE]
    assert numbers(rows["betas"][2]) == [limit for limits in guidance.TYPICAL_BETAS for limit in limits]


def test_the_optimizer_page_has_the_rates_that_suit_each_model():
    rows = {name: cells[1] for cells in rows_of(OPTIMIZER_PAGE.read_text()) for name in cells[0].lower().split(", ")}
    for path in (REPOSITORY / "conf" / "model").glob("gemma3_*.yaml"):
        suitable = OmegaConf.load(path).guidance.learning_rate
        assert numbers(rows[path.stem.removeprefix("gemma3_")])[:2] == suitable, path.name


@pytest.fixture
def promise() -> str:
    """The reference that was there before the program: what it promises is kept, how it says so is not."""
    path = REPOSITORY.parent / "shared" / "reference.rst"
    if not path.exists():
        pytest.skip("the original reference is not beside this checkout")
    return path.read_text()


def test_the_optimizer_page_keeps_every_number_value_and_formula_of_the_promise(promise):
    page = OPTIMIZER_PAGE.read_text()
    assert set(numbers(promise)) <= set(numbers(page))
    assert len(set(VALUE.findall(promise))) > 30
    assert set(VALUE.findall(promise)) <= set(VALUE.findall(page))


def test_no_text_repeats_what_the_promise_says_of_its_values(promise):
    told = words(promise)
    taken = set(zip(*(told[i:] for i in range(FEW_WORDS)), strict=False))
    for path in (*PAGES, *(REPOSITORY / "conf").rglob("*.yaml"), *(REPOSITORY / "src").rglob("*.py")):
        said = words(path.read_text())
        again = taken & set(zip(*(said[i:] for i in range(FEW_WORDS)), strict=False))
        assert not again, f"{path}: {again}"


def words(text: str) -> list[str]:
    """All but commands, settings and formulas."""
    return re.findall(r"[a-z0-9][\w.-]*", CODE.sub("", text).lower())
