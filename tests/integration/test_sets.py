"""`evaluation.sets`: further test sets are evaluated beside the validation split, and change nothing else of a run."""

from __future__ import annotations

import contextlib
import json

from same_runs import RUN, records

from agent_tunix.environments import arithmetic
from agent_tunix.training.run_folder import RunFolder

LONG_RUNS = True
FEW = [*RUN, "training.num_batches=2", "training.eval_every_n_steps=2", "training.save_interval_steps=2"]
FEW += ["generation.max_prompt_length=64"]


def test_a_run_with_sets_has_the_numbers_of_one_without(command, tmp_path, monkeypatch):
    problems = arithmetic.generate(12, 0, "test")
    pairs = zip(problems[::2], problems[1::2], strict=True)
    asked = [(f"{one.question} {other.question}", one.answer) for one, other in pairs]  # prompts of another width
    rows = [{"question": question, "answer": answer} for question, answer in asked]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ["+evaluation.sets.hard.path=hard.jsonl", "+evaluation.sets.own.source=arithmetic"]
    assert command("train", *FEW, "hydra.run.dir=without").code == 0
    outcome = command("train", *FEW, *sets, "hydra.run.dir=with")
    assert outcome.code == 0, outcome.err
    plain, beside = tmp_path / "without", tmp_path / "with"
    assert records(beside, "metrics.jsonl") == records(plain, "metrics.jsonl")
    assert records(beside, "samples.jsonl") == records(plain, "samples.jsonl")
    evals = records(beside, "evals.jsonl")
    assert [record for record in evals if "set" not in record] == records(plain, "evals.jsonl")
    of_sets = [(r["step"], r["split"], r["set"], r["n"]) for r in evals if "set" in r]
    assert of_sets == [(step, "test", name, n) for step in (0, 2, 4) for name, n in (("hard", 6), ("own", 8))]
    assert "step 4: hard " in outcome.out
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (beside, plain))
    assert all(ours[key] == theirs[key] for key in ("first_eval", "best_eval", "final_eval"))

    def full(folder, record) -> None:
        if record["step"] == 4 and record.get("set") == "own":
            raise RuntimeError("killed")
        write(folder, record)

    write = RunFolder.evaluation
    with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
        patch.setattr(RunFolder, "evaluation", full)
        assert command("train", *FEW, *sets, "hydra.run.dir=run").code != 0
    assert command("train", "training.resume=run").code == 0
    assert records(tmp_path / "run", "evals.jsonl") == evals
    assert records(tmp_path / "run", "metrics.jsonl") == records(plain, "metrics.jsonl")
    assert_each_is_evaluated(command, tmp_path, evals)


def assert_each_is_evaluated(command, tmp_path, evals) -> None:
    """By evaluate.py with the numbers of training, as lines of JSON; answers tell the problems that were solved."""
    greedy = ["inference_config=greedy", "evaluation.num_examples=8"]
    outcome = command("evaluate", "run=run", *greedy, "evaluation.sets=[hard.jsonl]", "--json")
    assert outcome.code == 0, outcome.err
    own, hard = map(json.loads, outcome.out.splitlines())
    (trained,) = (record for record in evals if record["step"] == 4 and record.get("set") == "hard")
    assert {key: hard[key] for key in trained} == trained
    assert "set" not in own
    low, high = hard["intervals"]["accuracy"]
    assert low <= hard["accuracy"] <= high
    *_, of_own, of_hard = records(tmp_path / "run", "answers.jsonl")
    for record, answers in ((own, of_own), (hard, of_hard)):
        assert sum(answers["right"]) / len(answers["right"]) == record["accuracy"]
    by_training = [one for one in records(tmp_path / "run", "answers.jsonl")[:-2] if one.get("set") == "hard"][-1]
    assert by_training == of_hard
    assert command("compare", "run").code == 0
    outcome = command("evaluate", "run=run", "evaluation.sets=[hard]")
    assert (outcome.code, "there is no hard" in outcome.err) == (2, True)
