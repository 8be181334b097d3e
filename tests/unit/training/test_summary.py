from __future__ import annotations

import json

from agent_tunix.training.summary import validations


def test_evaluations_that_were_spoilt_are_left_out_and_those_made_again_stand_in_their_place(tmp_path):
    spoilt = [{"step": 0}, {"split": "validation", "accuracy": 0.5}, {"step": 2, "split": "validation", "accuracy": None}]
    test = {"step": 4, "split": "test", "accuracy": 0.9}
    later, again = ({"step": step, "split": "validation", "accuracy": 0.25} for step in (4, 0))
    (tmp_path / "evals.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in (*spoilt, test, later, again)))
    assert validations(tmp_path) == [again, later]
