"""`agent-tunix lr-find` on the tiny model, whose good rates are known: 2e-6 to 3e-5."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from agent_tunix import cli
from agent_tunix.errors import UserError
from agent_tunix.lab.lr_find import lr_find
from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
SMALL = ["evaluation.num_examples=8", "hydra.run.dir=out"]


@pytest.mark.parity  # it takes long
def test_the_suggestion_lies_where_a_full_sweep_finds_the_good_rates(command, tmp_path):
    outcome = command("lr-find", "+experiment=quick_test", "lr_find.num_steps=20", *SMALL)
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "out" / "lr_find.json").read_text())
    assert list(found) == ["rates", "reward", "kl", "score", "suggested", "range", "conclusion", "beyond"]
    assert 2e-6 <= found["suggested"] <= 3e-5
    assert found["range"][0] < found["suggested"] < found["range"][1]
    assert f"optimizer.learning_rate={found['suggested']:g}" in outcome.out
    assert found["conclusion"] in outcome.out.replace("\n", " ")

    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert found["rates"] == [record["lr"] for record in records]
    assert found["reward"] == [record["reward/mean"] for record in records]
    assert found["rates"] == pytest.approx([1e-7 * 1e4 ** (t / 19) for t in range(len(records))], rel=1e-4)
    assert len(records) < 20, "the ramp ends where the reward has fallen"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "completed"
    asked = f"+experiment=quick_test evaluation.num_examples=8 optimizer.learning_rate={found['suggested']:g}"
    assert summary["advice"][0].endswith(asked)
    assert (tmp_path / "out" / "lr_find.svg").read_text().startswith("<svg")
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_ramp_without_a_signal_says_so_and_what_to_try(command, tmp_path):
    low = ["lr_find.lr_low=1e-12", "lr_find.lr_high=1e-10", "lr_find.num_steps=18", "grpo.beta=0", "grpo.num_iterations=2"]
    low += ["training.on_divergence=rollback"]
    outcome = command("lr-find", "model=gemma3_tiny", "training.micro_batch_size=2", *low, *SMALL)
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "out" / "lr_find.json").read_text())
    assert found["suggested"] is None
    assert found["range"] is None
    assert len(found["rates"]) == 9, "one of each batch"
    own = OmegaConf.load(tmp_path / "out" / "config.yaml")
    assert own.grpo.beta == lr_find.LEAST_BETA, "so that KL is measured"
    assert own.training.on_divergence == "stop", "a ramp is to end there"
    assert found["conclusion"].startswith("No rate from 1.3e-12 to 1.0e-10 raised the reward")
    advice = json.loads((tmp_path / "out" / "summary.json").read_text())["advice"]
    assert advice[0].endswith("lr_find.lr_high=1e-08")


@pytest.mark.parametrize(
    ("interrupted", "made", "advised"),
    [
        (True, 40, "lr_find.num_steps=40"),
        (False, 40, "lr_find.num_steps=60"),
        (False, 60, "lr_find.num_steps=60 grpo.num_generations=8"),
    ],
)
def test_a_ramp_without_a_suggestion_is_advised_what_it_has_not_had(interrupted, made, advised):
    """The data holds 60 updates; a ramp that was interrupted has not shown its own to be too few."""
    cfg = SimpleNamespace(training=SimpleNamespace(prompts_per_step=2), grpo=SimpleNamespace(num_generations=4))
    plan = SimpleNamespace(total_steps=made, iterations=1)
    given = [f"lr_find.num_steps={made}"]
    r = SimpleNamespace(task=SimpleNamespace(train=[None] * 120), cfg=cfg, plan=plan, overrides=given)
    found = {"suggested": None, "rates": [1e-3], "kl": [0.5], "beyond": None}
    [advice] = lr_find._advice(found, r, interrupted, 1e-7)
    assert advice.endswith(f"lr-find {advised}")


def test_a_rate_below_the_runs_lr_min_takes_it_down_with_it():
    """The command would be refused."""
    r = SimpleNamespace(overrides=["lr_find.num_steps=40", "scheduler.lr_min=3e-6", "seed=7"])
    run, sweep = lr_find._advice(
        {"suggested": 6e-6, "range": (2.61e-6, 1e-5), "rates": [1e-3], "beyond": None}, r, False, 3e-6
    )
    assert run.endswith(" scheduler.lr_min=3e-6 seed=7 optimizer.learning_rate=6e-06")
    assert sweep.endswith("--multirun seed=7 optimizer.learning_rate=2.6e-06,6e-06,1e-05 scheduler.lr_min=2.6e-07")


def test_a_ramp_that_a_reward_has_ended_is_to_be_made_again(command, tmp_path, monkeypatch):
    """No rate is to blame for it."""
    monkeypatch.delitem(sys.modules, "no_number", raising=False)
    (tmp_path / "no_number.py").write_text("def mine(prompt, completion, answer):\n    return float('nan')\n")
    assert (
        command("lr-find", "+experiment=quick_test", "+reward.functions.mine=no_number.mine", "hydra.run.dir=out").code == 0
    )
    assert json.loads((tmp_path / "out" / "lr_find.json").read_text())["beyond"] is None
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["advice"][0].endswith("lr_find.num_steps=40")


@pytest.mark.parametrize("rates", [[], [1e-4, 2.345e-4]])
def test_a_ramp_that_began_too_high_is_begun_lower(rates):
    """More steps would not help, nor would they where the first update was the end of it."""
    r = SimpleNamespace(overrides=["lr_find.lr_low=1e-4", "seed=7"], plan=SimpleNamespace(schedule=lambda t: 1e-4))
    found = {"suggested": None, "rates": rates, "kl": [0.5] * len(rates), "beyond": "below"}
    [advice] = lr_find._advice(found, r, False, 1e-7)
    assert advice.endswith(f"lr-find seed=7 lr_find.lr_low=1e-06 lr_find.lr_high={0.00023 if rates else 0.0001:g}")


def test_a_ramp_that_ended_before_the_peak_is_led_further_up_first():
    r = SimpleNamespace(overrides=["seed=7"])
    found = {"suggested": 2.7e-4, "range": (1.9e-4, 3.8e-4), "rates": [1e-7, 1e-3], "beyond": "above"}
    assert lr_find._advice(found, r, False, 1e-7)[0].endswith("lr-find seed=7 lr_find.lr_high=0.1")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lr_find.lr_low=1e-3", "lr_find.lr_high=1e-5"], "lr_find.lr_low=0.001 is not below lr_find.lr_high=1e-05"),
        (["lr_find.num_steps=3"], "lr_find.num_steps=3: must be greater than or equal to 12"),
        (["lr_find.steps=30"], "lr_find.steps: unknown key; did you mean lr_find.num_steps?"),
        (["+experiment=warm_start"], "training.method=supervised: lr-find goes by reward"),
        (["dry_run=true"], "neither dry_run nor training.resume"),
        (["data.num_examples=64"], "the data holds only"),
        (
            ["grpo.num_iterations=5"],
            "with grpo.num_iterations=5 these are 8 batches, too few to judge; set lr_find.num_steps=45",
        ),
    ],
)
def test_what_cannot_be_ramped_is_refused_and_nothing_is_written(command, tmp_path, overrides, said):
    outcome = command("lr-find", "model=gemma3_tiny", *overrides, *SMALL)
    assert outcome.code == 2
    assert said in outcome.err
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_are_not_the_ramps_own_are_not_removed_with_them(command, tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    outcome = command("lr-find", "model=gemma3_tiny", *SMALL)
    assert (outcome.code, "out/checkpoints exists, and a ramp deletes that folder" in outcome.err) == (2, True)
    assert (tmp_path / "out" / "checkpoints").exists()


def test_a_ramp_that_broke_off_is_not_gone_on_with_as_a_run(command, tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise UserError("killed")

    monkeypatch.setattr(lr_find, "_fallen", lambda path, r: True)
    monkeypatch.setattr(lr_find, "_reading", killed)
    outcome = command("lr-find", "model=gemma3_tiny", "training.micro_batch_size=2", "lr_find.num_steps=12", *SMALL)
    assert outcome.err.strip() == "killed"
    assert (tmp_path / "out" / "config.yaml").exists()
    assert "not ended" in json.loads((tmp_path / "out" / "lr_find.json").read_text())["conclusion"]
    again = [(verb, "model=gemma3_tiny", "hydra.run.dir=out") for verb in ("lr-find", "tune", "train")]
    for asked in (("train", "training.resume=out"), ("doctor", "out"), ("export", "run=out"), *again):
        outcome = command(*asked)
        assert outcome.code == 2
        assert "a ramp of lr-find" in outcome.err
        assert "training.resume=" not in outcome.err


def test_ramps_of_a_sweep_are_not_judged_as_runs(command, capsys, tmp_path, write_run):
    for job in "01":
        write_run(tmp_path / "sweep" / job, seed=int(job))
        (tmp_path / "sweep" / job / "lr_find.json").write_text(json.dumps({"rates": [], "suggested": 1e-5}))
    cli.close_sweep(tmp_path / "sweep")
    said = capsys.readouterr().out
    assert "Sweep folder: sweep, with report.html" in said
    assert "Best" not in said
    assert "try:" not in said
    outcome = command("doctor", "sweep")
    assert outcome.code == 2
    assert "sweep/0 is a ramp of lr-find" in outcome.err
