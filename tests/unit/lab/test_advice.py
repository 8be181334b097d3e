"""Commands that a run ends with are to be copied, so each must be one that can be run."""

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
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.training import loop


def config_of(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", list(overrides)), Config)


def at_close(*overrides: str) -> list[str]:
    return LabAdvisor().at_close(config_of(*overrides), overrides, Path("runs/mine"), "completed", "")


@pytest.mark.parametrize(("rank", "layout"), [(8, "peft"), (0, "merged")])
def test_what_has_no_adapters_is_not_to_be_exported_as_such(rank, layout):
    advice = at_close("model=gemma3_1b", f"model.lora_rank={rank}")
    assert advice[1].endswith(f"export run=runs/mine format={layout}")


def test_what_a_run_keeps_as_its_best_is_what_is_exported_and_gone_on_from():
    for own in (["model=gemma3_1b"], ["model=gemma3_tiny"], ["+experiment=warm_start"]):
        (export,) = (line for line in at_close(*own, "training.keep_best=accuracy") if " export " in line)
        assert export.endswith("format=peft step=best")
    assert at_close("+experiment=warm_start", "training.keep_best=accuracy")[0].endswith("training.init_step=best")


def test_adapters_over_weights_that_an_earlier_run_has_changed_are_not_to_be_exported_apart(tmp_path):
    (tmp_path / "config.yaml").write_text(config_text(config_of("model=gemma3_1b", "model.lora_rank=0")))
    for folder in (tmp_path, tmp_path / "gone"):
        advice = at_close("model=gemma3_1b", f"training.init_from={folder}")
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
    cfg = config_of(*given)
    command = shlex.split(at_close(*given)[0])
    then = config_of(*(part for part in command if "=" in part))
    for same in ("model", "data", "evaluation", "generation", "reward"):
        assert getattr(then, same) == getattr(cfg, same)
    assert (then.training.init_from, then.training.method) == ("runs/mine", "grpo")
    for same in ("train_fraction", "micro_batch_size", "batch_size"):  # what is held out, and what fits
        assert getattr(then.training, same) == getattr(cfg.training, same)
    assert (then.optimizer, then.training.num_epochs) == (config_of().optimizer, config_of().training.num_epochs)


def test_a_run_that_goes_wrong_is_told_of_it_once(write_run, tmp_path):
    folder = write_run(tmp_path / "run", accuracies=(0.0,), status=None)
    cut = [{"step": step, "reward/mean": 0.0, "completion/truncated": 1.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in cut))
    said: list[str] = []
    given: Any = SimpleNamespace(path=folder), None, SimpleNamespace(notice=said.append)
    out = loop.Outputs(*given, rollbacks=[])
    for _ in range(2):
        loop._warn_early(SimpleNamespace(advisor=LabAdvisor()), out)
    assert len(said) == 1
    assert said[0].startswith("early warning: answers truncated, 100% of the last completions were cut")
    assert said[0].endswith("generation.max_generation_steps=64")
