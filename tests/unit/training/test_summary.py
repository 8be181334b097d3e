"""Commands that a run ends with are to be copied, so each must be one that can be run; and what it is summed up from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, config_text, validate
from agent_tunix.config.schema import Config
from agent_tunix.training.summary import _advice, validations


def config_of(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", list(overrides)), Config)


def ended(*overrides: str) -> Any:
    return SimpleNamespace(cfg=config_of(*overrides), overrides=overrides)


@pytest.mark.parametrize(("rank", "layout"), [(8, "peft"), (0, "merged")])
def test_what_has_no_adapters_is_not_to_be_exported_as_such(rank, layout):
    advice = _advice(ended("model=gemma3_1b", f"model.lora_rank={rank}"), "completed", "", Path("runs/mine"))
    assert advice[1].endswith(f"export run=runs/mine format={layout}")


def test_adapters_over_weights_that_an_earlier_run_has_changed_are_not_to_be_exported_apart(tmp_path):
    (tmp_path / "config.yaml").write_text(config_text(config_of("model=gemma3_1b", "model.lora_rank=0")))
    for folder in (tmp_path, tmp_path / "gone"):
        advice = _advice(ended("model=gemma3_1b", f"training.init_from={folder}"), "completed", "", Path("runs/mine"))
        assert advice[1].endswith("export run=runs/mine format=merged")


@pytest.mark.parametrize(
    "given",
    [
        ("+experiment=warm_start", "model=gemma3_1b", "model.lora_rank=8", "data.path=rows.jsonl", "training.num_epochs=3"),
        ("+experiment=warm_start", "training.train_fraction=0.97", "training.micro_batch_size=1", "training.batch_size=6"),
        ("+experiment=quick_test", "training.method=supervised", "evaluation.num_examples=8"),
        ("+experiment=[quick_test,warm_start]", "optimizer=lion"),
    ],
    ids=str,
)
def test_what_follows_a_warm_start_has_its_model_and_data_and_learns_in_its_own_way(given):
    r = ended(*given)
    command = shlex.split(_advice(r, "completed", "", Path("runs/mine"))[0])
    then = config_of(*(part for part in command if "=" in part))
    for same in ("model", "data", "evaluation", "generation", "reward"):
        assert getattr(then, same) == getattr(r.cfg, same)
    assert (then.training.init_from, then.training.method) == ("runs/mine", "grpo")
    for same in ("train_fraction", "micro_batch_size", "batch_size"):  # what is held out, and what fits
        assert getattr(then.training, same) == getattr(r.cfg.training, same)
    assert (then.optimizer, then.training.num_epochs) == (config_of().optimizer, config_of().training.num_epochs)


def test_evaluations_that_were_spoilt_are_left_out_and_those_made_again_stand_in_their_place(tmp_path):
    spoilt = [{"step": 0}, {"split": "validation", "accuracy": 0.5}, {"step": 2, "split": "validation", "accuracy": None}]
    test = {"step": 4, "split": "test", "accuracy": 0.9}
    later, again = ({"step": step, "split": "validation", "accuracy": 0.25} for step in (4, 0))
    (tmp_path / "evals.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in (*spoilt, test, later, again)))
    assert validations(tmp_path) == [again, later]
