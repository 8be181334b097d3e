from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from agent_tunix.environments.rewards import Scored
from agent_tunix.environments.stream import Example
from agent_tunix.training.metrics import cost_record, reward_record, sample_records
from agent_tunix.training.run_folder import last_step

SCORED = Scored(
    dict(enumerate("abcdef")),
    {"answer": np.float32([0, 1, 0.5, 1, 1, 1])},
    rewards_PG=np.float32([[1, 3, 2], [2, 2, 2]]),
)
ADVANTAGES = np.float32([[-1, 1, 0], [0, 0, 0]])


def test_what_a_batch_says_of_the_policy():
    assert reward_record(SCORED, np.array([True, True, False, True, True, True])) == {
        "reward/mean": 2.0,
        "reward/std": pytest.approx(3**-0.5),
        "reward/answer": 0.75,
        "groups/zero_variance": 0.5,
        "completion/truncated": pytest.approx(1 / 6),
    }


def test_what_a_batch_cost():
    clock = SimpleNamespace(laps={"time/update": 2.0}, total=lambda: 4.0)
    record = cost_record(np.array([2, 4, 6]), clock)
    assert record.pop("memory/peak_gb") > 0
    assert record == {"completion/length": 4.0, "completion/tokens": 12, "time/update": 2.0, "tokens_per_second": 3.0}


def test_the_best_and_the_worst_completion_of_the_first_prompt_are_shown():
    best, worst = sample_records(Example("1+1?", "2", ()), SCORED, ADVANTAGES)
    asked = {"prompt": "1+1?", "answer": "2"}
    assert best == {**asked, "completion": "b", "reward": 3.0, "rewards": {"answer": 1.0}, "advantage": 1.0}
    assert worst == {**asked, "completion": "a", "reward": 1.0, "rewards": {"answer": 0.0}, "advantage": -1.0}


def test_the_last_step_is_that_of_what_can_be_read(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"step": "9"}\n{"loss": 1}\n{"step": 4')
    assert last_step(tmp_path) == 3
