"""Loggers as a run calls them: those of a user's own, what becomes of their faults, and what services are told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from agent_tunix.config.imports import OWN
from agent_tunix.errors import UserError
from agent_tunix.training import evaluation
from agent_tunix.training.loggers import base
from agent_tunix.training.loggers.base import Guarded, Labels, keep, kept, logger_class
from agent_tunix.training.loggers.tensorboard import TensorBoard
from agent_tunix.training.run_folder import RunFolder, read_records

OWN_LOGGER = """
import json

class Lines:
    def __init__(self, folder, config):
        self.file = open(folder / "lines.txt", "a")
        self.file.write(json.dumps({"seed": config["seed"]}) + chr(10))

    def scalars(self, step, values):
        self.file.write(json.dumps({"step": step, **values}) + chr(10))

    def rewind(self, step):
        self.file.write(json.dumps({"rewind": step}) + chr(10))

    def close(self):
        self.file.close()

class Broken(Lines):
    def scalars(self, step, values):
        raise SystemExit(5)

class BrokenAtStart(Lines):
    def __init__(self, folder, config):
        raise OSError("no network")

class BrokenAtEnd(Lines):
    def close(self):
        super().close()
        raise OSError("no network")

class BrokenInATable(Lines):
    in_background = True

    def table(self, name, step, rows):
        raise OSError("no network")

class Half:
    def close(self): ...

text = "no class"
"""


@pytest.fixture
def own_loggers(tmp_path, monkeypatch):
    (tmp_path / "own_loggers.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_loggers")
def test_a_run_tells_a_logger_of_the_users_own_what_it_tells_tensorboard(command, tmp_path):
    few = ["+experiment=quick_test", "training.num_batches=2", "evaluation.num_examples=4", "evaluation.sampled=false"]
    few += ["training.micro_batch_size=2", "grpo.num_generations=2", "hydra.run.dir=run"]
    outcome = command("train", *few, "training.loggers=[tensorboard,own_loggers.Lines]")
    assert outcome.code == 0, outcome.err
    first, *told = [json.loads(line) for line in (tmp_path / "run" / "lines.txt").read_text().splitlines()]
    assert first == {"seed": 42}
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    losses = [record["train/loss"] for record in told if "train/loss" in record]
    assert losses == [record["loss"] for record in read_records(tmp_path / "run" / "metrics.jsonl")]
    held_out = [record["validation/accuracy"] for record in told if "validation/accuracy" in record]
    assert held_out == [record["accuracy"] for record in read_records(tmp_path / "run" / "evals.jsonl")]


def guarded(name: str, folder: Path, said: list[str]) -> Guarded:
    return Guarded(logger_class(f"own_loggers.{name}", OWN, print), folder, {"seed": 1}, said.append)


@pytest.mark.usefixtures("own_loggers")
@pytest.mark.parametrize(
    ("name", "fault", "lines"),
    [
        ("BrokenAtStart", "OSError: no network", 0),
        ("Broken", "SystemExit: 5", 0),
        ("BrokenAtEnd", "OSError: no network", 3),
        ("BrokenInATable", "OSError: no network", 2),
    ],
)
def test_a_logger_that_fails_is_told_of_once_and_the_run_goes_on(tmp_path, name, fault, lines):
    said: list[str] = []
    folder = RunFolder(
        tmp_path / "run", open_loggers=lambda: [guarded(name, tmp_path, said), guarded("Lines", tmp_path, [])]
    )
    folder.metrics({"step": 1, "loss": 0.5})
    folder.metrics({"step": 2, "loss": 0.4})
    folder.completions({"step": 2, "split": "validation"}, [{"step": 2, "completion": "two"}])
    with folder.rewinding(1):
        pass
    folder.summary({"status": "completed"})
    folder.close()
    (told,) = said
    assert told.startswith(f"warning: the logger {name}, of training.loggers, failed: {fault}\nThe run goes on without it")
    written = [line for line in (tmp_path / "lines.txt").read_text().splitlines() if "seed" not in line]
    assert len(written) == lines + 3, "the other one is told all"
    assert [record["step"] for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1]


@pytest.fixture
def stuck():
    """A logger that waits for a network, until this is set."""
    network, told = threading.Event(), []

    class Stuck:
        in_background = True

        def __init__(self, folder, config):
            self.place = "at home"

        def scalars(self, step, values):
            network.wait()
            told.append(step)

        def rewind(self, step): ...

        def close(self):
            told.append("closed")

    yield Stuck, network, told
    network.set()


def test_a_run_waits_for_no_network_while_it_trains_and_not_for_ever_at_its_end(tmp_path, monkeypatch, stuck):
    kind, network, told = stuck
    monkeypatch.setattr(base, "PATIENCE", 0.05)
    said: list[str] = []
    logger = Guarded(kind, tmp_path, {}, said.append)
    for step in range(3):
        logger.scalars(step, {})
    logger.close()
    assert told == []
    assert said == [ANY]
    assert "it has not ended within 0.05 s" in said[0]
    network.set()
    logger._thread.join()
    assert told == [0, "closed"], "what it was told in between is passed over"


def test_one_that_is_far_behind_is_given_up(tmp_path, monkeypatch, stuck):
    kind, *_ = stuck
    monkeypatch.setattr(base, "MOST_WAITING", 3)
    monkeypatch.setattr(base, "PATIENCE", 0.05)
    said: list[str] = []
    logger = Guarded(kind, tmp_path, {}, said.append)
    for step in range(9):
        logger.scalars(step, {})
    assert "it is 3 calls behind" in said[-1]
    logger.close()
    assert len(said) == len(set(said)) <= 2


def test_one_in_the_background_is_told_all_in_order_and_says_where_to_look(tmp_path, stuck):
    kind, network, told = stuck
    network.set()
    said: list[str] = []
    logger = Guarded(kind, tmp_path, {}, said.append)
    for step in range(50):
        logger.scalars(step, {})
    logger.close()
    assert told == [*range(50), "closed"]
    assert said == ["Stuck: at home"]


def test_a_package_that_is_missing_is_named_by_its_extra(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base, "PACKAGES", ("no_such_package",))
    (tmp_path / "no_such_package").mkdir()  # as W&B makes one of its own name
    with pytest.raises(UserError, match=r"needs no_such_package: pip install 'agent-tunix\[no_such_package\]'"):
        logger_class("no_such_package", OWN, print)


def test_an_evaluation_of_a_run_goes_on_without_a_service_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(evaluation, "is_installed", lambda package: package != "wandb")
    trained = SimpleNamespace(training=SimpleNamespace(loggers=["tensorboard", "wandb", "mlflow", "my_module.Mine"]))
    said: list[str] = []
    assert evaluation._loggers(SimpleNamespace(run="run"), trained, said.append) == ["tensorboard", "mlflow"]
    (told,) = said
    assert told.startswith("warning: wandb, which the run has told of its training, is not installed")
    assert evaluation._loggers(SimpleNamespace(run=None), trained, said.append) == trained.training.loggers


def test_every_service_has_an_extra_and_is_imported_only_when_a_run_opens_it():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert set(base.PACKAGES) <= project["optional-dependencies"].keys()
    code = "import sys, agent_tunix.training.loop, agent_tunix.training.evaluation; print({*sys.modules} & {*sys.argv[1:]})"
    loaded = subprocess.run([sys.executable, "-c", code, *base.PACKAGES], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"


def test_a_run_is_called_by_its_metadata_or_by_its_folder(tmp_path):
    plain = Labels.of(tmp_path / "runs" / "monday", {"seed": 1, "model": {}})
    assert plain == Labels(project=None, name="monday", group=None, tags=(), description=None)
    metadata = {"experiment_name": "ablation", "project_name": "maths", "tags": ["a"], "description": "without kl"}
    whole = Labels(project="maths", name="ablation", group=None, tags=("a",), description="without kl")
    assert Labels.of(tmp_path / "monday", metadata) == whole
    assert Labels.of(tmp_path / "monday", dict.fromkeys(metadata)).name == "monday"
    job = Labels.of(tmp_path / "sweep" / "3", metadata)
    assert (job.name, job.group) == ("ablation/3", "sweep")
    assert Labels.of(tmp_path / "sweep" / "3", {}).name == "sweep/3"


@pytest.mark.parametrize("damaged", ["", "[1]", "{", "[" * 9999])
def test_a_damaged_record_of_an_id_is_none(tmp_path, damaged):
    keep(tmp_path, "wandb", id="abc")
    assert kept(tmp_path, "wandb") == {"id": "abc"}
    (tmp_path / "loggers" / "wandb.json").write_text(damaged)
    assert kept(tmp_path, "wandb") == {}


@pytest.mark.usefixtures("own_loggers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_loggers.Half", "own_loggers.Half is no logger: it lacks scalars, rewind"),
        ("own_loggers.text", "own_loggers.text is no logger: it is no class"),
        ("own_loggers.Missing", "training.loggers=own_loggers.Missing"),
        ("tensorbord", "training.loggers=tensorbord"),
    ],
)
def test_what_is_no_logger_is_refused_by_name(name, said):
    with pytest.raises(UserError) as refused:
        logger_class(name, OWN, print)
    assert said in str(refused.value)


def test_tensorboard_has_a_name_of_its_own():
    assert logger_class("tensorboard", OWN, print) is TensorBoard
