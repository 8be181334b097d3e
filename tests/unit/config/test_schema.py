from __future__ import annotations

import typing

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from agent_tunix.config.load import keys, validate
from agent_tunix.config.schema import ChatConfig, Config, EvaluateConfig, ExportConfig, ServeConfig, TrainingSection
from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig

KINDS = (EvaluateConfig, ExportConfig, LrFindConfig, TuneConfig, ServeConfig, ChatConfig)
TRAINING = {
    "method": "grpo",
    "init_from": None,
    "batch_size": None,
    "micro_batch_size": 4,
    "num_batches": None,
    "num_epochs": 1,
    "train_fraction": 0.9,
    "eval_every_n_steps": None,
    "save_interval_steps": None,
    "max_checkpoints_to_keep": 1,
    "on_divergence": "stop",
    "max_kl": 20.0,
    "resume": None,
}


def test_every_key_says_what_it_does():
    undescribed = [key for kind in KINDS for key, field in keys(kind).items() if not field.description]
    assert not undescribed


@pytest.fixture
def oldest(oldest_run):
    """The configuration of the oldest run, and whether it has a key."""
    saved = OmegaConf.load(oldest_run / "config.yaml")

    def has(key: str) -> bool:
        section, _, name = key.rpartition(".")
        return name in ((OmegaConf.select(saved, section) or {}) if section else saved)

    return saved, has


def test_keys_that_the_oldest_run_has_are_given_by_the_yaml_files_alone(oldest):
    """A key that only some choices of its group use may be left out there: null, not given."""
    _, has = oldest
    optional = {k: field.default for k, field in keys(Config).items() if has(k) and not field.is_required()}
    of_schedulers = ("scheduler.lr_min", "scheduler.decay_ratio", "scheduler.num_cycles")
    assert optional == dict.fromkeys(("model.base_dtype", "optimizer.decay_norms", "training.init_step", *of_schedulers))


def test_a_key_that_came_later_has_the_value_by_which_older_runs_were_made(oldest):
    """Without one, every run of before would be unreadable: it could be neither evaluated nor resumed."""
    saved, has = oldest
    lacking = [key for key, field in keys(Config).items() if field.is_required() and not has(key)]
    assert not lacking, "give them in schema.py, as Field(default=...), what older code did; conf/ may give another value"
    assert validate(saved, Config)


def test_every_section_refuses_unknown_keys_and_cannot_be_changed():
    def sections(kind):
        yield kind
        for field in kind.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from sections(field.annotation)

    for section in (section for kind in KINDS for section in sections(kind)):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]


@pytest.mark.parametrize(("batch_size", "prompts"), [(None, 4), (4, 4), (12, 12)])
def test_prompts_a_step(batch_size, prompts):
    assert TrainingSection(**{**TRAINING, "batch_size": batch_size}).prompts_per_step == prompts


def test_an_evaluation_is_configured_by_a_training_configuration_and_more():
    assert set(keys(Config)) < set(keys(EvaluateConfig))
    assert typing.get_type_hints(EvaluateConfig)["run"] == str | None
