"""Every command on every page is one that would run, every block of code is well formed, and every link leads somewhere.

Commands are composed by Hydra and judged by the schema, as they would be before a run. What a command reads or writes is
not touched: `<folder>` stands for any. Those of the optimizer reference are run in tests/contract.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pages
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from pydantic import BaseModel

from agent_tunix import cli
from agent_tunix.config.launch import launched
from agent_tunix.config.load import config_folder, hydra_arguments, validate
from agent_tunix.config.schema import ChatConfig, Config, EvaluateConfig, ExportConfig, ServeConfig
from agent_tunix.lab.plan import memory
from agent_tunix.lab.plan.plan import shapes
from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
WRITTEN = [page for page in (*DOCS.rglob("*.rst"), *DOCS.rglob("*.md")) if "_build" not in page.parts]
PAGES = [REPOSITORY / "README.md", *sorted(WRITTEN)]
MEASUREMENTS = [*(REPOSITORY / "benchmarks").glob("*.md")]  # whose commands are those of their day
RUN_IN_CONTRACT = DOCS / "configuration" / "optimizer.rst"
LONGEST_README = 120
LARGEST_PICTURE = 150_000
COMPOSED: dict[str, tuple[str, type[BaseModel]]] = {
    "train": ("config", Config),
    "plan": ("config", Config),
    "evaluate": ("evaluate", EvaluateConfig),
    "export": ("export", ExportConfig),
    "serve": ("serve", ServeConfig),
    "chat": ("chat", ChatConfig),
    "tune": ("tune", TuneConfig),
    "lr-find": ("lr_find", LrFindConfig),
}
OF_FOLDERS: dict[str, set[str]] = {  # verbs and their options
    "doctor": {"--json"},
    "report": set(),
    "watch": {"--port"},
    "compare": {"--json"},
    "runs": {"--json"},
    "env": {"--json"},
}
SCRIPTS = {"run_training.py": "train", "evaluate.py": "evaluate"}
OF_OTHERS = {"convert_hf_to_gguf.py"}  # programs that others have written
OWN_GROUPS = {
    "optimizer=mine",
    "+experiment=mine",
    "+experiment=[quick_test,best]",
}  # files that the page tells the reader to save
HYDRA_OPTIONS = {"--dry-run": 0, "--cfg": 1, "--multirun": 0, "--help": 0, "--info": 1, "--resolve": 0, "--json": 0}
PLACE = re.compile(r"[\w/]*<[^<>]+>(?:/\w+)*")
ADDRESS = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(?::\d+)?(?:/\S*)?|https?://(?:127\.0\.0\.1|localhost)(?::\d+)?(?:/\S*)?")
LISTED = re.compile(r"^   (/?[\w./*-]+)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
OURS = re.compile(r"^\|[^|]*\|[^|]*\| `([a-z_]+\.[a-z_]+|seed)` \| `?([^|`]*?)`? \|$", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def hydra_at_work() -> Iterator[None]:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        yield
    composed_of_groups.cache_clear()


@pytest.fixture(autouse=True)
def hydra_stays(hydra_at_work: None) -> Iterator[None]:
    at_work = GlobalHydra.instance().hydra
    yield
    GlobalHydra.instance().hydra = at_work


@functools.cache
def composed_of_groups(name: str, groups: tuple[str, ...]) -> DictConfig:
    return compose(name, list(groups))


def judge(name: str, kind: type[BaseModel], arguments: Sequence[str]) -> None:
    """Raises what is wrong with the arguments of a command; of a sweep, the first and the last job are looked at."""
    groups, values = [], []
    for override in OverridesParser.create().parse_overrides(arguments):
        if override.key_or_group.startswith("hydra"):
            continue
        is_value = override.package is None and ("." in override.key_or_group or override.key_or_group in kind.model_fields)
        is_group = not is_value or (config_folder() / override.key_or_group).is_dir()
        (groups if is_group else values).append(override)
    for chosen in {0, -1}:
        config = copy.deepcopy(composed_of_groups(name, tuple(one_of(override, chosen).input_line for override in groups)))
        for override in (one_of(override, chosen) for override in values):
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
        if "run" in kind.model_fields and OmegaConf.is_missing(config, "run"):
            config.run = "runs/mine"  # a command that is named within a sentence is not always whole
        validate(config, kind)


def one_of(override: Override, chosen: int) -> Override:
    """The override with one of the values that it sweeps over."""
    if not override.is_sweep_override():
        return override
    if override.is_interval_sweep():
        interval = override.value()
        value = (interval.start, interval.end)[chosen]
    else:
        value = list(override.sweep_string_iterator())[chosen]
    return OverridesParser.create().parse_override(f"{override.input_line.partition('=')[0]}={value}")


def judge_verb(verb: str, arguments: list[str]) -> None:
    if verb in OF_FOLDERS:
        assert {argument for argument in arguments if argument.startswith("-")} <= OF_FOLDERS[verb]
        assert "--port" not in arguments or arguments[arguments.index("--port") + 1].isdigit()
    elif verb in COMPOSED:
        arguments, _ = launched(arguments, {})
        options = [argument for argument in arguments if argument.startswith("-")]
        assert set(options) <= HYDRA_OPTIONS.keys()
        words = {word for option in options for word in arguments[arguments.index(option) + 1 :][: HYDRA_OPTIONS[option]]}
        rest = [argument for argument in arguments if argument not in {*options, *words, *OWN_GROUPS}]
        judge(*COMPOSED[verb], hydra_arguments(rest))
    else:
        assert verb in {"--version", *verbs()}, f"{verb} is not a verb of agent-tunix"


@functools.cache
def verbs() -> set[str]:
    """Those that the command names when it is asked for help."""
    return set(
        re.findall(r'"([\w-]+)": \w+', (Path(cli.__file__)).read_text().partition("def main")[2].partition("def ")[0])
    )


def judge_requirements(arguments: list[str]) -> None:
    """Of `pip install`: files are there, extras are ours, and other requirements are well formed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    while arguments:
        argument = arguments.pop(0)
        if argument == "-c":
            assert (REPOSITORY / arguments.pop(0)).is_file()
        elif argument == "-e":
            path, _, extras = arguments.pop(0).partition("[")
            assert path == "."
            assert {extra for extra in extras.rstrip("]").split(",") if extra} <= project["optional-dependencies"].keys()
        else:
            wanted = Requirement(argument)
            assert wanted.name != project["name"] or wanted.extras <= project["optional-dependencies"].keys()


def judge_command(command: str) -> None:
    command = re.sub(r"\[--port N\]|\[--json\]|\[folder \.\.\.\]| \.\.\.|<overrides>|\s&$", "", command)
    command = re.sub(r"=(\w+)(?:\|[\w-]+)+", r"=\1", PLACE.sub("runs/mine", command))
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert {argument for argument in arguments if "=" not in argument} <= {*targets}
    elif program == "pip":
        assert arguments.pop(0) == "install"
        judge_requirements(arguments)
    elif program == "agent-tunix":
        judge_verb(arguments[0], arguments[1:])
    elif arguments[0] == "-c":
        ast.parse(arguments[1])
    elif arguments[0] in SCRIPTS:
        judge_verb(SCRIPTS[arguments[0]], arguments[1:])
    elif arguments[0] not in {"-m", *OF_OTHERS}:
        assert (REPOSITORY / arguments[0]).is_file(), f"{arguments[0]} is not here"


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", [page for page in PAGES if page != RUN_IN_CONTRACT], ids=name_of)
def test_every_command_of_a_page_would_run(page):
    faults = []
    for command in dict.fromkeys(pages.commands(*pages.read(page))):
        try:
            judge_command(command)
        except Exception as fault:
            faults.append(f"{command}\n    {type(fault).__name__}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "command",
    [
        *("make nothing", "pip install -e '.[nothing]'", "agent-tunix nothing", "agent-tunix doctor runs/x --yaml"),
        *("python run_training.py optimizer.lr=1e-5", "python run_training.py model=gemma9", "python scripts/nothing.py"),
        *("python run_training.py --multirun optimizer.learning_rate=1e-5,2", "agent-tunix export run=runs/x format=onnx"),
        *("agent-tunix watch runs/x --port many", "python run_training.py seed=-1", "agent-tunix tune tune.budget=soon"),
    ],
)
def test_a_command_that_would_not_run_is_found(command):
    assert pages.is_command(command)
    with pytest.raises(Exception):  # noqa: B017, PT011
        judge_command(command)


def test_commands_are_found_wherever_they_stand():
    assert sum(len([*pages.commands(*pages.read(page))]) for page in PAGES) > 200
    text = "Say `make docs`.\n\n    A=1 agent-tunix plan x=1 \\\n        y=2\n\n```bash\npip install z\n```\n"
    assert sorted(pages.commands(text, ".md")) == ["agent-tunix plan x=1 y=2", "make docs", "pip install z"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_code_is_well_formed(page):
    parsers = {"python": ast.parse, "yaml": yaml.safe_load, "json": json.loads}
    for language, code in pages.blocks(*pages.read(page)):
        if language in parsers:
            parsers[language](code)


@pytest.mark.parametrize("page", [*PAGES, *MEASUREMENTS], ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    """In the repository to a file, and to one of its headings; to other places by the form of the address alone."""
    for link in pages.links(*pages.read(page)):
        if "://" in link:
            assert ADDRESS.fullmatch(link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(REPOSITORY), link
        assert not anchor or anchor in pages.anchors(*pages.read(target)), link
    for other in pages.RST_PAGE.findall(page.read_text()):
        assert any((page.parent / f"{other}{suffix}").exists() for suffix in (".rst", ".md")), other


def test_every_page_stands_in_the_contents():
    contents = [*DOCS.rglob("index.rst")]
    listed = {(page, entry) for page in contents for entry in LISTED.findall(page.read_text())}

    def stands(page: Path) -> bool:
        place = page.with_suffix("")
        return any(
            fnmatch(str(place), str(REPOSITORY / entry[1:] if entry.startswith("/") else of.parent / entry))
            for of, entry in listed
        )

    missing = [name_of(page) for page in (*WRITTEN, *MEASUREMENTS) if page != DOCS / "index.rst" and not stands(page)]
    assert not missing, "name them in docs/index.rst"


def test_every_experiment_is_named_where_a_reader_looks():
    experiments = (DOCS / "guide" / "experiments.md").read_text()
    for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"):
        assert f"`{path.stem}`" in experiments, path.stem


def test_the_front_page_is_short_and_has_the_two_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= LONGEST_README
    assert re.search(r"^    make demo\b", text, re.MULTILINE)
    assert re.search(r"^    make test\b", text, re.MULTILINE)


def test_pictures_are_small_and_ask_no_one_for_anything():
    pictures = [*(DOCS / "pictures").iterdir()]
    assert {picture.name for picture in pictures} >= {"architecture.svg", "terminal.svg", "report.png", "tune.png"}
    for picture in pictures:
        assert picture.stat().st_size < LARGEST_PICTURE, picture.name
        if picture.suffix == ".svg":
            text = picture.read_text()
            assert "<script" not in text
            assert not re.search(r"(?:href|src)=|url\((?!#)|@import|@font-face", text.replace('url("#', "url(#")), (
                picture.name
            )


def test_the_table_of_memory_has_what_the_plan_counts():
    rows = ROW.findall((DOCS / "getting_started" / "installation.md").read_text())
    assert len(rows) > 5
    sizes = ["training.batch_size=4", "training.micro_batch_size=1", "evaluation.batch_size=16"]
    for name, *shown in rows:
        cfg = validate(compose("config", [f"model={name}", *sizes]), Config)
        for base_dtype, said in zip((None, "int8", "nf4"), shown, strict=True):
            held = cfg.model_copy(update={"model": cfg.model.model_copy(update={"base_dtype": base_dtype})})
            peak = memory.estimate(shapes(held, cfg.generation.max_prompt_length))["peak"]
            assert said == f"{peak:.1f}", f"{name}, {base_dtype}"


@pytest.mark.parametrize("page", ["trl", "google_tunix"])
def test_the_pages_for_those_who_come_from_others_have_our_defaults(page):
    defaults = composed_of_groups("config", ())
    rows = OURS.findall((DOCS / "migrating" / f"{page}.md").read_text())
    assert len(rows) > 5
    for key, said in rows:
        value = OmegaConf.select(defaults, key, throw_on_missing=True)
        assert said in ("", "TensorBoard") or OmegaConf.from_dotlist([f"said={said}"]).said == value, key


def test_what_pages_tell_to_save_is_what_their_commands_need():
    """The experiment that a reader saves is composed, as its commands are not without it."""
    (code,) = (code for language, code in pages.blocks(*pages.read(DOCS / "guide" / "experiments.md")) if language == "yaml")
    saved = yaml.safe_load(code)
    groups = [f"{key.removeprefix('override /')}={value}" for entry in saved.pop("defaults") for key, value in entry.items()]
    values = [f"{section}.{key}={value}" for section, chosen in saved.items() for key, value in chosen.items()]
    judge("config", Config, hydra_arguments([*groups, *values]))
    assert len([*itertools.chain(groups, values)]) > 5
