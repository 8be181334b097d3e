from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from agent_tunix.training import loop


def test_a_run_that_goes_wrong_is_told_of_it_once(write_run, tmp_path):
    folder = write_run(tmp_path / "run", accuracies=(0.0,), status=None)
    cut = [{"step": step, "reward/mean": 0.0, "completion/truncated": 1.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in cut))
    said: list[str] = []
    given: Any = SimpleNamespace(path=folder), None, SimpleNamespace(notice=said.append)
    out = loop.Outputs(*given, rollbacks=[])
    for _ in range(2):
        loop._warn_early(out)
    assert len(said) == 1
    assert said[0].startswith("early warning: answers truncated, 100% of the last completions were cut")
    assert said[0].endswith("generation.max_generation_steps=64")
