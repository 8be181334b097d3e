"""Every configuration key is read by some workflow, or a changed value is refused; test_effect.py has the optimizer's."""

from __future__ import annotations

import inspect
import io
import json
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config import schema
from agent_tunix.config.load import config_folder, keys, section_of, validate
from agent_tunix.config.schema import ChatConfig, Config, EvaluateConfig, ExportConfig, InferenceSection, ServeConfig
from agent_tunix.environments import arithmetic
from agent_tunix.errors import UserError
from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig
from agent_tunix.serve import server
from agent_tunix.training import answering, loading

LONG_RUNS = True  # they share the programs of the others
SMALL = ["model=gemma3_tiny", "training.micro_batch_size=2", "evaluation.num_examples=8", "evaluation.sampled=false"]


def configured(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", ["model=gemma3_tiny", *overrides]), Config)


@pytest.fixture
def reads(monkeypatch) -> set[tuple[type, str]]:
    """The fields that are read from now on, with the class that declares them; checks of the schema itself do not count."""
    found: set[tuple[type, str]] = set()

    def recording(section, name):
        caller = sys._getframe(1).f_code
        checking = caller.co_filename == schema.__file__ and caller.co_name.startswith("_")
        if not checking and name in type(section).__pydantic_fields__:
            found.add((declaring(type(section), name), name))
        return object.__getattribute__(section, name)

    monkeypatch.setattr(schema.Section, "__getattribute__", recording, raising=False)
    return found


def declaring(kind: type, name: str) -> type:
    """The class that a field comes from: an evaluation's configuration inherits those of training."""
    return next(parent for parent in kind.__mro__ if name in inspect.get_annotations(parent))


def declared(kind: type, prefix: str = "") -> dict[tuple[type, str], str]:
    """Every field of a schema with its dotted key."""
    found = {}
    for name, field in kind.model_fields.items():
        if (section := section_of(field)) is not None:
            found |= declared(section, f"{prefix}{name}.")
        else:
            found[declaring(kind, name), name] = f"{prefix}{name}"
    return found


def table(path: Path) -> None:
    """Problems as long as those that are generated, so that the same programs serve."""
    problems = arithmetic.generate(200, 0, "train")
    path.write_text("".join(json.dumps({"q": problem.question, "a": "#### 7"}) + "\n" for problem in problems))


def test_every_other_key_is_read_by_a_workflow(command, reads, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "time", Mock(sleep=lambda seconds: signal.raise_signal(signal.SIGINT)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("How many?\n"))
    table(tmp_path / "rows.jsonl")
    small = [*SMALL, "training.num_batches=1"]
    solvable = ["data.solve_rate=[0.0,1.0]", "data.solve_attempts=2"]
    rows = ["data=jsonl", "data.path=rows.jsonl", "data.question_field=q", "data.answer_field=a", "data.system_prompt=''"]
    played = ["environment.name=agent_tunix.environments.base.Environment"]
    for arguments in (
        ["train", *small, "hydra.run.dir=first"],
        ["train", *small, *rows, "data.answer_pattern='####\\s*(.+)'", *solvable, *played, "hydra.run.dir=second"],
        ["evaluate", "run=first", "evaluation.num_examples=8"],
        ["export", "run=first", "format=merged", "push_to=me/merged"],  # a dry run, which asks no network
        ["lr-find", *small, "lr_find.num_steps=12"],
        ["serve", "run=first", "serve.port=0"],
        ["chat", "run=first"],
        ["tune", *small, "tune.budget=16", "tune.rates=2", "tune.warmup_ratios=[]", "tune.weight_decays=[]", "tune.seeds=2"],
    ):
        outcome = command(*arguments)
        assert outcome.code == 0, outcome.err
    assert "gemma3_tiny reads generated arithmetic only" in command("plan", *SMALL, "data=reasoning_gym").err
    consumed_whole = (InferenceSection,)  # by model_dump; the test below is its
    kinds = (EvaluateConfig, ExportConfig, LrFindConfig, TuneConfig, ServeConfig, ChatConfig)
    ours = {name: key for kind in kinds for name, key in declared(kind).items()}
    assert {key for (kind, name), key in ours.items() if kind not in consumed_whole and (kind, name) not in reads} == set()


@pytest.mark.parametrize(
    "number",
    ["num_layers=5", "vocab_size=48", "query_pre_attn_scalar=64", "rope_local_base=1.0", "family=llama", "tied=false"],
)
def test_a_number_of_the_architecture_that_is_not_the_checkpoints_is_refused(number):
    with pytest.raises(UserError, match=r"is not the model that model\.architecture describes"):
        loading.load_model(configured(f"++model.architecture.{number}"))


def test_a_number_that_no_architecture_has_is_refused():
    with pytest.raises(UserError, match=r"model\.architecture: layers is no number of an architecture"):
        loading.load_model(configured("++model.architecture.layers=4"))


def test_a_number_of_the_architecture_may_differ_from_the_checkpoints_in_its_last_digits():
    assert (
        loading.load_model(configured("++model.architecture.query_pre_attn_scalar=32.00000000000001")).arch.num_layers == 4
    )


def test_a_checkpoint_of_another_family_is_refused():
    with pytest.raises(UserError, match=r"of type gemma3_text; model\.model_family=llama asks for another family"):
        loading.load_model(configured("model.model_family=llama"))


def test_inference_settings_reach_the_sampler(command, monkeypatch):
    seen = []

    def watched(engine, policy, examples, width, key, sampling, temperature, **_):
        seen.append({"top_k": sampling.top_k, "top_p": sampling.top_p, "temperature": temperature})
        raise UserError("seen")

    monkeypatch.setattr(answering, "complete", watched)
    settings = {"temperature": 0.3, "top_k": 7, "top_p": 0.6}
    assert set(settings) == set(InferenceSection.model_fields)
    arguments = [f"inference_config.{field}={value}" for field, value in settings.items()]
    outcome = command("evaluate", "model=gemma3_tiny", "evaluation.num_examples=4", *arguments)
    assert outcome.err == "seen\n"
    assert seen == [settings]


def test_the_summary_lists_the_settings_as_applied(command, tmp_path):
    small = [*SMALL, "training.num_batches=4", "hydra.run.dir=out"]
    schedule = ["scheduler=wsd", "scheduler.decay_ratio=0.5", "scheduler.total_steps=3"]
    outcome = command("train", *small, "optimizer.eps=1e-7", *schedule)
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    as_given = configured("optimizer.learning_rate=3e-6", "optimizer.eps=1e-7").optimizer.model_dump()
    assert summary["optimizer"] == as_given
    applied = {"warmup_steps": 1, "total_steps": 3, "lr_min": 1e-7, "decay_ratio": 0.5, "num_cycles": None}
    assert summary["scheduler"] == {"scheduler_name": "wsd", **applied}
    rates = [json.loads(line)["lr"] for line in (tmp_path / "out" / "metrics.jsonl").open()]
    np.testing.assert_allclose(rates, [3e-6, 6.1e-6 / 3, 1e-7, 1e-7], rtol=1e-5)


def test_every_key_is_known_here():
    assert set(declared(EvaluateConfig).values()) == set(keys(EvaluateConfig))
