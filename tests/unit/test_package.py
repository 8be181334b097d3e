"""What is handed out: the licence that pyproject.toml names, and a checkpoint of our own making."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import agent_tunix
from agent_tunix.models.checkpoints.hub import find_checkpoint

REPOSITORY = Path(__file__).parents[2]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of LICENSE-2.0.txt at apache.org


def test_the_licence_is_the_unchanged_text_of_the_one_that_is_named():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert hashlib.sha256((REPOSITORY / "LICENSE").read_bytes()).hexdigest() == APACHE_2


@pytest.mark.parametrize("name", ["tiny", "tiny_tool"])
def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tmp_path, monkeypatch, name):
    spec = importlib.util.spec_from_file_location("make_tiny", REPOSITORY / "scripts" / "make_tiny.py")
    make_tiny = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_tiny", make_tiny)  # where its dataclass looks for its own annotations
    spec.loader.exec_module(make_tiny)
    make_tiny.build_tokenizer(make_tiny.RECIPES[name], tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (find_checkpoint(f"package:{name}") / "tokenizer.json").read_bytes()
    assert sum(file.stat().st_size for file in find_checkpoint(f"package:{name}").iterdir()) < 4e6


def test_make_has_the_targets_that_one_looks_for():
    targets = ["help", "install", "demo", "train", "train-quick", "train-sweep", "evaluate", "tensorboard", "show-config"]
    targets += ["version", "test", "docs"]
    done = subprocess.run(
        ["make", "-n", "RUN=runs/mine", "ARGS=seed=3", *targets], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for command in ("run_training.py seed=3", "evaluate.py run=runs/mine seed=3", "run_training.py --cfg job seed=3"):
        assert command in done.stdout
    told = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert {line.split()[1].rstrip("'") for line in told.splitlines()} >= {"install", "train", "evaluate", "show-config"}


def test_the_version_is_one_in_all_places():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == agent_tunix.__version__
    assert f"\n## {agent_tunix.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_all_is_all_extras_that_a_user_may_want_and_the_table_has_every_extra():
    """But for one that builds a package, for which it needs a C compiler."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    (of_all,) = project["optional-dependencies"]["all"]
    for_developers = {"all", "test", "parity", "docs"}
    assert set(of_all.removeprefix("agent-tunix[").rstrip("]").split(",")) == extras - for_developers - {"reasoning-gym"}
    rows = re.findall(r"^\| (`.*?`) \|", (REPOSITORY / "docs" / "getting_started" / "extras.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == extras


def test_types_are_shipped():
    assert (Path(agent_tunix.__file__).parent / "py.typed").is_file()
