from __future__ import annotations

import typing

import pytest
from pydantic import BaseModel

from agent_tunix.config.load import keys
from agent_tunix.config.schema import Config, EvaluateConfig, ExportConfig, TrainingSection
from agent_tunix.config.tuning import LrFindConfig, TuneConfig

KINDS = (EvaluateConfig, ExportConfig, LrFindConfig, TuneConfig)
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


def test_no_key_has_a_default_outside_of_the_yaml_files():
    """A key that only some choices of its group use, or that runs of before it lack, may be left out: null, not given."""
    optional = {k: field.default for kind in KINDS for k, field in keys(kind).items() if not field.is_required()}
    of_schedulers = ("scheduler.lr_min", "scheduler.decay_ratio", "scheduler.num_cycles")
    some = ("model.base_dtype", "optimizer.decay_norms", "training.init_step", *of_schedulers)
    assert optional == dict.fromkeys(some)


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
