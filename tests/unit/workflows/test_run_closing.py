"""Commands that a run ends with are to be copied, so each must be one that can be run; and what it is summed up from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_tunix.workflows.closing import _advice, validations


def ended(method: str, rank: int) -> Any:
    training, model = SimpleNamespace(method=method), SimpleNamespace(lora_rank=rank, model_size="1b")
    given = (
        "+experiment=warm_start",
        "model=gemma3_1b",
        f"model.lora_rank={rank}",
        "data.path=rows.jsonl",
        "training.num_epochs=3",
    )
    return SimpleNamespace(cfg=SimpleNamespace(training=training, model=model), overrides=given)


@pytest.mark.parametrize(("rank", "layout"), [(8, "peft"), (0, "merged")])
def test_what_has_no_adapters_is_not_to_be_exported_as_such(rank, layout):
    advice = _advice(ended("grpo", rank), "completed", "", Path("runs/mine"))
    assert advice[1].endswith(f"export run=runs/mine format={layout}")


def test_what_follows_a_warm_start_has_its_model_and_data_and_learns_in_its_own_way():
    advice = _advice(ended("supervised", 8), "completed", "", Path("runs/mine"))
    same = "model=gemma3_1b model.lora_rank=8 data.path=rows.jsonl"
    assert advice[0].endswith(f" {same} training.init_from=runs/mine")
    assert "warm_start" not in advice[0]


def test_evaluations_that_were_spoilt_are_left_out_and_those_made_again_stand_in_their_place(tmp_path):
    spoilt = [{"step": 0}, {"split": "validation", "accuracy": 0.5}, {"step": 2, "split": "validation", "accuracy": None}]
    test = {"step": 4, "split": "test", "accuracy": 0.9}
    later, again = ({"step": step, "split": "validation", "accuracy": 0.25} for step in (4, 0))
    (tmp_path / "evals.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in (*spoilt, test, later, again)))
    assert validations(tmp_path) == [again, later]
