"""A logger of a user's own: one class, named by its import path."""

from __future__ import annotations

import json

import pytest

from agent_tunix.config.imports import OWN
from agent_tunix.errors import UserError
from agent_tunix.training.loggers.base import logger_class
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


@pytest.mark.usefixtures("own_loggers")
def test_what_a_logger_raises_is_a_message_with_its_name(tmp_path):
    broken = logger_class("own_loggers.Broken", OWN, print)
    folder = RunFolder(tmp_path / "run", open_loggers=lambda: [broken(tmp_path, {"seed": 1})])
    with pytest.raises(UserError, match=r"The logger Broken, of training\.loggers, raised SystemExit: 5"):
        folder.metrics({"step": 1, "loss": 0.5})


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
