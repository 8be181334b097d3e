"""Keys of the public Agent-Tunix are answered by their names here, and what is answered is taken."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.former_keys import ANSWERS, DATA
from agent_tunix.config.load import config_folder, hydra_arguments, validate
from agent_tunix.config.schema import Config, EvaluateConfig
from agent_tunix.errors import UserError

BASE = "model=gemma3_tiny"


def checked(*overrides: str, name="config"):
    kind = EvaluateConfig if name == "evaluate" else Config
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose(name, hydra_arguments([BASE, *overrides])), kind)


def answer(*overrides: str, name="config") -> str:
    """The line on the last of the overrides."""
    with pytest.raises(UserError) as stop:
        checked(*overrides, name=name)
    key = overrides[-1].lstrip("+").partition("=")[0]
    return next(line.strip() for line in str(stop.value).split("\n") if line.strip().startswith(key))


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("training.eval_interval_steps=5", "training.eval_every_n_steps=5"),
        ("training.gradient_accumulation_steps=4", "training.batch_size=16"),
        ("training.num_test_batches=3", "evaluation.num_examples=300"),
        ("reward_function=my_module.right", "+reward.functions.right=my_module.right"),
        ("training.wandb_project=mine", "project_name=mine"),
        ("training.checkpoint_dir=out", "hydra.run.dir=out"),
        ("log_dir=logs", "hydra.run.dir=logs"),
        ("optimizer.beta1=0.8", "optimizer.betas=[0.8,0.999]"),
        ("optimizer.beta2=0.99", "optimizer.betas=[0.9,0.99]"),
        ("training.data_source=tfds", "data.path=tfds:gsm8k"),
        ("training.train_data_dir=data/train", "data.path=data"),
        ("data.source=kaggle", f"data.path={DATA['kaggle']}"),
        ("data.source=hub", "data.path=openai/gsm8k"),
    ],
)
def test_a_former_key_is_answered_by_an_override_that_is_taken(given, here):
    said = answer(given)
    assert here in said.replace("'", "")
    overrides = [part for part in shlex.split(re.split(" here(?:;|$)", said)[0]) if "=" in part and not part.endswith(":")]
    taken = [part for part in overrides if not part.startswith(("hydra.", "training.loggers"))]
    checked(*taken)


def test_both_betas_are_told_together():
    assert "optimizer.betas=[0.8,0.9]" in answer("optimizer.beta2=0.9", "optimizer.beta1=0.8")


@pytest.mark.parametrize("given", ["checkpoint_dir=runs/a/checkpoints", "checkpoint_dir=runs/a"])
def test_what_evaluate_called_a_folder_of_checkpoints_is_its_run(given):
    assert "is run=runs/a here" in answer(given, name="evaluate")


def test_what_is_not_needed_any_more_says_why():
    assert "every record is written at once" in answer("training.flush_every_n_steps=10")


def test_no_key_of_ours_is_taken_for_a_former_one():
    from agent_tunix.config.load import keys

    assert not {key.rpartition(".")[2] for key in keys(EvaluateConfig)} & set(ANSWERS)


def test_what_was_never_a_key_has_the_closest_one_as_before():
    assert answer("optimizer.lr=1e-5").endswith("unknown key; did you mean optimizer.learning_rate?")


def test_a_former_option_of_a_group_and_the_former_dry_run(command):
    outcome = command("train", "model=gemma3_test")
    assert (outcome.code, outcome.err) == (2, "model=gemma3_test is model=gemma3_tiny here.\n")
    outcome = command("train", "--dry-run", BASE, "training.num_batches=7", "training.num_epochs=1")
    assert outcome.code == 0
    assert "updates                 │ 7" in outcome.out


def test_metadata_is_accepted_and_empty_by_default():
    cfg = checked("experiment_name=first try", "project_name=mine", "tags=[a,b]", "description='What it is for.'")
    assert (cfg.experiment_name, cfg.project_name, cfg.tags) == ("first try", "mine", ["a", "b"])
    assert (checked().experiment_name, checked().tags) == (None, [])
